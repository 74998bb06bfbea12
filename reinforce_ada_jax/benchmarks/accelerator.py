"""`benchmark accelerator`: the parts of a run beside the limits of the device that they run on, within minutes.

    ceilings    bytes a second of a large copy, operations a second of a large product
    hand_over   the cast of the learner's float32 weights to those that decode
    sampling    prefill: prompts, with one response token each; decode: whole responses, with their prompts' prefill
    loss        log-probabilities over the vocabulary, forward and backward
    attention   of one layer of the learner, forward and backward, by each implementation for the device
    update      one update of the learner

Each part is a process of its own, so that it has the whole memory, and that a part that fails leaves the others alone.
The shares are of the ceilings, which the same device has reached minutes before.
"""

import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from reinforce_ada_jax.benchmarks import engines, inputs, loss, models, rollout, update, workloads
from reinforce_ada_jax.benchmarks import options as options_lib
from reinforce_ada_jax.benchmarks.update_worker import UpdateWorker
from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import platform as platform_lib
from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.learner import choose_attention
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.planning import roofline
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import Architecture, from_hf, to_hf
from reinforce_ada_jax.sampling.engine import TAIL, Engine, enough_open_prompts, enough_pages
from reinforce_ada_jax.sampling.paged_attention import choose_backend
from reinforce_ada_jax.sampling.state import EngineOptions

# Of all parts together; what has not ended by then is reported as missing.
LIMIT_S = 480.0
DEFAULTS = {
    "slots": 256, "window": 64, "page_size": 64, "prefill_tokens": 512, "requests": 256, "prompt_tokens": 512,
    "response_tokens": 512, "rows": 16, "micro_batches": 16,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all parts, as the flags of these names; rows of `loss` and `update` are one prompt and one response."""

    dtype: str
    slots: int
    window: int
    page_size: int
    prefill_tokens: int
    requests: int
    prompt_tokens: int
    response_tokens: int
    rows: int
    micro_batches: int
    copy_mb: int
    repeat: int
    seed: int


def _median_seconds(call: Callable[[], Any], repeat: int) -> float:
    """Returns the median time of a call until its result is there; the first one, which compiles, is left out."""
    seconds = []
    for _ in range(1 + repeat):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def ceilings(architecture: Architecture, sizes: Sizes) -> dict[str, Any]:
    """Returns `ceilings`: the bytes a second of a large copy and the operations a second of a large square product."""
    del architecture
    dtype = jnp.dtype(sizes.dtype)
    side = int((sizes.copy_mb * 2**20 / 8 / dtype.itemsize) ** 0.5) // 128 * 128 or 128
    square = jnp.ones((side, side), dtype)
    seconds = _median_seconds(lambda: product(square), sizes.repeat)
    device = jax.devices()[0]
    found = {
        "copy_bytes_per_s": rollout.copy_bytes_per_s(sizes.copy_mb * 2**20),
        "product_flops_per_s": 2 * side**3 / seconds,
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
    }
    return {"ceilings": found}


@jax.jit
def product(x: jax.Array) -> jax.Array:
    """Returns the product of a square matrix with itself."""
    return x @ x


def hand_over(architecture: Architecture, sizes: Sizes) -> dict[str, Any]:
    """Returns `hand_over`: seconds and bytes, read and written, of the cast from float32."""
    mesh = mesh_lib.make_mesh(data=1)
    engine = Engine(architecture, _engine_options(sizes), mesh=mesh)
    params = transformer.init(architecture, jax.random.key(sizes.seed), mesh)
    seconds = _median_seconds(lambda: engine.decode_weights(params), sizes.repeat)
    itemsize = 0 if engine.decodes_from(params) else 4 + jnp.dtype(sizes.dtype).itemsize
    return {"hand_over": {"seconds": seconds, "bytes": architecture.num_parameters * itemsize}}


def _engine_options(sizes: Sizes) -> EngineOptions:
    options = EngineOptions(
        slots=sizes.slots, window=sizes.window, page_size=sizes.page_size, pages=0, prefill_tokens=sizes.prefill_tokens,
        open_prompts=enough_open_prompts(sizes.slots, 1), max_prompt_tokens=sizes.prompt_tokens,
        max_response_tokens=sizes.response_tokens, stop_ids=(), seed=sizes.seed, dtype=sizes.dtype,
        attention=choose_backend("auto"), tail=TAIL,
    )  # fmt: skip
    return dataclasses.replace(options, pages=enough_pages(options))


def sampling(architecture: Architecture, sizes: Sizes) -> dict[str, Any]:
    """Returns figures of `prefill` and of `decode`, from one engine.

    Those of prefill have the operations of the layers' products, those of decode the bytes that all steps must read.
    """
    params = transformer.init(architecture, jax.random.key(sizes.seed), dtype=jnp.dtype(sizes.dtype))
    options = _engine_options(sizes)
    rollouts, params = engines.make_rollouts(architecture, params, options, 1)

    def drawn(response_tokens: int) -> tuple[float, workloads.Workload]:
        lengths = workloads.constant(response_tokens)
        vocab_size = architecture.vocab_size
        workload = workloads.synthetic(sizes.requests, 1, sizes.prompt_tokens, lengths, vocab_size, sizes.seed)
        seconds = _median_seconds(
            lambda: engines.check_lengths(engines.draw(rollouts, params, workload), workload), sizes.repeat
        )
        return seconds, workload

    seconds, _ = drawn(1)
    tokens = rollouts.counts.prefilled_tokens
    flops = 2 * architecture.num_layers * roofline.layer_weights(architecture) * tokens
    prefill = {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "flops": flops}
    seconds, workload = drawn(sizes.response_tokens)
    tokens, steps = rollouts.counts.tokens, rollouts.counts.slot_steps // sizes.slots
    return {
        "prefill": prefill,
        "decode": {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "steps": steps,
            "bytes": engines.decode_bytes(architecture, workload, steps, options),
            "attention": options.attention,
        },
    }


def head_loss(architecture: Architecture, sizes: Sizes) -> dict[str, Any]:
    """Returns `loss`: seconds of value and gradients at the output head for the responses of a micro-batch."""
    size, dtype = architecture.hidden_size, jnp.dtype(sizes.dtype)
    chosen = platform_lib.of_mesh(mesh_lib.make_mesh(data=1), LearningConfig(), architecture, dtype)
    rows = sizes.rows // sizes.micro_batches
    shape = rows, sizes.response_tokens
    keys = jax.random.split(jax.random.key(sizes.seed), 3)
    arguments = (
        jax.random.normal(keys[0], (*shape, size), dtype),
        jax.random.normal(keys[1], (architecture.vocab_size, size), jnp.float32) / size**0.5,
        jax.random.randint(keys[2], shape, 0, architecture.vocab_size),
    )
    config = HeadConfig(
        loss.TEMPERATURE, tied=True, backend=chosen.head_backend, tile=chosen.head_tile,
        interpret=chosen.interpret,
    )  # fmt: skip
    program = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(sum(token_logprobs(config, *x))), argnums=(0, 1)))
    seconds = _median_seconds(lambda: program(*arguments), sizes.repeat)
    tokens = rows * sizes.response_tokens
    found = {
        "seconds": seconds, "tokens": tokens, "flops": 6 * architecture.vocab_size * size * tokens,
        "head_backend": chosen.head_backend, "head_tile": list(chosen.head_tile),
    }  # fmt: skip
    return {"loss": found}


def attention(architecture: Architecture, sizes: Sizes) -> dict[str, Any]:
    """Returns `attention`: seconds of values and gradients of one layer of the learner, by each implementation.

    Rows have two sequences. `difference` is the largest one from "jnp", in values or a gradient, over their largest.
    """
    mesh, dtype = mesh_lib.make_mesh(data=1), jnp.dtype(sizes.dtype)
    length, first = sizes.prompt_tokens + sizes.response_tokens, sizes.prompt_tokens
    query_heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    arrays = tuple(
        jax.random.normal(key, (sizes.rows, length, heads, architecture.head_dim), dtype)
        for key, heads in zip(
            jax.random.split(jax.random.key(sizes.seed), 4), (query_heads, kv_heads, kv_heads, query_heads), strict=True
        )
    )
    segment_ids = jnp.broadcast_to(jnp.int32(jnp.arange(length) >= first), (sizes.rows, length))

    def values_and_gradients(attend, query, key, value, slope):
        mixed, vjp = jax.vjp(lambda *x: attend(*x, 0, None, segment_ids=segment_ids)[0], query, key, value)
        return mixed, *vjp(slope)

    def measured_by(name: str) -> dict[str, Any]:
        platform = platform_lib.of_mesh(mesh, LearningConfig(attention=name), architecture, dtype)
        program = jax.jit(functools.partial(values_and_gradients, choose_attention(platform, mesh)))
        found = {"seconds": _median_seconds(lambda: program(*arrays), sizes.repeat)}
        results[name] = program(*arrays)
        return found

    chosen = platform_lib.of_mesh(mesh, LearningConfig(), architecture, dtype)
    results: dict[str, tuple[jax.Array, ...]] = {}
    implementations: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(("jnp", "blocks", chosen.attention)):
        try:
            implementations[name] = measured_by(name)
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            implementations[name] = {"failed": str(error).splitlines()[0]}
            continue
        if "jnp" in results:
            implementations[name]["difference"] = _difference(results[name], results["jnp"])
    # Two products forwards and five backwards, of the scores up to the diagonal.
    flops = 7 * query_heads * architecture.head_dim * sizes.rows * (first**2 + (length - first) ** 2)
    own = implementations[chosen.attention]
    counted = {"flops": flops, "seconds": own["seconds"]} if "seconds" in own else {}
    return {"attention": {"chosen": chosen.attention, "refusal": chosen.refusal, **implementations, **counted}}


def _difference(arrays: Sequence[jax.Array], others: Sequence[jax.Array]) -> float:
    """Returns the largest difference of two arrays over the largest number of the second, the worst pair's."""
    pairs = [(np.float32(x), np.float32(y)) for x, y in zip(arrays, others, strict=True)]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def whole_update(architecture: Architecture, sizes: Sizes) -> dict[str, Any]:
    """Returns `update`: its seconds, and the operations that it needs by the usual rule, without recomputation."""
    minibatch = update.Sizes(
        sizes.rows, sizes.prompt_tokens, sizes.response_tokens, sizes.micro_batches, sizes.dtype, sizes.seed
    )
    worker = UpdateWorker(
        model=None, architecture=to_hf(architecture, "float32"), learning=dict(update.LEARNING), per_row=1, devices=1,
        **dataclasses.asdict(minibatch),
    )  # fmt: skip
    examples = update.make_examples(minibatch, workloads.constant(sizes.response_tokens), architecture.vocab_size)
    zeros = [example | {"old_logprobs": np.zeros(sizes.response_tokens).tolist()} for example in examples]
    worker.begin(zeros)
    runs = [worker.run() for _ in range(1 + sizes.repeat)][1:]
    seconds = statistics.median(run["seconds"] for run in runs)
    platform = worker.learner.platform
    found = {
        "seconds": seconds,
        "tokens_per_s": sizes.rows * (sizes.prompt_tokens + sizes.response_tokens) / seconds,
        "flops": update.necessary_flops(architecture, examples),
        "memory_bytes": int(max(run["extra_bytes"] for run in runs)) + worker.weights_alone_bytes,
        "attention": platform.attention,
        "remat": platform.remat,
    }
    return {"update": found}


PARTS: dict[str, Callable[[Architecture, Sizes], dict[str, Any]]] = {
    "ceilings": ceilings, "hand_over": hand_over, "sampling": sampling, "loss": head_loss,
    "attention": attention, "update": whole_update,
}  # fmt: skip


def measured(name: str, architecture: Architecture, sizes: Sizes, limit_s: float) -> dict[str, Any]:
    """Returns the figures of a part, or {name: {"failed": reason}}; its process is killed after `limit_s` seconds."""
    request = json.dumps({"architecture": to_hf(architecture, "float32"), "sizes": dataclasses.asdict(sizes)})
    command = [sys.executable, "-m", "reinforce_ada_jax.benchmarks.accelerator", name]
    try:
        done = subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {name: {"failed": f"not finished after {limit_s:.0f} s"}}
    if done.returncode:
        return {name: {"failed": f"exit code {done.returncode}; its messages are above"}}
    return json.loads(done.stdout.splitlines()[-1])


def with_shares(parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds the share of its ceiling to each figure of bytes or operations, and the MFU where the peak is published."""
    top = parts["ceilings"]
    peaks = {"bytes": top.get("copy_bytes_per_s"), "flops": top.get("product_flops_per_s")}
    published = [peak for kind, peak in update.PEAK_FLOPS.items() if top.get("device", "").startswith(kind)]
    result = {}
    for name, part in parts.items():
        shares = {}
        for unit, peak in peaks.items():
            if unit in part and peak:
                shares[f"share_of_{unit}_ceiling"] = part[unit] / part["seconds"] / peak
        if name == "update" and "flops" in part and published:
            shares["mfu"] = part["flops"] / part["seconds"] / published[0]
        result[name] = part | shares
    return result


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures all parts, by default of Qwen2.5-1.5B in bfloat16.

    Raises:
      ValueError: --model names none, or the rows can't be cut into the micro-batches.
    """
    if options.model is None and options.shape is None:
        options.model = "Qwen2.5-1.5B"
    architecture = inputs.architecture_of(options)
    given: dict[str, Any] = {
        name: options[name].value if options[name].present else default for name, default in DEFAULTS.items()
    }
    sizes = Sizes(
        dtype=options.dtype if options["dtype"].present else "bfloat16", copy_mb=options.copy_mb,
        repeat=options.repeat or 3, seed=options.seed, **given,
    )  # fmt: skip
    if sizes.rows % sizes.micro_batches:
        raise ValueError(f"--rows={sizes.rows} can't be cut into --micro_batches={sizes.micro_batches}.")
    parts: dict[str, dict[str, Any]] = {}
    begin = time.monotonic()
    for name in PARTS:
        found = measured(name, architecture, sizes, max(1.0, begin + LIMIT_S - time.monotonic()))
        options_lib.log(f"{time.monotonic() - begin:.0f} s: {json.dumps(found)}")
        parts |= found
    return with_shares(parts) | {"sizes": dataclasses.asdict(sizes), "model": models.describe(architecture)}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(PARTS[sys.argv[1]](from_hf(asked["architecture"]), Sizes(**asked["sizes"]))))

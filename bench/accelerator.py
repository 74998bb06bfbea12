"""`bench.accelerator`: compares the parts of a run with the limits of the device, within minutes.

    ceilings    bytes a second of a large copy, operations a second of a large product
    hand_over   the cast of the learner's float32 weights to the weights for decoding
    sampling    prefill: prompts, with one response token each; decode: whole responses, with their prompts' prefill
    pages       attention of decoding over pages of each kind, by each implementation for the device
    loss        log-probabilities over the vocabulary, forward and backward
    attention   of one layer of the learner, forward and backward, by each implementation for the device
    update      one update of the learner

Each part runs in its own process: it has the whole memory, and if it fails, the other parts still run. Shares are
relative to the ceilings, which the same device reached minutes before.
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
from jax.typing import DTypeLike

from bench import command_line, engines, inputs, loss, models, rollout, update, workloads
from bench.measuring import machine, median_seconds
from bench.options import define_flags, log
from bench.update_worker import UpdateWorker
from bench.workloads import Workload
from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import platform as platform_lib
from reinforce_ada_jax.learning.forward import choose_attention
from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import Architecture, to_hf
from reinforce_ada_jax.policy.quantization import Quantized, quantize
from reinforce_ada_jax.policy.rounded import whole_products
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.paged_attention import FOR_PLATFORM, paged_attention
from reinforce_ada_jax.sampling.pages import padded_head_dim

# Seconds for all parts together; a part that has not ended by then is reported as failed.
LIMIT_S = 480.0
# Sizes of all parts, as the flags of these names; rows of `loss` and `update` are one prompt and one response.
DEFAULTS = {
    "slots": 256, "window": 64, "page_size": 64, "prefill_tokens": 512, "requests": 256,
    "prompt_tokens": 512, "response_tokens": 512, "rows": 16, "micro_batches": 16, "repeat": 3, "samples_per_round": 1,
}  # fmt: skip
# Tokens that a slot sees with a window, in `pages`.
WINDOW = 128
SIZES = ("dtype", *DEFAULTS, "copy_mb", "seed")


def ceilings(architecture: Architecture, options: flags.FlagValues) -> dict[str, Any]:
    """Returns `ceilings`: the bytes a second of a large copy and the operations a second of a large square product."""
    del architecture
    dtype = jnp.dtype(options.dtype)
    side = int((options.copy_mb * 2**20 / 8 / dtype.itemsize) ** 0.5) // 128 * 128 or 128
    square = jnp.ones((side, side), dtype)
    seconds = median_seconds(lambda: product(square), options.repeat)
    found = {
        "copy_bytes_per_s": rollout.copy_bytes_per_s(options.copy_mb * 2**20),
        "product_flops_per_s": 2 * side**3 / seconds,
    }
    return {"ceilings": found | machine()}


@jax.jit
def product(x: jax.Array) -> jax.Array:
    """Returns the product of a square matrix with itself."""
    return x @ x


def hand_over(architecture: Architecture, options: flags.FlagValues) -> dict[str, Any]:
    """Returns `hand_over`: seconds and bytes, read and written, of the cast from float32."""
    mesh = mesh_lib.make_mesh(data=1)
    workload = _workload(architecture, options, options.response_tokens)
    engine = Engine(architecture, engines.engine_options(workload, options), mesh=mesh)
    params = transformer.init(architecture, jax.random.key(options.seed), mesh)
    seconds = median_seconds(lambda: engine.decode_weights(params), options.repeat)
    itemsize = 0 if engine.decodes_from(params) else 4 + jnp.dtype(options.dtype).itemsize
    return {"hand_over": {"seconds": seconds, "bytes": architecture.num_parameters * itemsize}}


def _workload(architecture: Architecture, options: flags.FlagValues, response_tokens: int) -> Workload:
    return workloads.synthetic(
        options.requests, 1, options.prompt_tokens, workloads.constant(response_tokens), architecture.vocab_size,
        options.seed,
    )  # fmt: skip


def sampling(architecture: Architecture, options: flags.FlagValues) -> dict[str, Any]:
    """Returns figures of `prefill` and of `decode`, from one engine.

    The figures of prefill have the operations of the layers' products, and those of decode the bytes that all steps
    must read.
    """
    workload = _workload(architecture, options, options.response_tokens)
    engine_options = engines.engine_options(workload, options)
    params = inputs.random_weights(options, architecture, options.dtype)
    rollouts, params = engines.make_rollouts(architecture, params, engine_options, 1)

    def seconds_of(workload: Workload) -> float:
        return median_seconds(
            lambda: engines.check_lengths(engines.draw(rollouts, params, workload), workload), options.repeat
        )

    seconds = seconds_of(_workload(architecture, options, 1))
    tokens = rollouts.counts.prefilled_tokens
    flops = 2 * architecture.num_layers * architecture.layer_weights(active=True) * tokens
    prefill = {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "flops": flops}
    seconds = seconds_of(workload)
    tokens, steps = rollouts.counts.tokens, rollouts.counts.slot_steps // options.slots
    return {
        "prefill": prefill,
        "decode": {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "steps": steps,
            "bytes": engines.decode_bytes(architecture, workload, steps, engine_options),
            "attention": engine_options.attention,
        },
    }


def pages(architecture: Architecture, options: flags.FlagValues) -> dict[str, Any]:
    """Returns `pages`: seconds of a decoding step's attention in all layers, by "jnp" and by the device's own kernel.

    Slots hold half to all of a prompt and a response; with a window they see their last `WINDOW` tokens. The layers
    read the same pages. `difference` is the largest difference from "jnp" in the first layer, divided by the largest
    number of "jnp".
    """
    mesh, heads, head_dim = mesh_lib.make_mesh(data=1), architecture.num_kv_heads, architecture.head_dim
    most, size = options.prompt_tokens + options.response_tokens, options.page_size
    width, rng = -(-most // size), np.random.default_rng(options.seed)
    lengths = rng.integers(most // 2, most, options.slots, dtype=np.int32, endpoint=True)
    table = (1 + rng.permutation(options.slots * width)).reshape(options.slots, width).astype(np.int32)
    keys = jax.random.split(jax.random.key(options.seed), 3)
    query = jax.random.normal(keys[0], (options.slots, architecture.num_heads, head_dim))
    pools = [jax.random.normal(key, (heads, 1 + table.size, size, head_dim)) for key in keys[1:]]

    def measured_by(backend: str, dtype: DTypeLike, reach: int | None) -> dict[str, Any]:
        padding = [(0, 0)] * 3 + [(0, padded_head_dim(head_dim, backend) - head_dim)]
        padded = [jnp.pad(pool, padding) for pool in pools]
        is_int8 = jnp.dtype(dtype) == jnp.int8
        stored = [quantized_pages(pool) if is_int8 else pool.astype(dtype) for pool in padded]
        attend = functools.partial(
            paged_attention, lengths=jnp.asarray(lengths), table=jnp.asarray(table), backend=backend, mesh=mesh,
            layer=transformer.LayerPlace(0, reach or 0, None if reach is None else jnp.bool_(True)),
        )  # fmt: skip

        def layers(query, *stored):
            with whole_products(query.dtype):
                first = attend(query, *stored)
                return first, jax.lax.fori_loop(1, architecture.num_layers, lambda _, x: x + attend(x, *stored), first)

        program, argument = jax.jit(layers), query.astype(options.dtype if is_int8 else dtype)
        results[backend] = (program(argument, *stored)[0],)
        seconds = median_seconds(lambda: program(argument, *stored), options.repeat)
        seen = np.minimum(lengths, reach or most).sum(dtype=int) * heads * architecture.num_layers
        token_bytes = head_dim * jnp.dtype(dtype).itemsize + 4 * is_int8
        return {"seconds": seconds, "bytes": int(2 * seen * token_bytes)}

    own = FOR_PLATFORM.get(jax.default_backend(), "jnp")
    found: dict[str, Any] = {}
    results: dict[str, tuple[jax.Array, ...]] = {}
    kinds = {
        options.dtype: (options.dtype, None), "float32": (jnp.float32, None), "int8": (jnp.int8, None),
        "window": (options.dtype, WINDOW),
    }  # fmt: skip
    for kind, (dtype, reach) in kinds.items():
        results.clear()
        found[kind] = _each(("jnp", own), functools.partial(measured_by, dtype=dtype, reach=reach), results)
    return {"pages": found | found[options.dtype].get(own, {})}


def quantized_pages(pool: jax.Array) -> Quantized:
    """Returns pages in int8, with a scale for each token."""
    rounded = quantize(pool, (-1,))
    return Quantized(values=rounded.values, scale=rounded.scale[:, :, None])


def _each(
    names: Sequence[str], measured_by: Callable[[str], dict[str, Any]], results: dict[str, tuple[jax.Array, ...]]
) -> dict[str, dict[str, Any]]:
    """Returns the figures of each implementation, with its difference from "jnp", or the reason why it failed."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(names):
        try:
            found[name] = measured_by(name)
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
            found[name] = {"failed": str(error).splitlines()[0]}
            continue
        if "jnp" in results:
            found[name]["difference"] = _difference(results[name], results["jnp"])
    return found


def head_loss(architecture: Architecture, options: flags.FlagValues) -> dict[str, Any]:
    """Returns `loss`: seconds of value and gradients at the output head for the responses of a micro-batch."""
    size, dtype = architecture.hidden_size, jnp.dtype(options.dtype)
    chosen = platform_lib.of_mesh(mesh_lib.make_mesh(data=1), LearningConfig(), architecture, dtype)
    rows = options.rows // options.micro_batches
    shape = rows, options.response_tokens
    keys = jax.random.split(jax.random.key(options.seed), 3)
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
    seconds = median_seconds(lambda: program(*arguments), options.repeat)
    tokens = rows * options.response_tokens
    found = {
        "seconds": seconds, "tokens": tokens, "flops": 6 * architecture.vocab_size * size * tokens,
        "head_backend": chosen.head_backend, "head_tile": list(chosen.head_tile),
    }  # fmt: skip
    return {"loss": found}


def attention(architecture: Architecture, options: flags.FlagValues) -> dict[str, Any]:
    """Returns `attention`: seconds of values and gradients of one layer of the learner, by each implementation.

    Rows have two sequences. `difference` is the largest difference from "jnp" in the values or in a gradient, divided
    by their largest number.
    """
    mesh, dtype = mesh_lib.make_mesh(data=1), jnp.dtype(options.dtype)
    length, first = options.prompt_tokens + options.response_tokens, options.prompt_tokens
    query_heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    all_heads = query_heads, kv_heads, kv_heads, query_heads
    arrays = tuple(
        jax.random.normal(key, (options.rows, length, heads, architecture.head_dim), dtype)
        for key, heads in zip(jax.random.split(jax.random.key(options.seed), 4), all_heads, strict=True)
    )
    segment_ids = jnp.broadcast_to(jnp.int32(jnp.arange(length) >= first), (options.rows, length))

    def values_and_gradients(attend, query, key, value, slope):
        mixed, vjp = jax.vjp(lambda *x: attend(*x, transformer.LayerPlace(0), segment_ids), query, key, value)
        return mixed, *vjp(slope)

    def measured_by(name: str) -> dict[str, Any]:
        platform = platform_lib.of_mesh(mesh, LearningConfig(attention=name), architecture, dtype)
        program = jax.jit(functools.partial(values_and_gradients, choose_attention(platform, mesh)))
        found = {"seconds": median_seconds(lambda: program(*arrays), options.repeat)}
        results[name] = program(*arrays)
        return found

    chosen = platform_lib.of_mesh(mesh, LearningConfig(), architecture, dtype)
    results: dict[str, tuple[jax.Array, ...]] = {}
    implementations = _each(("jnp", "blocks", chosen.attention), measured_by, results)
    # The forward pass has two products, the backward pass five, each with the scores up to the diagonal.
    flops = 7 * query_heads * architecture.head_dim * options.rows * (first**2 + (length - first) ** 2)
    own = implementations[chosen.attention]
    counted = {"flops": flops, "seconds": own["seconds"]} if "seconds" in own else {}
    return {"attention": {"chosen": chosen.attention, "refusal": chosen.refusal, **implementations, **counted}}


def _difference(arrays: Sequence[jax.Array], others: Sequence[jax.Array]) -> float:
    """Returns the largest difference of a pair divided by the largest number of its second array, of the worst pair."""
    pairs = [(np.float32(x), np.float32(y)) for x, y in zip(arrays, others, strict=True)]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def whole_update(architecture: Architecture, options: flags.FlagValues) -> dict[str, Any]:
    """Returns `update`: its seconds, and the operations that it needs by the usual rule, without recomputation."""
    minibatch = update.Sizes(
        options.rows, options.prompt_tokens, options.response_tokens, options.micro_batches, options.dtype, options.seed
    )
    worker = UpdateWorker(
        model=None, architecture=to_hf(architecture, "float32"), per_row=1, devices=1,
        sizes=dataclasses.asdict(minibatch),
    )  # fmt: skip
    examples = update.make_examples(minibatch, workloads.constant(options.response_tokens), architecture.vocab_size)
    worker.begin(examples)
    runs = [worker.run() for _ in range(1 + options.repeat)][1:]
    seconds = statistics.median(run["seconds"] for run in runs)
    platform = worker.learner.platform
    found = {
        "seconds": seconds,
        "tokens_per_s": options.rows * (options.prompt_tokens + options.response_tokens) / seconds,
        "flops": update.necessary_flops(architecture, examples),
        "memory_bytes": int(max(run["extra_bytes"] for run in runs)) + worker.weights_alone_bytes,
        "attention": platform.attention,
        "remat": platform.remat,
    }
    return {"update": found}


PARTS: dict[str, Callable[[Architecture, flags.FlagValues], dict[str, Any]]] = {
    "ceilings": ceilings, "hand_over": hand_over, "sampling": sampling, "pages": pages,
    "loss": head_loss, "attention": attention, "update": whole_update,
}  # fmt: skip


def measured(name: str, options: flags.FlagValues, limit_s: float) -> dict[str, Any]:
    """Returns the figures of a part, or {name: {"failed": reason}}; its process is killed after `limit_s` seconds."""
    given = [options[each].serialize() for each in (*SIZES, "model", "shape")]
    program = "from bench import accelerator; accelerator.print_part()"
    command = [sys.executable, "-c", program, name, *filter(None, given)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {name: {"failed": f"not finished after {limit_s:.0f} s"}}
    if done.returncode:
        return {name: {"failed": f"exit code {done.returncode}; its messages are above"}}
    return json.loads(done.stdout.splitlines()[-1])


def print_part() -> None:
    """Prints the figures of the part that the first argument of this process names."""
    options = define_flags(flags.FlagValues())
    part = PARTS[options(sys.argv)[1]]
    print(json.dumps(part(inputs.architecture_of(options), options)))


def with_shares(parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds the share of its ceiling to each figure of bytes or operations, and the MFU where the peak is published."""
    top = parts["ceilings"]
    peaks = {"bytes": top.get("copy_bytes_per_s"), "flops": top.get("product_flops_per_s")}
    published = update.published_peak(top.get("device", ""))
    result = {}
    for name, part in parts.items():
        shares = {}
        for unit, peak in peaks.items():
            if unit in part and peak:
                shares[f"share_of_{unit}_ceiling"] = part[unit] / part["seconds"] / peak
        if name == "update" and "flops" in part and published:
            shares["mfu"] = part["flops"] / part["seconds"] / published
        result[name] = part | shares
    return result


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures all parts, by default of Qwen2.5-1.5B in bfloat16.

    Raises:
      ValueError: --model names no model, or the rows can't be cut into the micro-batches.
    """
    if options.model is None and options.shape is None:
        options.model = "Qwen2.5-1.5B"
    for name, default in DEFAULTS.items():
        options.set_default(name, default)
    architecture = inputs.architecture_of(options)
    if options.rows % options.micro_batches:
        raise ValueError(f"--rows={options.rows} can't be cut into --micro_batches={options.micro_batches}.")
    parts: dict[str, dict[str, Any]] = {}
    begin = time.monotonic()
    for name in PARTS:
        found = measured(name, options, max(1.0, begin + LIMIT_S - time.monotonic()))
        log(f"{time.monotonic() - begin:.0f} s: {json.dumps(found)}")
        parts |= found
    sizes = {name: options[name].value for name in SIZES}
    return with_shares(parts) | {"sizes": sizes, "model": models.describe(architecture)}


if __name__ == "__main__":
    command_line.start("accelerator", run, before=command_line.leave_the_device, auto_dtype="bfloat16")

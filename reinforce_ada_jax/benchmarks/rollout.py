"""How rollouts are timed: whole workloads through the real engine and collection loop, beside another engine's.

A measurement is a dict ready for JSON. Every repetition is checked: a response that hasn't exactly its prescribed
length ends the benchmark, so no engine gains by doing less.
"""

import dataclasses
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from reinforce_ada_jax.benchmarks import workloads
from reinforce_ada_jax.benchmarks.json_subprocess import JsonSubprocess
from reinforce_ada_jax.benchmarks.workloads import Workload
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import Engine, enough_pages
from reinforce_ada_jax.sampling.paged_attention import choose_backend
from reinforce_ada_jax.sampling.pages import num_pages
from reinforce_ada_jax.sampling.rollouts import RolloutCounts, Rollouts
from reinforce_ada_jax.sampling.simulation import Cost, SimulatedEngine
from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams
from reinforce_ada_jax.training.compile_counter import COMPILE_EVENT
from reinforce_ada_jax.types import Pool

BASELINES = {"transformers": pathlib.Path(__file__).parent / "baselines" / "transformers_continuous.py"}
# The best of those tried on two cores (docs/performance.md). Fewer requests at a time make the dense mask smaller
# which sdpa gets over all of them; the defaults (256 at a time, pages of 256) reach three quarters of this speed.
BASELINE_SETTINGS = {
    "attention": "sdpa", "page_size": 16, "max_batch_tokens": 512, "max_requests_per_batch": 32, "seed": 0,
}  # fmt: skip


def engine_options(
    workload: Workload,
    *,
    slots: int,
    window: int,
    page_size: int,
    pages: int,
    open_prompts: int,
    prefill_rows: int,
    dtype: str,
    attention: str,
    limit: int | None = None,
) -> EngineOptions:
    """An engine just large enough for a workload's prompts and responses (or `limit`); 0 pages: enough."""
    options = EngineOptions(
        slots=slots, window=window, page_size=page_size, pages=pages, open_prompts=open_prompts,
        prefill_rows=prefill_rows, max_prompt_tokens=workload.max_prompt_tokens,
        max_response_tokens=limit or int(workload.lengths.max()), stop_ids=(), seed=0, dtype=dtype,
        attention=choose_backend(attention),
    )  # fmt: skip
    return options if pages else dataclasses.replace(options, pages=enough_pages(options))


def draw(
    rollouts: Rollouts,
    params: Params | None,
    workload: Workload,
    *,
    stream: int = 0,
    limit: int | None = None,
    barrier: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Pool]:
    """The whole workload once.

    Args:
      rollouts: over an engine or a simulated one.
      params: None for a simulated one.
      workload: what to draw.
      stream: of the samples' addresses, so that repetitions differ in their tokens.
      limit: pages are reserved for so many tokens, as where nobody knows the length beforehand; None: for the
        prescribed length, at which it ends the response.
      barrier: see `collect`.
      on_progress: see `collect`.
    """

    def sampling(request):
        return SamplingParams(limit or workload.length(request), workload.temperature)

    sample_fn = rollouts.sampler(params, stream=stream, sampling=sampling)
    return collect(
        workload.prompts, sample_fn, workload.verify_fn(), workload.strategy, barrier=barrier, on_progress=on_progress
    )


def check_lengths(pools: list[Pool], workload: Workload) -> int:
    """Response tokens in all; RuntimeError where a response hasn't exactly the prescribed length."""
    tokens = 0
    for pool in pools:
        for response in pool.responses:
            wanted = int(workload.lengths[int(response.prompt_id), response.draw])
            if len(response.tokens) != wanted or len(response.logprobs) != wanted:
                raise RuntimeError(
                    f"draw {response.draw} of prompt {response.prompt_id} has {len(response.tokens)} tokens, {wanted} "
                    "are prescribed."
                )
            tokens += wanted
    return tokens


# ---- what a process spends -------------------------------------------------------------------------------------------


class CompileTime:
    """Programs compiled by this process, and the seconds that took."""

    def __init__(self):
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **_) -> None:
        if event == COMPILE_EVENT:
            self.count += 1
            self.seconds += duration


def peak_memory_bytes() -> int:
    """Of the first device where it keeps count, else of this process."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def copy_bytes_per_s(num_bytes: int) -> float:
    """What the device reads and writes a second where it does nothing else: the median of ten large additions."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    add_one = jax.jit(lambda x: x + 1)
    add_one(array).block_until_ready()
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        add_one(array).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return 2 * num_bytes / statistics.median(seconds)


def _bytes_read(architecture: Architecture, itemsize: int) -> tuple[int, int]:
    """A decode step reads all weights, and for each token in the cache its keys and values: bytes of both."""
    weights = architecture.num_parameters
    if not architecture.tied_embedding:
        weights -= architecture.vocab_size * architecture.hidden_size  # of which a row a token is read
    cached_token = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
    return itemsize * weights, itemsize * cached_token


def bytes_needed(architecture: Architecture, workload: Workload, decode_steps: int, itemsize: int) -> int:
    """What decoding a workload must read at the least, in `decode_steps` steps."""
    decode_step, cached_token = _bytes_read(architecture, itemsize)
    prompt = np.array([len(prompt.tokens) for prompt in workload.prompts])[:, None]
    # Token t of a response, from 0, sees prompt + t tokens.
    seen = int((workload.lengths * prompt + workload.lengths * (workload.lengths - 1) // 2).sum())
    return decode_steps * decode_step + seen * cached_token


def roofline(architecture: Architecture, itemsize: int, bandwidth: float) -> Cost:
    """Decoding that does nothing but read memory, at `bandwidth` bytes a second, with prefill free."""
    decode_step, cached_token = _bytes_read(architecture, itemsize)
    return Cost(decode_step=decode_step / bandwidth, cached_token=cached_token / bandwidth)


# ---- measurements ----------------------------------------------------------------------------------------------------


class Baseline(JsonSubprocess):
    """Another engine in its own process (baselines/), doing the same work: see its file for the protocol."""

    def __init__(self, name: str, python: str, model: pathlib.Path, workload: Workload, dtype: str):
        """Starts the process and loads the model there.

        Raises:
          ValueError: the interpreter doesn't start, or its environment lacks what the baseline needs.
        """
        super().__init__(name, [python, str(BASELINES[name])])
        longest = int(workload.lengths.max()) + workload.max_prompt_tokens
        blocks = num_pages(longest, BASELINE_SETTINGS["page_size"]) * BASELINE_SETTINGS["max_requests_per_batch"]
        # Four times what its requests can fill: below 15% of free blocks its scheduler holds requests back.
        self.settings = BASELINE_SETTINGS | {"dtype": dtype, "num_blocks": 4 * blocks}
        self.description = self.load(
            model=str(model), lengths=workload.lengths.tolist(),
            prompts=[prompt.tokens.tolist() for prompt in workload.prompts],
            temperature=workload.temperature, settings=self.settings,
        )  # fmt: skip

    def run(self) -> float:
        """The workload once; the seconds it took."""
        return self.ask(command="run")["seconds"]

    def logprobs(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Of each row's tokens after the first."""
        answer = self.ask(command="score", rows=[row.tolist() for row in rows])
        return [np.array(row, np.float32) for row in answer["logprobs"]]


def measure(
    architecture: Architecture,
    params: Params,
    workload: Workload,
    options: EngineOptions,
    *,
    replicas: int = 1,
    repeat: int,
    baseline: Baseline | None = None,
    copy_bytes: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Warms up, then times the whole workload `repeat` times, in turns with the baseline, so that other processes
    on the machine disturb both alike.

    Args:
      architecture: of `params`.
      params: weights on the first device.
      workload: a fixed number of draws for each prompt.
      options: of each replica.
      replicas: copies of the weights that decode side by side.
      repeat: timed repetitions.
      baseline: warmed up here too.
      copy_bytes: size of the array whose copying gives the memory bandwidth; 0: don't measure it.
      say: hears of every step.
    """
    compiled = CompileTime()
    begin = time.perf_counter()
    rollouts, params = make_rollouts(architecture, params, options, replicas)
    tokens = check_lengths(draw(rollouts, params, workload), workload)
    warmup_s = time.perf_counter() - begin
    say(f"warm-up {warmup_s:.1f} s, {compiled.count} programs")
    if baseline is not None:
        say(f"{baseline.name}: warm-up {baseline.run():.1f} s")
    compile_count, compile_s = compiled.count, compiled.seconds
    seconds: list[float] = []
    others: list[float] = []
    counts: list[RolloutCounts] = []
    for index in range(repeat):
        begin = time.perf_counter()
        pools = draw(rollouts, params, workload, stream=index + 1)
        seconds.append(time.perf_counter() - begin)
        counts.append(rollouts.counts)
        check_lengths(pools, workload)
        line = f"{index + 1}/{repeat}: {tokens / seconds[-1]:,.0f} tokens/s"
        if baseline is not None:
            others.append(baseline.run())
            line += f", {baseline.name} {tokens / others[-1]:,.0f}"
        say(line)
    median, last = statistics.median(seconds), counts[-1]
    result = {
        "useful_tokens": tokens,
        "useful_tokens_per_s": tokens / median,
        "seconds": seconds,
        "warmup_s": warmup_s,
        "slot_utilisation": last.slot_utilisation,
        "windows": last.windows,
        "prefills": last.prefills,
        "dispatches_per_1000_tokens": 1000 * last.dispatches / last.tokens,
        "host_between_windows_s": statistics.median(count.host_s for count in counts),
        "compile_count": compile_count,
        "compile_seconds": compile_s,
        "recompilations": compiled.count - compile_count,
        "peak_memory_bytes": peak_memory_bytes(),
    }
    if copy_bytes:
        decode_steps, rate = last.slot_steps // (options.slots * replicas), copy_bytes_per_s(copy_bytes)
        needed = bytes_needed(architecture, workload, decode_steps, jnp.dtype(options.dtype).itemsize)
        result |= {"copy_bytes_per_s": rate, "bandwidth_fraction": needed / median / rate}
    if baseline is not None:
        theirs = statistics.median(others)
        result["against"] = {
            "name": baseline.name, "useful_tokens_per_s": tokens / theirs, "seconds": others,
            "settings": baseline.settings, **baseline.description,
        }  # fmt: skip
        result["ratio"] = theirs / median
    return result | described(architecture, options, replicas)


def use_one_core_each(replicas: int) -> None:
    """Gives each replica a CPU device with one thread; before JAX looks for devices.

    At the sizes that a CPU can decode, XLA's threads cost more than they gain: `tiny_model` made 8,100 tokens/s with
    two threads and 10,800 with one.
    """
    os.environ["NPROC"] = "1"  # how many threads XLA counts on
    jax.config.update("jax_num_cpu_devices", replicas)


def make_rollouts(
    architecture: Architecture, params: Params, options: EngineOptions, replicas: int
) -> tuple[Rollouts, Params]:
    """An engine of so many replicas, and the weights where they are."""
    mesh = mesh_lib.make_mesh(data=replicas)
    return Rollouts(Engine(architecture, options, mesh=mesh)), jax.device_put(
        params, NamedSharding(mesh, PartitionSpec())
    )


def described(architecture: Architecture, options: EngineOptions, replicas: int) -> dict[str, Any]:
    """What was run, and on what; slots, pages and open prompts are those of each replica."""
    names = ("slots", "window", "page_size", "pages", "open_prompts", "attention", "dtype")
    device = jax.devices()[0]
    return {name: getattr(options, name) for name in names} | {
        "replicas": replicas, "device": device.device_kind, "platform": device.platform, "jax": jax.__version__,
        "model": workloads.describe(architecture),
    }  # fmt: skip


def adaptive(
    architecture: Architecture,
    params: Params,
    workload: Workload,
    options: EngineOptions,
    *,
    replicas: int = 1,
    barrier: bool,
    repeat: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """An adaptive workload through a warm engine, and with `barrier` the same samples with all rounds in step."""
    rollouts, params = make_rollouts(architecture, params, options, replicas)
    # Warm-up: the same programs, but two tokens a response.
    short = dataclasses.replace(workload, lengths=np.minimum(workload.lengths, 2))
    draw(rollouts, params, short)

    def once(barrier: bool) -> dict[str, Any]:
        begin = time.perf_counter()
        pools = draw(rollouts, params, workload, barrier=barrier, on_progress=on_progress)
        seconds = time.perf_counter() - begin
        check_lengths(pools, workload)
        return _session(rollouts, pools, seconds)

    return _with_barrier(once, barrier, repeat) | described(architecture, options, replicas)


def _session(rollouts: Rollouts, pools: list[Pool], seconds: float) -> dict[str, Any]:
    counts = rollouts.counts
    return {
        "seconds": seconds,
        "useful_tokens": counts.tokens,
        "useful_tokens_per_s": counts.tokens / seconds,
        "slot_utilisation": counts.slot_utilisation,
        "responses": sum(len(pool.responses) for pool in pools),
        "decode_steps": counts.slot_steps // (rollouts.engine.options.slots * rollouts.engine.replicas),
        "windows": counts.windows,
        "dispatches": counts.dispatches,
    }


def _with_barrier(once: Callable[[bool], dict[str, Any]], barrier: bool, repeat: int = 1) -> dict[str, Any]:
    """The run of median time, with and without a barrier in turns."""
    kinds = (False, True) if barrier else (False,)
    runs = [[once(kind) for kind in kinds] for _ in range(repeat)]
    medians = [sorted(column, key=lambda run: run["seconds"])[repeat // 2] for column in zip(*runs, strict=True)]
    result = medians[0]
    if barrier:
        result["barrier"] = medians[1]
        if medians[1]["useful_tokens"] != result["useful_tokens"]:
            raise RuntimeError(f"with the barrier other samples were drawn: {result}")
        result["barrier_ratio"] = medians[1]["seconds"] / result["seconds"]
    return result


def simulate(
    workload: Workload, options: EngineOptions, cost: Cost, *, barrier: bool, limit: int | None = None
) -> dict[str, Any]:
    """The same in virtual time: real scheduling, no model, seconds from `cost`."""
    lengths = workload.lengths_by_draw()

    def once(barrier: bool) -> dict[str, Any]:
        rollouts = Rollouts(SimulatedEngine(options, cost, lengths))
        pools = draw(rollouts, None, workload, limit=limit, barrier=barrier)
        return _session(rollouts, pools, rollouts.engine.seconds)

    return {"simulated": True} | _with_barrier(once, barrier)

"""`bench.rollout`: whole workloads through the real engine and collection loop, beside a baseline's.

Every repetition is checked: a response of another length than prescribed ends the benchmark, so no engine gains by
doing less.
"""

import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from bench import adaptive, command_line, engines, inputs, models, workloads
from bench.json_subprocess import JsonSubprocess
from bench.measuring import in_turns, median_seconds, memory_bytes
from bench.options import check_baseline
from bench.workloads import Workload
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.draft_choice import with_drafts
from reinforce_ada_jax.sampling.pages import num_pages
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.training.compile_counter import CompileCounter

FOLDER = pathlib.Path(__file__).parent / "baselines"
# llama.cpp computes from the blocks of a GGUF file: its log-probabilities are not ours, and nothing compares them.
BASELINES = {"transformers": FOLDER / "transformers_continuous.py", "llama.cpp": FOLDER / "llama_cpp.py"}
# The best of those tried on two cores (docs/performance.md). sdpa gets one dense mask over all requests, which is
# smaller with fewer requests at a time; the defaults (256 at a time, pages of 256) reach three quarters of this speed.
BASELINE_SETTINGS: dict[str, Any] = {
    "attention": "sdpa", "page_size": 16, "max_batch_tokens": 512, "max_requests_per_batch": 32, "seed": 0,
}  # fmt: skip


def start_baseline(options: flags.FlagValues, workload: Workload) -> tuple[JsonSubprocess, dict[str, Any]]:
    """Starts another engine in its own process (baselines/) for the same work; returns it and its description.

    Raises:
      ValueError: the interpreter doesn't start, its environment lacks a package, or it can't read the model.
    """
    settings: dict[str, Any] = {"slots": options.slots}
    if options.against != "llama.cpp":
        if not any(pathlib.Path(options.model).glob("*.safetensors")):
            raise ValueError(
                f"--against={options.against} needs a folder with *.safetensors, and {options.model} is none: name the "
                "folder that `export` writes."
            )
        longest = int(workload.lengths.max()) + workload.max_prompt_tokens
        blocks = num_pages(longest, BASELINE_SETTINGS["page_size"]) * BASELINE_SETTINGS["max_requests_per_batch"]
        # Four times what its requests can fill: below 15% of free blocks its scheduler holds requests back.
        settings = BASELINE_SETTINGS | {"dtype": options.dtype, "num_blocks": 4 * blocks}
    process = JsonSubprocess(options.against, [options.against_python, str(BASELINES[options.against])])
    description = process.load_baseline(
        model=options.model, lengths=workload.lengths.tolist(),
        prompts=[prompt.tokens.tolist() for prompt in workload.prompts],
        temperature=workload.temperature, settings=settings,
    )  # fmt: skip
    return process, {"settings": settings, **description}


def copy_bytes_per_s(num_bytes: int) -> float:
    """Returns the bytes that the device reads and writes a second: the median of ten large additions."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    add_one = jax.jit(lambda x: x + 1)
    return 2 * num_bytes / median_seconds(lambda: add_one(array), 10)


def measure(
    options: flags.FlagValues,
    architecture: Architecture,
    params: Params,
    workload: Workload,
    engine_options: EngineOptions,
    baseline: JsonSubprocess | None,
) -> dict[str, Any]:
    """Times the whole workload, in turns with the baseline."""
    replicas, compiles = options.replicas or 1, CompileCounter()
    begin = time.perf_counter()
    rollouts, params = engines.make_rollouts(architecture, params, engine_options, replicas)
    made_s = time.perf_counter() - begin

    def draw(turn: int) -> dict[str, Any]:
        begin, processor_begin = time.perf_counter(), time.process_time()
        pools = engines.draw(rollouts, params, workload, stream=turn)
        seconds, processor_seconds = time.perf_counter() - begin, time.process_time() - processor_begin
        engines.check_lengths(pools, workload)
        return {
            "seconds": seconds, "processor_seconds": processor_seconds, "counts": rollouts.counts,
            "programs": compiles.total, "compile_seconds": compiles.seconds,
        }  # fmt: skip

    tokens = int(workload.lengths.sum())
    runs: dict[str, Callable[[int], dict[str, Any]]] = {"ours": draw}
    if baseline is not None:
        runs[baseline.name] = baseline.run
    found = in_turns(runs, options.repeat or 5, lambda run: f"{tokens / run['seconds']:,.0f} tokens/s")
    warmup, *timed = found["ours"]
    seconds = [run["seconds"] for run in timed]
    median, last = statistics.median(seconds), rollouts.counts
    result = {
        "useful_tokens": tokens,
        "useful_tokens_per_s": tokens / median,
        "seconds": seconds,
        "processor_seconds": [run["processor_seconds"] for run in timed],
        "warmup_s": made_s + warmup["seconds"],
        "slot_utilisation": last.slot_utilisation,
        "windows": last.windows,
        "prefills": last.prefills,
        "draft_tokens": last.drafted,
        "draft_acceptance": last.accepted / max(last.drafted, 1),
        "dispatches_per_1000_tokens": 1000 * last.dispatches / last.tokens,
        "host_between_windows_s": statistics.median(run["counts"].host_s for run in timed),
        "compile_count": warmup["programs"],
        "compile_seconds": warmup["compile_seconds"],
        "recompilations": compiles.total - warmup["programs"],
        "peak_memory_bytes": memory_bytes(peak=True),
    }
    if options.requests:
        decode_steps = last.slot_steps // engine_options.slots  # of all replicas: each reads its own weights
        rate = copy_bytes_per_s(options.copy_mb * 2**20)
        memories = 1 if jax.default_backend() == "cpu" else replicas
        needed = engines.decode_bytes(architecture, workload, decode_steps, engine_options)
        result |= {"copy_bytes_per_s": rate, "bandwidth_fraction": needed / median / (rate * memories)}
    if baseline is not None:
        baseline_seconds = [run["seconds"] for run in found[baseline.name][1:]]
        baseline_median = statistics.median(baseline_seconds)
        result["against"] = {
            "name": baseline.name, "useful_tokens_per_s": tokens / baseline_median, "seconds": baseline_seconds,
        }  # fmt: skip
        result["ratio"] = baseline_median / median
    return result | engines.describe(architecture, engine_options, replicas)


def _workload(options: flags.FlagValues, vocab_size: int) -> Workload:
    if (options.workload is None) == (options.requests is None):
        raise ValueError("give either --workload=FILE or --requests (with --prompt_tokens, --response_tokens).")
    if options.workload is not None:
        return workloads.load(pathlib.Path(options.workload))
    lengths = inputs.response_lengths(options, default=1024)
    prompt_tokens = options.prompt_tokens or 512
    return workloads.synthetic(options.requests, options.samples, prompt_tokens, lengths, vocab_size, options.seed)


def _logprob_gaps(
    options: flags.FlagValues,
    architecture: Architecture,
    params: Params,
    workload: Workload,
    baseline: JsonSubprocess | None,
) -> dict[str, float]:
    """Returns the distances from other log-probabilities, in units of rounding.

    The others are those of the workload, if it was made for this model, and in float32 those of the baseline on the
    first prompts.
    """
    gaps = {}
    if not options.shape and workload.reference is not None:
        tokens, expected = workload.reference
        gaps["workload"] = models.check_logprobs(architecture, params, [tokens], [expected], "the workload")
    if baseline is not None and baseline.name != "llama.cpp" and options.dtype == "float32":
        rows = [prompt.tokens for prompt in workload.prompts[:4]]
        scored = baseline.ask("score", rows=[row.tolist() for row in rows])["logprobs"]
        gaps[baseline.name] = models.check_logprobs(architecture, params, rows, scored, baseline.name)
    return gaps


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures, or with --simulate simulates, the workload of the flags."""
    if options.simulate:
        workload = _workload(options, 0 if options.workload else inputs.architecture_of(options).vocab_size)
        engine_options, cost = engines.engine_options(workload, options), engines.simulation_cost(options)
        return adaptive.simulate(workload, engine_options, cost, barrier=False, limit=options.max_response_tokens)
    architecture = inputs.architecture_of(options)
    workload = _workload(options, architecture.vocab_size)
    if options.temperature is not None:
        workload = dataclasses.replace(workload, temperature=options.temperature)
    engine_options = engines.engine_options(workload, options)
    engine_options = with_drafts(engine_options, architecture, options.drafts, jax.default_backend())
    check_baseline(options, BASELINES)
    folder = inputs.model_folder(options, architecture)
    if folder is None:
        params = inputs.random_weights(options, architecture, options.dtype)
    else:
        params = huggingface.load(folder)[1]  # float32, as references are
    baseline, described = None, {}
    with contextlib.ExitStack() as stack:
        if options.against is not None:
            baseline, described = start_baseline(options, workload)
            stack.callback(baseline.close)
        gaps = _logprob_gaps(options, architecture, params, workload, baseline)
        params = jax.tree.map(lambda weight: weight.astype(options.dtype), params)
        result = measure(options, architecture, params, workload, engine_options, baseline)
        if baseline is not None:
            result["against"] |= described
    return result | {"logprob_gap": gaps, "workload": options.workload or "synthetic"}


if __name__ == "__main__":
    command_line.start("rollout", run, before=engines.use_one_device_per_replica)

"""`bench.update`: one update of the policy, ours beside PyTorch's, on the same weights and minibatch.

Each runs in its own process, so that its memory is measured alone; updates alternate, so that other programs disturb
all equally. In float32 first the log-probabilities must agree, before anything is timed, and then the losses and the
norm of the gradient: speeds are compared only for the same update.
"""

import contextlib
import dataclasses
import math
import pathlib
import statistics
import sys
from typing import Any

import numpy as np
from absl import flags

from bench import command_line, inputs, models, workloads
from bench.json_subprocess import JsonSubprocess
from bench.measuring import in_turns
from bench.options import check_baseline, log
from bench.update_worker import LEARNING, Sizes
from bench.workloads import Lengths
from reinforce_ada_jax.policy.architecture import Architecture, to_hf

BASELINES = {"transformers": pathlib.Path(__file__).parent / "baselines" / "transformers_update.py"}
BASELINE_SETTINGS = {"attention": "sdpa", "optimizer": "fused", "recompute": True}
# Noise between the old policy's log-probabilities and this one's: enough that some ratios are clipped.
OLD_NOISE = 0.2
# Limit for the gaps of losses, in mean sizes of their terms, and of the gradient's norm, relative: TOLERANCE or, if it
# is larger, NORM_FACTOR times the change of a log-probability under neighbours of the weights (SmolLM2: 1.0e-5, and
# 5.6e-5 of the norm).
TOLERANCE, NORM_FACTOR = 1e-5, 10
# Updates whose losses are compared: before the first one, after it, after the second.
COMPARED = 3
# Name of our process that leaves out responses without advantage, with --zero_rows.
LEFT_OUT = "left_out"
HOST_UPDATES = 30
# Peaks of dense products in bfloat16, by the beginning of a device's name.
PEAK_FLOPS = {
    "NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12, "TPU v4": 275e12, "TPU v5 lite": 197e12,
    "TPU v5p": 459e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
}  # fmt: skip


def make_examples(sizes: Sizes, lengths: Lengths, vocab_size: int) -> list[dict[str, Any]]:
    """Returns random prompts and responses with advantages of -0.4 and 0.6.

    Raises:
      ValueError: a response is longer than `response_tokens`.
    """
    random = np.random.default_rng(sizes.seed)
    drawn = np.maximum(1, np.round(lengths(random, (sizes.rows,)))).astype(int)
    if drawn.max() > sizes.response_tokens:
        raise ValueError(
            f"--lengths gives responses of up to {drawn.max()} tokens, rows have room for --response_tokens="
            f"{sizes.response_tokens}."
        )
    return [
        {
            "prompt": random.integers(0, vocab_size, sizes.prompt_tokens).tolist(),
            "response": random.integers(0, vocab_size, length).tolist(),
            "advantage": float(random.random() < 0.5) - 0.4,
        }
        for length in drawn
    ]


def without_advantages(examples: list[dict[str, Any]], share: float, seed: int) -> list[dict[str, Any]]:
    """Sets the advantage of a share of the examples, chosen at random, to 0."""
    count = round(share * len(examples))
    chosen = set(np.random.default_rng([seed, 2]).permutation(len(examples))[:count].tolist())
    return [example | {"advantage": 0.0} if number in chosen else example for number, example in enumerate(examples)]


def _with_old_logprobs(examples: list[dict[str, Any]], scored: list[list[float]], seed: int) -> list[dict[str, Any]]:
    """Adds the old policy's log-probabilities: this one's with noise."""
    random = np.random.default_rng([seed, 1])
    return [
        example | {"old_logprobs": (np.array(row) + OLD_NOISE * random.standard_normal(len(row))).tolist()}
        for example, row in zip(examples, scored, strict=True)
    ]


def _threads(count: int) -> dict[str, str]:
    """Returns environment variables with which XLA, OpenMP and MKL use `count` threads; 0: all cores."""
    return dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(count)) if count else {}


def _learner(
    name: str,
    model: pathlib.Path | None,
    architecture: Architecture,
    sizes: Sizes,
    *,
    per_row: int = 1,
    devices: int = 1,
    threads: int = 0,
) -> tuple[JsonSubprocess, dict[str, Any]]:
    """Starts our process and loads the learner; returns it and its description."""
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if devices > 1:
        environment |= {"JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, "-m", "bench.update_worker"]
    process = JsonSubprocess(name, command, **environment, **_threads(threads))
    description = process.ask(
        "load", model=None if model is None else str(model), architecture=to_hf(architecture, "float32"),
        per_row=per_row, devices=devices, sizes=dataclasses.asdict(sizes),
    )  # fmt: skip
    return process, description


def _term_size(examples: list[dict[str, Any]]) -> float:
    """Returns the mean size of a token's advantage: the loss is the mean of terms of this size, of both signs."""
    lengths = [len(example["response"]) for example in examples]
    return float(np.average([abs(example["advantage"]) for example in examples], weights=lengths))


def _gaps(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], name: str, limit: float, term_size: float
) -> dict[str, float]:
    """Returns the gap of the first updates' losses, in `term_size`, and the relative gap of the first gradient's norm.

    The terms of a loss nearly cancel (0.03 is left of 0.48 with 16 rows), so a relative difference of losses would
    count their rounding many times.
    """

    def gap_of(key: str, updates: int) -> float:
        return max(abs(a[key] - b[key]) for a, b in zip(ours[:updates], theirs[:updates], strict=True))

    gaps = {"loss": gap_of("loss", COMPARED) / term_size, "grad_norm": gap_of("grad_norm", 1) / theirs[0]["grad_norm"]}
    for what, gap in gaps.items():
        models.check_gap(f"our values of {what}", gap, limit, name)
    return gaps


def necessary_flops(a: Architecture, examples: list[dict[str, Any]]) -> int:
    """Returns the FLOPs that the update needs by the usual rule, without padding and recomputation.

    The rule counts 6 per weight and 12 N H T per layer, for each of the T tokens of a prompt and its response.
    """
    lengths = [len(example["prompt"]) + len(example["response"]) for example in examples]
    per_context = 12 * a.num_layers * a.num_heads * a.head_dim
    return sum(length * (6 * a.active_parameters + per_context * length) for length in lengths)


def published_peak(device: str) -> float | None:
    """Returns the peak of dense products in bfloat16, operations per second, of a device in `PEAK_FLOPS`."""
    return next((peak for kind, peak in PEAK_FLOPS.items() if device.startswith(kind)), None)


def _summary(runs: list[dict[str, float]], tokens: int, flops: float | int, device: str) -> dict[str, Any]:
    """Returns medians of the timed updates; the first one, which compiles, is left out."""
    timed = runs[1:]
    seconds = statistics.median(run["seconds"] for run in timed)
    peak = published_peak(device)
    result = {
        "seconds_per_update": seconds,
        "tokens_per_s": tokens / seconds,
        "flops_per_s": flops / seconds,
        "mfu": None if peak is None else flops / seconds / peak,
        "cpu_seconds_per_update": statistics.median(run["cpu_seconds"] for run in timed),
        "seconds": [run["seconds"] for run in timed],
        "extra_bytes": int(max(run["extra_bytes"] for run in timed)),
        "losses": [run["loss"] for run in runs],
        "grad_norm": runs[0]["grad_norm"],
    }
    if "put_s" in runs[0]:
        result |= _host(timed)
    return result


def _host(runs: list[dict[str, float]]) -> dict[str, float]:
    """Returns medians of the host's share of an update."""
    return {
        "host_s": statistics.median(run["put_s"] + run["dispatch_s"] for run in runs),
        "host_cpu_s": statistics.median(run["host_cpu_s"] for run in runs),
    }


def host_time(layers: int) -> dict[str, Any]:
    """Measures the host's share of an update of a model with `layers` layers that costs the device next to nothing.

    Every update is waited for before the next one is handed over, so that none is delayed by the one before it.
    """
    architecture = dataclasses.replace(models.smallest(), num_layers=layers)
    sizes = Sizes(rows=8, prompt_tokens=8, response_tokens=8, micro_batches=2)
    examples = make_examples(sizes, workloads.constant(8), architecture.vocab_size)
    process, _ = _learner("ours", None, architecture, sizes)
    with contextlib.closing(process):
        process.ask("begin", examples=examples)
        runs = [process.run(number) for number in range(1 + HOST_UPDATES)][1:]
    result = {"layers": layers, "updates": HOST_UPDATES, **_host(runs)}
    result["whole_update_s"] = statistics.median(run["seconds"] for run in runs)
    log(f"host: {1000 * result['host_s']:.2f} ms an update at {layers} layers")
    return result


def _start(
    options: flags.FlagValues, architecture: Architecture, sizes: Sizes, stack: contextlib.ExitStack
) -> tuple[dict[str, JsonSubprocess], dict[str, dict[str, Any]]]:
    """Starts our processes and the baseline's; returns them and their descriptions by name."""
    processes, described = {}, {}
    model, against, threads = inputs.model_folder(options, architecture), options.against, options.threads
    ours = {"ours": 1}
    if options.pack > 1:
        ours["packed"] = options.pack
    if options.zero_rows is not None:
        ours[LEFT_OUT] = 1
    for name, per_row in ours.items():
        processes[name], described[name] = _learner(
            name, model, architecture, sizes, per_row=per_row, devices=options.replicas or 1, threads=threads
        )
        stack.callback(processes[name].close)
    if against is not None:
        command = [options.against_python, str(BASELINES[against])]
        processes[against] = JsonSubprocess(against, command, **_threads(threads))
        stack.callback(processes[against].close)
        settings = BASELINE_SETTINGS | {"recompute": not options.against_plain}
        described[against] = settings | processes[against].load_baseline(
            model=str(model), dtype=sizes.dtype, micro_batches=1 if options.against_plain else sizes.micro_batches,
            learning=LEARNING, settings=settings,
        )  # fmt: skip
    return processes, described


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures seconds and memory of the update of the flags; the first one of each process is not timed.

    Raises:
      ValueError: sizes that don't fit, a baseline that doesn't start, or one that computes something else.
      RuntimeError: a process ended.
    """
    architecture, against = inputs.architecture_of(options), options.against
    check_baseline(options, BASELINES)
    sizes = Sizes(
        rows=options.rows or 64,
        prompt_tokens=options.prompt_tokens or 64,
        response_tokens=options.response_tokens or 128,
        micro_batches=options.micro_batches,
        dtype=options.dtype,
        seed=options.seed,
    )
    if sizes.rows % sizes.micro_batches:
        raise ValueError(f"--rows={sizes.rows} can't be cut into --micro_batches={sizes.micro_batches}.")
    lengths = inputs.response_lengths(options, default=sizes.response_tokens)
    examples = make_examples(sizes, lengths, architecture.vocab_size)
    if options.zero_rows is not None:
        examples = without_advantages(examples, options.zero_rows, sizes.seed)
    gaps = {}
    with contextlib.ExitStack() as stack:
        processes, described = _start(options, architecture, sizes, stack)
        scored = processes["ours"].ask("score", examples=examples)
        ours, of_neighbours = (np.concatenate(scored[key]) for key in ("logprobs", "of_neighbours"))
        change = float(np.sqrt(np.mean((ours - of_neighbours) ** 2)))
        limit = max(TOLERANCE, NORM_FACTOR * change) if sizes.dtype == "float32" else math.inf
        if against is not None:
            theirs = np.concatenate(processes[against].ask("score", examples=examples)["logprobs"])
            gaps["logprob"] = float(np.abs(ours - theirs).max())
            if sizes.dtype == "float32":
                gaps["logprob_units"] = models.rounding_units(ours, of_neighbours, theirs)
                what = "our log-probabilities, in units of rounding,"
                models.check_gap(what, gaps["logprob_units"], models.MOST_UNITS, against)
        examples = _with_old_logprobs(examples, scored["logprobs"], sizes.seed)
        for name, process in processes.items():
            how = {"leave_out": True} if name == LEFT_OUT else {}
            described[name] |= process.ask("begin", examples=examples, **how)
        updates = {name: process.run for name, process in processes.items()}
        repeat = max(options.repeat or 5, COMPARED - 1)
        runs = in_turns(updates, repeat, lambda update: f"{update['seconds']:.2f} s")
    tokens = sum(len(example["prompt"]) + len(example["response"]) for example in examples)
    flops, term_size = necessary_flops(architecture, examples), _term_size(examples)
    found = {
        name: _summary(taken, tokens, flops, described[name]["device"]) | described[name]
        for name, taken in runs.items()
    }
    result: dict[str, Any] = {"tokens": tokens, "necessary_flops": flops, **found["ours"]}
    if "packed" in found:
        packed_gaps = _gaps(runs["packed"], runs["ours"], "unpacked rows", limit, term_size)
        result["packed"] = found["packed"] | {"gaps": packed_gaps}
        result["packing_speedup"] = found["ours"]["seconds_per_update"] / found["packed"]["seconds_per_update"]
    if LEFT_OUT in found:
        left_out_gaps = _gaps(runs[LEFT_OUT], runs["ours"], "all rows", limit, term_size)
        result[LEFT_OUT] = found[LEFT_OUT] | {"zero_rows": options.zero_rows, "gaps": left_out_gaps}
        result["left_out_time_ratio"] = found[LEFT_OUT]["seconds_per_update"] / found["ours"]["seconds_per_update"]
    if against is not None:
        result["against"] = {"name": against, **found[against]}
        result["gaps"] = gaps | _gaps(runs["ours"], runs[against], against, limit, term_size)
        keys = {"time": "seconds_per_update", "cpu_time": "cpu_seconds_per_update", "memory": "extra_bytes"}
        result |= {f"{what}_ratio": found["ours"][key] / found[against][key] for what, key in keys.items()}
    result["host"] = host_time(options.layers)
    return result | {"sizes": dataclasses.asdict(sizes), "model": models.describe(architecture)}


if __name__ == "__main__":
    command_line.start("update", run, before=command_line.leave_the_device)

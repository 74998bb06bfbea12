"""Flags of all measurements; `inputs` has what the flags name."""

import sys
from collections.abc import Collection

from absl import flags

from bench.methods import TASKS
from reinforce_ada_jax import cli
from reinforce_ada_jax.policy.presets import PUBLISHED

STRINGS = {
    "workload": (None, "A rollout workload such as bench/baselines/rollout_tiny.json; without it, --requests."),
    "model": (None, f"A Hugging Face folder, with weights or without, or one of {', '.join(PUBLISHED)}."),
    "shape": (
        None,
        "HIDDENxLAYERS, or a published name: a random model, written to the folder --model if that does not exist.",
    ),
    "dtype": (
        "auto",
        "Type of weights and arithmetic; auto: float32 on CPUs and for `update`, bfloat16 on other devices and for "
        "`accelerator`.",
    ),
    "kv_dtype": ("model", "Type of the engine's keys and values: model (as --dtype) or int8."),
    "weight_dtype": ("model", "Type of the matrices that the engine decodes from: model (as --dtype) or int8."),
    "attention": ("auto", "The attention backend of the engine."),
    "against": (
        None,
        "Also measure this baseline, in alternating repetitions: transformers, llama.cpp for a GGUF file, or trl for "
        "`iteration`.",
    ),
    "against_python": (sys.executable, "Python interpreter of the environment of the baseline."),
    "lengths": (None, "Response lengths: median,sigma,shortest,longest of a lognormal distribution, a file, or a run."),
    "json": (None, "File for the numbers."),
    "output": ("runs/learning", "Folder for the runs of `learning`, their tables and figures."),
}
# Defaults are those that `rollout` was tuned to on two cores.
INTEGERS = {
    "slots": (64, "Responses decoded at the same time, in all replicas together."),
    "replicas": (None, "Copies of the weights, each with an equal share of the slots; default on a CPU: one per core."),
    "window": (64, "Tokens decoded for all slots in one dispatch."),
    "page_size": (32, "Tokens of a page."),
    "pages": (0, "Number of pages; 0: enough that no slot waits for one."),
    "open_prompts": (
        0,
        "Prompts whose pages each replica holds at a time; 0: a quarter more than slots, or half (rounds below 4).",
    ),
    "prefill_tokens": (128, "Prompt tokens that a replica prefills before a decode step."),
    "drafts": (None, "Most tokens that a step of `rollout` guesses for a slot; default: as in a run."),
    "repeat": (None, "Timed repetitions; 5 of `rollout`, `update` and `split`, 1 of `adaptive`, 3 of the others."),
    "requests": (
        None,
        "Number of prompts, if there is no --workload; default of `serve` 256, of `turns` four for each slot.",
    ),
    "prompt_tokens": (None, "Length of prompts; default 512, for `update`, `serve` and `turns` 64."),
    "samples": (1, "Responses to each prompt of --requests."),
    "response_tokens": (
        None,
        "Length of responses, if --lengths is not given; default 1024, for `update`, `serve` and `turns` 128, for "
        "`long_responses` 65,536.",
    ),
    "prompts": (512, "Prompts of the `adaptive` workload."),
    "samples_per_round": (8, "Draws of one round of `adaptive`."),
    "turns": (4, "Turns of a trajectory of `turns`."),
    "environment_tokens": (8, "Tokens of the environment between two turns, of the --response_tokens of `turns`."),
    "max_rounds": (4, "Most rounds of `adaptive`."),
    "hosts": (1, "Simulation: hosts that decode in step, each with --slots and a share of --prompts."),
    "max_response_tokens": (None, "Simulation: token limit of responses; the prescribed lengths by default."),
    "copy_mb": (1024, "Size of the array whose copying gives the memory bandwidth, with --requests."),
    "seed": (0, "Seed of workloads and random weights."),
    "seeds": (5, "Runs of `learning` for each algorithm."),
    "updates": (None, "Updates of each run of `learning`; default: those of its table."),
    "jobs": (1, "Runs of `learning` at the same time, one core each."),
    "rows": (None, "Rows of the batch of `loss` (16), responses of the minibatch of `update` (64)."),
    "micro_batches": (8, "Micro-batches of `update`, and of the baseline of `iteration`."),
    "pack": (1, "Above 1: `update` is also measured with this learning.responses_per_row."),
    "threads": (
        0,
        "Threads of each process of `update`; 0: all cores. On a CPU also those of `rollout` and `adaptive`, then with "
        "one replica by default; 0: one for each replica.",
    ),
    "layers": (28, "Layers of the small model whose host time `update` measures."),
    "row_tokens": (1024, "Tokens of a row of `loss`."),
    "words": (151_936, "Vocabulary size of `loss`."),
    "columns": (256, "Size of the hidden states of `loss`."),
}
FLOATS = {  # default, most, text
    "zero_rows": (None, 1.0, "Share of responses without advantage; `update` is measured with and without them."),
    "temperature": (None, None, "Sampling temperature of `rollout`; default: the workload's."),
    "scale": (1.0, None, "Factor of the response lengths of `adaptive`."),
    "bandwidth": (None, None, "Memory bandwidth in bytes per second, for a simulation of --model."),
}
BOOLEANS = {
    "against_plain": "PyTorch takes the minibatch of `update` as one piece, and recomputes nothing.",
    "barrier": "Also measure with the rounds of all prompts in step.",
    "simulate": "Run only the scheduling, in virtual time.",
}
ZERO_ALLOWED = ("drafts", "pages", "open_prompts", "seed", "threads")
# Settings of each variant of `iteration`; prompts, seeds and everything else are alike.
VARIANTS = {
    "rounds": {"collection.barrier": False, "collection.overlap": "none"},
    "barrier": {"collection.barrier": True, "collection.overlap": "none"},
    "overlap": {"collection.barrier": False, "collection.overlap": "finish"},
    "invariant": {"collection.barrier": False, "collection.overlap": "none", "model.numerics": "invariant"},
}
DEFAULT_VARIANTS = ("rounds", "barrier", "overlap")  # possible with any configuration


_MODEL = ("model", "shape", "dtype", "seed")
_ENGINE = (
    "attention", "kv_dtype", "open_prompts", "page_size", "pages", "prefill_tokens", "slots", "weight_dtype",
)  # fmt: skip
_SIMULATION = ("bandwidth", "cost", "max_response_tokens", "simulate")
_LENGTHS = ("lengths", "response_tokens")
# Flags that the help of each measurement has, beside --json.
USED = {
    "accelerator": (*_MODEL, "copy_mb", "micro_batches", "page_size", "prompt_tokens", "repeat", "requests",
                    "response_tokens", "rows", "slots"),
    "adaptive": (*_MODEL, *_ENGINE, *_SIMULATION, "barrier", "hosts", "lengths", "max_rounds", "prompts", "repeat",
                 "replicas", "samples_per_round", "scale", "speculative", "strategy", "threads", "window"),
    "iteration": ("config", "model", "shape", "lengths", "against", "against_python", "micro_batches", "repeat",
                  "variants"),
    "learning": ("algorithms", "jobs", "learning_rates", "output", "own", "seeds", "task", "updates"),
    "long_responses": (*_MODEL, "attention", "page_size", "prefill_tokens", "response_tokens", "slots", "window"),
    "loss": ("columns", "dtype", "repeat", "row_tokens", "rows", "words"),
    "preemption": ("config", "repeat"),
    "rollout": (*_MODEL, *_ENGINE, *_SIMULATION, *_LENGTHS, "against", "against_python", "copy_mb", "drafts",
                "prompt_tokens", "repeat", "replicas", "requests", "samples", "temperature", "threads", "window",
                "workload"),
    "serve": (*_MODEL, *_ENGINE, *_LENGTHS, "prompt_tokens", "repeat", "requests", "samples"),
    "split": ("config", *_LENGTHS, "repeat", "replicas", "shape", "threads"),
    "start": ("repeat",),
    "turns": (*_MODEL, *_ENGINE, "environment_tokens", "prompt_tokens", "repeat", "requests", "response_tokens",
              "turns", "window"),
    "update": (*_MODEL, *_LENGTHS, "against", "against_plain", "against_python", "layers", "micro_batches", "pack",
               "prompt_tokens", "repeat", "replicas", "rows", "threads", "zero_rows"),
}  # fmt: skip


def define_flags(values: flags.FlagValues = flags.FLAGS) -> flags.FlagValues:
    """Defines every flag of every measurement."""
    for name, (default, text) in STRINGS.items():
        flags.DEFINE_string(name, default, text, flag_values=values)
    for name, (default, text) in INTEGERS.items():
        flags.DEFINE_integer(name, default, text, lower_bound=0 if name in ZERO_ALLOWED else 1, flag_values=values)
    for name, text in BOOLEANS.items():
        flags.DEFINE_bool(name, False, text, flag_values=values)
    for name, (default, most, text) in FLOATS.items():
        flags.DEFINE_float(name, default, text, lower_bound=0.0, upper_bound=most, flag_values=values)
    flags.DEFINE_enum(
        "strategy", "balance", ("balance", "positive"), "Stopping rule of the adaptive workload.", flag_values=values
    )
    flags.DEFINE_bool(
        "speculative", None, "Draw in idle slots before verdicts are there; default: if a round is below a group.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_list("cost", [], "Costs of a simulation in seconds: decode_step=0.01,...", flag_values=values)
    flags.DEFINE_list("task", ["cipher"], f"Tasks of `learning`, of {', '.join(TASKS)}.", flag_values=values)
    flags.DEFINE_list(
        "learning_rates", [],
        "Learning rate of all runs of `learning`, or several: the best for each algorithm; default: that of its table.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_multi_string(
        "own", [],
        "An algorithm of yours in `learning`: NAME,strategy=FILE:FUNCTION,... with settings of the section collection.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_list("algorithms", [], "Algorithms of `learning`; all by default.", flag_values=values)
    flags.DEFINE_list(
        "variants", list(DEFAULT_VARIANTS), f"Variants of `iteration`, of {', '.join(VARIANTS)}.", flag_values=values
    )
    cli.config_flag(values, "The configuration of `iteration`, `split` and `preemption`: a packaged one, or a file.")
    return values


def log(text: str) -> None:
    """Prints a line on the progress of a measurement."""
    print(text, file=sys.stderr, flush=True)


def check_baseline(options: flags.FlagValues, baselines: Collection[str]) -> None:
    """Raises ValueError where --against names no baseline, or one that couldn't read the weights."""
    if options.against is None:
        return
    if options.against not in baselines:
        raise ValueError(f"--against={options.against} is not one of {', '.join(baselines)}.")
    if options.model in PUBLISHED:
        raise ValueError("--against needs a --model folder with weights, which both can read.")

"""Measurements of the parts of a run, and plans for runs on machines that aren't there.

    python -m reinforce_ada_jax.benchmark rollout --model=HF_DIR --workload=FILE --slots=64 --window=64 --json=OUT
    python -m reinforce_ada_jax.benchmark rollout ... --against=transformers --against_python=.venv-parity/bin/python
    python -m reinforce_ada_jax.benchmark rollout --model=Qwen2.5-1.5B --dtype=bfloat16 --requests=1024
        --prompt_tokens=512 --response_tokens=1024 --slots=256 --page_size=64
    python -m reinforce_ada_jax.benchmark adaptive --slots=256 --scale=0.25 --barrier
    python -m reinforce_ada_jax.benchmark adaptive --simulate --slots=512 --lengths=RUN --model=Qwen2.5-1.5B
        --dtype=bfloat16 --bandwidth=8.1e11
    python -m reinforce_ada_jax.benchmark learning --output=runs/learning --seeds=3 --jobs=2 --json=OUT
    python -m reinforce_ada_jax.benchmark update --model=HF_DIR --against=transformers
        --against_python=.venv-parity/bin/python --json=OUT
    python -m reinforce_ada_jax.benchmark iteration --config=configs/tiny.py --json=OUT
    python -m reinforce_ada_jax.benchmark loss --rows=16 --row_tokens=1024 --words=151936 --columns=256 --json=OUT

`rollout` draws a fixed number of responses for each prompt, `adaptive` rounds of them until scripted verdicts balance;
`learning` trains the built-in model by every algorithm; `update` is one update of the learner, `loss` the policy loss
and its gradients by itself, `iteration` all of training by its phases.
With --simulate nothing runs but the scheduling. What the numbers mean, and what they were: docs/performance.md.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import config_flags

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.benchmarks import iteration as iteration_benchmark
from reinforce_ada_jax.benchmarks import learning as learning_benchmark
from reinforce_ada_jax.benchmarks import loss as loss_benchmark
from reinforce_ada_jax.benchmarks import rollout as rollout_benchmark
from reinforce_ada_jax.benchmarks import update as update_benchmark
from reinforce_ada_jax.benchmarks import workloads
from reinforce_ada_jax.benchmarks.rollout import Baseline
from reinforce_ada_jax.benchmarks.workloads import Workload
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.policy.architecture import Architecture, from_hf
from reinforce_ada_jax.policy.presets import PUBLISHED
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.files import write_atomically
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.sampling.simulation import Cost
from reinforce_ada_jax.sampling.state import EngineOptions

# Tokens at which algorithms are compared: about what 100 updates of grpo with n = 4, and of balance, take.
LEARNING_BUDGETS = (64_000, 150_000, 335_000)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> flags.FlagValues:
    """Every flag of every benchmark, with the defaults that `rollout` was tuned to on two cores."""
    texts = {
        "workload": (None, "A rollout workload, as in shared/benchmarks; else --requests says what is drawn."),
        "model": (None, f"A Hugging Face folder, with weights or without, or one of {', '.join(PUBLISHED)}."),
        "shape": (
            None,
            "HIDDENxLAYERS, or a published name: a random model of this shape, made in the folder --model if it isn't "
            "there.",
        ),
        "dtype": ("float32", "Of weights and arithmetic."),
        "attention": ("auto", "The attention backend of the engine."),
        "against": (None, f"Also measure one of {', '.join(rollout_benchmark.BASELINES)}, in turns."),
        "against_python": (sys.executable, "The interpreter of its environment."),
        "lengths": (None, "Of responses: median,sigma,shortest,longest of a lognormal distribution, a file, or a run."),
        "json": (None, "Where to write the numbers."),
        "output": ("runs/learning", "The folder for the runs of `learning`, their table and their figure."),
    }
    integers = {
        "slots": (64, "Responses decoded side by side, by all replicas together."),
        "replicas": (None, "Copies of the weights, each with its share of the slots; on a CPU one for each core."),
        "window": (64, "Tokens decoded for all slots in one dispatch."),
        "page_size": (32, "Tokens a page holds."),
        "pages": (0, "Pages; 0: so many that none is ever waited for."),
        "open_prompts": (0, "Prompts whose pages each replica holds at a time; 0: a quarter more than it has slots."),
        "prefill_rows": (4, "Prompts that a replica prefills in one dispatch."),
        "repeat": (None, "Timed repetitions; 5 of `rollout` and `update`, 3 of `iteration`, 1 of `adaptive`."),
        "requests": (None, "In place of --workload: so many prompts,"),
        "prompt_tokens": (None, "each of so many tokens (512; 64 of `update`),"),
        "samples": (1, "with so many responses,"),
        "response_tokens": (None, "each of so many tokens, unless --lengths is given (1024; 128 of `update`)."),
        "prompts": (512, "Prompts of the adaptive workload."),
        "max_response_tokens": (None, "In a simulation: reserve pages for so many tokens; else for those that come."),
        "copy_mb": (1024, "Size of the array whose copying gives the memory bandwidth, with --requests."),
        "seed": (0, "Of workloads and random weights."),
        "seeds": (3, "Runs of `learning` for each algorithm."),
        "jobs": (1, "Of these side by side, one core each."),
        "rows": (None, "Of the batch of `loss` (16), responses of the minibatch of `update` (64)."),
        "micro_batches": (8, "Into which `update` cuts it."),
        "pack": (1, "Of `update`, above 1: also with so many responses to a row."),
        "threads": (0, "Of each of the processes of `update`; 0: as many as there are cores."),
        "layers": (28, "Of the small model whose host time `update` measures."),
        "row_tokens": (1024, "Of each of them."),
        "words": (151_936, "Of its vocabulary."),
        "columns": (256, "Of its hidden states."),
    }
    for name, (default, text) in texts.items():
        flags.DEFINE_string(name, default, text, flag_values=values)
    for name, (default, text) in integers.items():
        lower_bound = 0 if name in ("pages", "open_prompts", "seed", "threads") else 1
        flags.DEFINE_integer(name, default, text, lower_bound=lower_bound, flag_values=values)
    flags.DEFINE_float("scale", 1.0, "Adaptive response lengths are multiplied by this.", flag_values=values)
    flags.DEFINE_float("bandwidth", None, "Bytes a second: costs of a simulation of --model.", flag_values=values)
    flags.DEFINE_list("algorithms", [], "Of `learning`; all by default.", flag_values=values)
    flags.DEFINE_list("variants", list(iteration_benchmark.VARIANTS), "What `iteration` compares.", flag_values=values)
    config_flags.DEFINE_config_file("config", None, "The configuration of `iteration`.", flag_values=values)
    flags.DEFINE_list("cost", [], "Costs of a simulation in seconds: decode_step=0.01,...", flag_values=values)
    flags.DEFINE_bool(
        "against_plain",
        False,
        "PyTorch's `update` takes the minibatch whole, and recomputes nothing.",
        flag_values=values,
    )
    flags.DEFINE_bool("barrier", False, "Also with all rounds in step.", flag_values=values)
    flags.DEFINE_bool("simulate", False, "In virtual time.", flag_values=values)
    return values


# ---- what to run -----------------------------------------------------------------------------------------------------


def _architecture(options: flags.FlagValues) -> Architecture:
    if options.shape:
        return workloads.shaped(options.shape)
    if options.model is None:
        raise ValueError("--model is missing: a Hugging Face folder, or with --shape one to be made.")
    if options.model in PUBLISHED:
        return from_hf(PUBLISHED[options.model])
    return huggingface.read_config(options.model)


def _random_weights(options: flags.FlagValues, architecture: Architecture, dtype: str) -> Params:
    return transformer.init(architecture, jax.random.key(options.seed), dtype=jnp.dtype(dtype))


def _model_folder(options: flags.FlagValues, architecture: Architecture) -> pathlib.Path | None:
    """The folder --model, where it has weights; with --shape it is made first, so that baselines can read it.

    Raises:
      ValueError: --shape without a folder, or another model is in it.
    """
    if options.model is None:
        raise ValueError("--shape needs --model=FOLDER, where the model is put.")
    folder = pathlib.Path(options.model)
    if options.shape and not folder.exists():
        huggingface.save(folder, architecture, _random_weights(options, architecture, "float32"))
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    if huggingface.read_config(folder) != architecture:
        raise ValueError(f"{folder} holds another model than --shape={options.shape}: name another folder.")
    return folder


def _load_model(options: flags.FlagValues, architecture: Architecture) -> Params:
    """The folder's weights in float32, as references are; where it has none, random ones of --dtype."""
    folder = _model_folder(options, architecture)
    return _random_weights(options, architecture, options.dtype) if folder is None else huggingface.load(folder)[1]


def _workload(options: flags.FlagValues, vocab_size: int) -> Workload:
    if (options.workload is None) == (options.requests is None):
        raise ValueError("give either --workload=FILE or --requests (with --prompt_tokens, --response_tokens).")
    if options.workload is not None:
        return workloads.load(pathlib.Path(options.workload))
    lengths = workloads.constant(options.response_tokens or 1024)
    if options.lengths:
        lengths = workloads.parse_lengths(options.lengths)
    prompt_tokens = options.prompt_tokens or 512
    return workloads.synthetic(options.requests, options.samples, prompt_tokens, lengths, vocab_size, options.seed)


def _replicas(options: flags.FlagValues) -> int:
    return options.replicas or 1


def _engine_options(options: flags.FlagValues, workload: Workload) -> EngineOptions:
    names = ("window", "page_size", "pages", "prefill_rows", "dtype", "attention")
    if options.slots % _replicas(options):
        raise ValueError(f"--slots={options.slots} can't be shared by {_replicas(options)} replicas.")
    slots = options.slots // _replicas(options)
    # Behind a barrier no prompt is closed before the last round has begun: all of them stay open.
    open_prompts = max(slots, len(workload.prompts)) if options.barrier else slots + slots // 4
    return rollout_benchmark.engine_options(
        workload,
        **{name: options[name].value for name in names},
        slots=slots,
        open_prompts=options.open_prompts or open_prompts,
        limit=options.max_response_tokens if options.simulate else None,
    )


def _cost(options: flags.FlagValues) -> Cost:
    """--bandwidth with --model, amended by --cost; without either, every decode step takes 10 ms."""
    cost = Cost(decode_step=0.01)
    if options.bandwidth:
        cost = rollout_benchmark.roofline(_architecture(options), jnp.dtype(options.dtype).itemsize, options.bandwidth)
    changes = dict(item.partition("=")[::2] for item in options.cost)
    unknown = sorted(changes.keys() - vars(cost).keys())
    if unknown:
        raise ValueError(f"--cost has no {unknown[0]!r}; it has {', '.join(vars(cost))}.")
    return Cost(**(vars(cost) | {name: float(seconds) for name, seconds in changes.items()}))


# ---- benchmarks ------------------------------------------------------------------------------------------------------


def _logprob_gaps(
    options: flags.FlagValues,
    architecture: Architecture,
    params: Params,
    workload: Workload,
    baseline: Baseline | None,
) -> dict[str, float]:
    """Whose log-probabilities ours were held against: the workload's where it was made for this model, and in float32
    the baseline's on the first prompts."""
    gaps = {}
    if not options.shape and workload.reference is not None:
        gaps["workload"] = workloads.check_reference(architecture, params, *workload.reference, "the workload")
    if baseline is not None and options.dtype == "float32":
        rows = [prompt.tokens for prompt in workload.prompts[:4]]
        theirs = baseline.logprobs(rows)
        gaps[baseline.name] = max(
            workloads.check_reference(architecture, params, row, expected, baseline.name)
            for row, expected in zip(rows, theirs, strict=True)
        )
    return gaps


def _check_baseline(options: flags.FlagValues, baselines: Collection[str]) -> None:
    if options.against is None:
        return
    if options.against not in baselines:
        raise ValueError(f"--against={options.against} is not one of {', '.join(baselines)}.")
    if options.model in PUBLISHED:
        raise ValueError("--against needs a --model folder with weights, which both can read.")


@contextlib.contextmanager
def _baseline(options: flags.FlagValues, workload: Workload) -> Iterator[Baseline | None]:
    if options.against is None:
        yield None
        return
    with cli.user_input():
        baseline = Baseline(
            options.against, options.against_python, pathlib.Path(options.model), workload, options.dtype
        )
    try:
        yield baseline
    finally:
        baseline.close()


def rollout(options: flags.FlagValues) -> dict[str, Any]:
    """Timed repetitions of a workload; see `rollout_benchmark.measure`."""
    with cli.user_input():
        if options.simulate and options.workload:
            workload = _workload(options, 0)
        else:
            architecture = _architecture(options)
            workload = _workload(options, architecture.vocab_size)
        engine_options = _engine_options(options, workload)
        if options.simulate:
            return rollout_benchmark.simulate(
                workload, engine_options, _cost(options), barrier=False, limit=options.max_response_tokens
            )
        _check_baseline(options, rollout_benchmark.BASELINES)
        params = _load_model(options, architecture)
    with _baseline(options, workload) as baseline:
        with cli.user_input():
            gaps = _logprob_gaps(options, architecture, params, workload, baseline)
        params = jax.tree.map(lambda weight: weight.astype(options.dtype), params)
        result = rollout_benchmark.measure(
            architecture, params, workload, engine_options, replicas=_replicas(options),
            repeat=options.repeat or 5, baseline=baseline,
            copy_bytes=0 if options.workload else options.copy_mb * 2**20,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
    return result | {"logprob_gap": gaps, "workload": options.workload or "synthetic"}


def adaptive(options: flags.FlagValues) -> dict[str, Any]:
    """Rounds until scripted verdicts balance, on a model that costs next to nothing; see `workloads.adaptive`."""
    architecture = workloads.smallest()
    with cli.user_input():
        sizes = workloads.AdaptiveSizes(prompts=options.prompts, scale=options.scale)
        lengths = workloads.parse_lengths(options.lengths or workloads.ADAPTIVE_LENGTHS)
        workload = workloads.adaptive(sizes, lengths, architecture.vocab_size, options.seed)
        engine_options = _engine_options(options, workload)
        if options.simulate:
            return rollout_benchmark.simulate(
                workload, engine_options, _cost(options), barrier=options.barrier, limit=options.max_response_tokens
            )
    params = transformer.init(architecture, jax.random.key(options.seed), dtype=jnp.dtype(options.dtype))
    progress = Progress(total=1, done=0)

    def report(closed: int, drawn: int) -> None:
        progress.phase(f"{closed}/{len(workload.prompts)} prompts, {drawn:,} responses")

    result = rollout_benchmark.adaptive(
        architecture,
        params,
        workload,
        engine_options,
        replicas=_replicas(options),
        barrier=options.barrier,
        repeat=options.repeat or 1,
        on_progress=report,
    )
    progress.close()
    return result


def learning(options: flags.FlagValues) -> dict[str, Any]:
    """Held-out accuracy at equal updates and equal tokens; see benchmarks/learning.py."""
    with cli.user_input():
        return learning_benchmark.measure(
            pathlib.Path(options.output),
            seeds=options.seeds,
            jobs=options.jobs,
            names=options.algorithms,
            budgets=LEARNING_BUDGETS,
            say=lambda text: print(text, flush=True),
        )


def loss(options: flags.FlagValues) -> dict[str, Any]:
    """Memory and time of the fused loss beside the naive one; see benchmarks/loss.py."""
    return loss_benchmark.measure(
        rows=options.rows or 16,
        length=options.row_tokens,
        words=options.words,
        columns=options.columns,
        dtype=options.dtype,
        repeat=options.repeat or 3,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )


def update(options: flags.FlagValues) -> dict[str, Any]:
    """Time, memory and host time of the learner's update; see benchmarks/update.py."""
    with cli.user_input():
        architecture = _architecture(options)
        _check_baseline(options, update_benchmark.BASELINES)
        model = _model_folder(options, architecture)
        sizes = update_benchmark.Sizes(
            rows=options.rows or 64,
            prompt_tokens=options.prompt_tokens or 64,
            response_tokens=options.response_tokens or 128,
            micro_batches=options.micro_batches,
            dtype=options.dtype,
            seed=options.seed,
        )
        if sizes.rows % sizes.micro_batches:
            raise ValueError(f"--rows={sizes.rows} can't be cut into --micro_batches={sizes.micro_batches}.")
        lengths = workloads.constant(sizes.response_tokens)
        if options.lengths:
            lengths = workloads.parse_lengths(options.lengths)
        return update_benchmark.measure(
            architecture, model, sizes, lengths,
            repeat=options.repeat or 5, per_row=options.pack, devices=options.replicas or 1, threads=options.threads,
            against=options.against, against_python=options.against_python, against_plain=options.against_plain,
            host_layers=options.layers, say=lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip


def iteration(options: flags.FlagValues) -> dict[str, Any]:
    """Whole iterations of training, by phase; see benchmarks/iteration.py."""
    with cli.user_input():
        if options.config is None:
            raise ValueError("--config is missing: a configuration of train, such as configs/tiny.py.")
        return iteration_benchmark.measure(
            config_lib.resolve(options.config),
            variants=options.variants,
            repeat=options.repeat or 3,
            lengths=workloads.parse_lengths(options.lengths or workloads.ADAPTIVE_LENGTHS),
            architecture=workloads.shaped(options.shape) if options.shape else None,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )


# A benchmark of another part of a run is a function from the flags to its numbers.
BENCHMARKS = {
    "rollout": rollout, "adaptive": adaptive, "learning": learning, "loss": loss, "update": update,
    "iteration": iteration,
}  # fmt: skip


def summary(result: dict[str, Any], indent: str = "") -> str:
    """A line a number, nested ones indented."""
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", summary(value, indent + "  ")]
            continue
        if isinstance(value, float):
            text = f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
        elif isinstance(value, list):
            text = " ".join(f"{item:.3g}" for item in value)
        else:
            text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        lines.append(f"{indent}{name:<28}{text}")
    return "\n".join(lines)


def only_cpu() -> bool:
    """Whether JAX will find nothing but CPUs, asked before it looks."""
    if jax.config.jax_platforms:
        return jax.config.jax_platforms == "cpu"
    return not any(importlib.util.find_spec(name) for name in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"))


def use_cores(name: str, options: flags.FlagValues) -> None:
    """On a CPU engines have a replica for each core, unless --replicas says how many; the others all threads.

    Of `update` the accelerator is its processes' alone.
    """
    if name == "update":
        jax.config.update("jax_platforms", "cpu")
    elif only_cpu() and not options.simulate and name in ("rollout", "adaptive"):
        options.replicas = options.replicas or len(os.sched_getaffinity(0))
        rollout_benchmark.use_one_core_each(options.replicas)


def main(arguments: list[str], options: flags.FlagValues) -> None:
    """Runs the benchmark that the first argument names, prints its numbers, and keeps them in --json."""
    if len(arguments) != 1 or arguments[0] not in BENCHMARKS:
        cli.fail(f"say which benchmark, and nothing else: {', '.join(BENCHMARKS)}. Options are --name=value.")
    result = {"benchmark": arguments[0], **BENCHMARKS[arguments[0]](options)}
    print(summary(result))
    if options.json:
        write_atomically(pathlib.Path(options.json), json.dumps(result, indent=2) + "\n")
        print(f"kept in {options.json}")


if __name__ == "__main__":
    define_flags()

    def start(arguments: list[str]) -> None:
        use_cores(arguments[0] if arguments else "", flags.FLAGS)
        main(arguments, flags.FLAGS)

    cli.run_with_arguments(start)

"""Scores of a run, or of a Hugging Face folder, on benchmark files: avg@k, pass@k and all-correct@k.

    python -m reinforce_ada_jax.evaluate --config=configs/tiny.py --workdir=runs/tiny
    python -m reinforce_ada_jax.evaluate --config=configs/qwen_1p5b.py --model=HF_DIR --benchmarks=a.jsonl,b.jsonl
    python -m reinforce_ada_jax.evaluate --config=configs/tiny.py --workdir=runs/tiny --regrade
    python -m reinforce_ada_jax.evaluate --config=... --workdir=runs/mine --initial=evaluations/BASE_MODEL

The newest checkpoint of a run is evaluated. Every response is stored with its verdict as soon as it is graded, so the
same command continues after a kill. --regrade grades the stored responses again, without a model. They are in
WORKDIR/evaluations/ITERATION/, for a model folder in evaluations/NAME/ below the current directory, or in --output. The
table is stored there as table.md.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.config.paths import check_input, check_output
from reinforce_ada_jax.config.settings import setting
from reinforce_ada_jax.distributed import command
from reinforce_ada_jax.files import buckets, local_copy

if TYPE_CHECKING:
    from reinforce_ada_jax.evaluation.stored_evaluation import StoredEvaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of the command beside the configuration."""

    workdir: str | None = setting(None, "A run's work directory: its newest checkpoint is evaluated.")
    model: str | None = setting(None, "A Hugging Face folder or GGUF file to evaluate instead.")
    benchmarks: Sequence[str] | None = setting(None, "JSONL files, instead of the configured ones.")
    samples: int | None = setting(None, "Responses per problem, instead of evaluation.samples.")
    output: str | None = setting(
        None, "The folder of the responses and the table; default: WORKDIR/evaluations/ITERATION, or evaluations/NAME "
        "of the model's folder.",
    )  # fmt: skip
    regrade: bool = setting(False, "Grade the stored responses again; no model is needed.")
    initial: str | None = setting(
        None, "The folder of an earlier evaluation of the same problems, such as evaluations/NAME of the model that a "
        "run began with: the table shows accuracy by initial pass rate. Default: pass_rate of the problems that have "
        "one.",
    )  # fmt: skip
    dry_run: bool = setting(False, "Check the input, and print what would run and how long it takes.")


def with_flags(config: Config, benchmarks: Sequence[str], samples: int | None) -> Config:
    """Returns the configuration with the values of --benchmarks and --samples; ValueError if it is not valid."""
    from reinforce_ada_jax.data.prompts import benchmark_name
    from reinforce_ada_jax.training import components as components_lib

    components_lib.check_graders(config, [*config.evaluation.benchmarks, *benchmarks])
    changes: dict[str, object] = {} if samples is None else {"evaluation.samples": samples}
    if benchmarks:
        names = [benchmark_name(source) for source in benchmarks]
        graders = [entry for entry in config.evaluation.graders if (entry.rpartition("=")[0] or entry) in names]
        changes |= {"evaluation.benchmarks": tuple(benchmarks), "evaluation.graders": tuple(graders)}
    config = config_lib.check(config_lib.replaced(config, changes), trains=False)
    if not config.evaluation.benchmarks:
        raise ValueError("there is nothing to evaluate on: --benchmarks=FILE.jsonl[,FILE.jsonl].")
    return config


def _check(config: Config, options: Options) -> None:
    """Raises ValueError where the flags do not go together, or a path can't be read or written."""
    from reinforce_ada_jax.distributed import processes

    if (options.workdir is None) == (options.model is None):
        raise ValueError("give either --workdir (a run of ours) or --model (a Hugging Face folder).")
    if options.regrade and processes.count() > 1:
        raise ValueError(f"--regrade reads no model: start it in one process, not in {processes.count()}.")
    if options.dry_run and options.regrade:
        raise ValueError("--dry_run checks what would be drawn, and --regrade draws nothing: drop one of them.")
    for name in ("workdir", "model", "initial"):
        check_input(f"--{name}", getattr(options, name))
    if options.model is None and not config.model.path:
        raise ValueError("model.path is empty: name the model that the run trains, --config.model.path=DIR.")
    if options.output is not None:
        check_output("--output", options.output, folder=True)


def main(config: Config, options: Options) -> None:
    """Evaluates, or grades stored responses again; prints and writes the table and the results."""
    from reinforce_ada_jax.data.prompts import benchmark_name
    from reinforce_ada_jax.distributed import processes
    from reinforce_ada_jax.evaluation import response_store, stored_evaluation
    from reinforce_ada_jax.evaluation.stored_evaluation import PolicySource
    from reinforce_ada_jax.planning import here
    from reinforce_ada_jax.training import components as components_lib

    workdir, model, regrade = options.workdir, options.model, options.regrade
    with contextlib.ExitStack() as stack:
        with cli.user_input():
            _check(config, options)
            config = with_flags(config, [*filter(None, options.benchmarks or ())], options.samples)
            run = None if workdir is None else stack.enter_context(local_copy.opened(workdir))[0]
            written = None
            if options.output is not None:
                written = stack.enter_context(local_copy.opened(options.output, "--output"))[0]
            before = None if options.initial is None else buckets.local(options.initial)
            source = PolicySource(run, components_lib.model_folder(model or config.model.path))
            if run is None:
                config = config_lib.replaced(config, {"lora.rank": 0})  # a folder has no adapters
                names = [f"{benchmark_name(each)}.jsonl" for each in config.evaluation.benchmarks]
                stores = [(written or source.output(0)) / name for name in names]
                config = response_store.with_stored_dtype(config, stores)
            if run is not None or not regrade:
                config = components_lib.for_devices(config, run, model)
            if run is not None:
                graded_by = () if regrade else config_lib.GRADED_BY
                config_lib.check_evaluated(config, run, config_lib.DRAWN_WITH + graded_by)
        with cli.interruptible("Graded responses are stored"):
            if regrade:
                evaluation = stored_evaluation.regrade(config, source, written, before, samples=options.samples)
            else:
                cost = here.drawing_line if options.dry_run else None
                evaluation = stored_evaluation.evaluate(config, source, written, before, cost=cost)
        if evaluation is not None:
            with cli.user_input():
                _write(evaluation, run, model)
        processes.any_of(False)  # waits until process 0 has written everything


def _write(evaluation: "StoredEvaluation", run: pathlib.Path | None, model: str | None) -> None:
    from reinforce_ada_jax.evaluation import evaluator, results_table

    results, table = results_table.summarize(evaluation, run)
    print(table)
    results_table.write(evaluation.output / "table.md", ", ".join(results), table)
    if run is None:
        file, about = evaluation.output / "results.json", {"model": model}
    else:
        iteration = evaluation.drawn["iteration"]
        file, about = evaluator.results_file(run, iteration), {"iteration": iteration}
    hashes = evaluator.hashes(evaluation.benchmarks)
    evaluator.save_results(file, about, evaluator.as_metrics(results) | hashes)
    print(f"responses and table.md are in {buckets.origin(evaluation.output)}, results in {buckets.origin(file)}")


if __name__ == "__main__":
    CONFIG = cli.define_config()
    FIELDS = dataclasses.fields(Options)
    for field in FIELDS:
        cli.DEFINE[field.type](field.name, field.default, field.metadata["text"])

    def start() -> None:
        given: dict[str, Any] = {field.name: flags.FLAGS[field.name].value for field in FIELDS}
        main(cli.resolved(CONFIG), Options(**given))

    command.run(start)

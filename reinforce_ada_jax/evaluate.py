"""avg@k, pass@k and all-correct@k of a run's newest checkpoint, or of a Hugging Face folder, on benchmark files.

    python -m reinforce_ada_jax.evaluate --config=configs/tiny.py --workdir=runs/tiny
    python -m reinforce_ada_jax.evaluate --config=configs/qwen_1p5b.py --model=HF_DIR --benchmarks=a.jsonl,b.jsonl
    python -m reinforce_ada_jax.evaluate --config=configs/tiny.py --workdir=runs/tiny --regrade

Every response is kept, with its verdict, as soon as it is graded: the same command again goes on from
there, and --regrade grades the stored ones again without a model. They are in WORKDIR/evaluations/ITERATION/, of a
folder in evaluations/NAME/ below the current directory, or where --output says, with the table as table.md.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection.collect import SampleFn, VerifyFn
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data.problems import problems_hash
from reinforce_ada_jax.data.prompts import benchmark_name, load_problems
from reinforce_ada_jax.evaluation import paper_results, response_store, scores
from reinforce_ada_jax.evaluation.response_store import Responses, Store
from reinforce_ada_jax.evaluation.scores import statistics
from reinforce_ada_jax.policy import adapter_files, huggingface
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.files import write_atomically
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.sampling.token import stream
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import summary
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.types import Prompt, Verdict

Benchmarks = dict[str, list[Prompt]]


def _metrics(name: str, result: Mapping[str, float]) -> dict[str, float]:
    return {f"evaluation/{name}/{key}": value for key, value in result.items()}


# ---- drawing ---------------------------------------------------------------------------------------------------------


def load_benchmarks(components: Components, config: Config) -> Benchmarks:
    """The configured benchmarks by name, tokenised.

    Raises:
      ValueError: two of them have the same name, or `evaluation.graders` names one that isn't there.
    """
    components_lib.check_graders(config, config.evaluation.benchmarks)
    return {name: components.prompts(source, config) for name, source in named(config.evaluation.benchmarks).items()}


def named(sources: Sequence[str]) -> dict[str, str]:
    """The sources by their benchmarks' names; ValueError where two have the same."""
    by_name: dict[str, str] = {}
    for source in sources:
        name = benchmark_name(source)
        if name in by_name:
            raise ValueError(f"two benchmarks are called {name!r}: rename one of the files.")
        by_name[name] = source
    return by_name


def verify_fns(components: Components, verifiers: VerifierPool, config: Config) -> dict[str, VerifyFn]:
    """How each benchmark is graded. Right or wrong: nothing shapes the reward of an evaluation."""
    shaping, graders = Shaping(config.reward.positive_threshold), components_lib.benchmark_graders(config)
    names = map(benchmark_name, config.evaluation.benchmarks)
    return {name: components.verify_fn(verifiers, shaping, graders.get(name, "")) for name in names}


def sampler(params: Params, rollouts: Rollouts, config: Config, iteration: int) -> SampleFn:
    """Draws from these weights as the `evaluation` section says."""
    evaluation = config.evaluation
    sampling = SamplingParams(
        evaluation.max_response_tokens, evaluation.temperature, top_k=evaluation.top_k, top_p=evaluation.top_p
    )
    return rollouts.sampler(params, stream=stream(iteration, evaluation=True), sampling=sampling)


def _draw(
    prompts: Sequence[Prompt],
    sample_fn: SampleFn,
    verify_fn: VerifyFn,
    rollouts: Rollouts,
    config: Config,
    on_progress: Callable[[int, int], None],
    store: Store | None = None,
) -> Responses:
    return response_store.draw(
        prompts,
        sample_fn,
        verify_fn,
        config.evaluation.samples,
        slots=rollouts.engine.options.slots * rollouts.engine.replicas,
        deterministic=components_lib.deterministic(config),
        store=store,
        decode=rollouts.engine.tokenizer.decode,
        on_progress=on_progress,
    )


def evaluate(
    benchmarks: Benchmarks,
    params: Params,
    rollouts: Rollouts,
    verify_fns: dict[str, VerifyFn],
    config: Config,
    iteration: int,
    on_progress: Callable[[str], None],
) -> dict[str, float]:
    """`evaluation/<set>/...` of these weights: samples drawn and graded by the very loop that trains."""
    metrics = {}
    sample_fn = sampler(params, rollouts, config, iteration)

    def report(closed: int, drawn: int) -> None:
        on_progress(f"evaluating {name}: {closed}/{len(prompts)} problems, {drawn:,} responses")

    for name, prompts in benchmarks.items():
        drawn = _draw(prompts, sample_fn, verify_fns[name], rollouts, config, report)
        metrics |= _metrics(name, statistics(drawn.values()))
    return metrics


def file_of(workdir: pathlib.Path, iteration: int) -> pathlib.Path:
    """Where the figures of an iteration's evaluation stand."""
    return workdir / "evaluations" / f"{iteration:06d}.json"


def save(workdir: pathlib.Path, iteration: int, metrics: dict[str, float]) -> pathlib.Path:
    """Writes evaluations/<iteration>.json; benchmarks evaluated before and not now stay in it."""
    file = file_of(workdir, iteration)
    _merge(file, {"iteration": iteration}, metrics)
    return file


def _merge(file: pathlib.Path, about: dict[str, int | str], metrics: dict[str, float]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(file.read_text()) if file.exists() else about
    now = {key.split("/")[1] for key in metrics}
    others = {key: value for key, value in before.items() if "/" not in key or key.split("/")[1] not in now}
    write_atomically(file, json.dumps(others | metrics, indent=2) + "\n")


# ---- the command -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was evaluated, and all its responses.

    Attributes:
      drawn: how, as in the headers of the stores.
      output: the folder that keeps the responses.
      labels: of every problem by benchmark and id.
      responses: by benchmark.
    """

    drawn: dict[str, Any]
    output: pathlib.Path
    labels: dict[str, dict[str, Mapping[str, str]]]
    responses: dict[str, Responses]


def _choose(config: Config, benchmarks: Sequence[str], samples: int | None) -> Config:
    """Returns the checked configuration with the values of the flags."""
    components_lib.check_graders(config, [*config.evaluation.benchmarks, *benchmarks])
    if benchmarks:
        config = config_lib.replaced(config, {"evaluation.benchmarks": tuple(benchmarks)})
        names = [benchmark_name(source) for source in benchmarks]
        graders = (entry for entry in config.evaluation.graders if entry.rpartition("=")[0] in names)
        config = config_lib.replaced(config, {"evaluation.graders": tuple(graders)})
    if samples is not None:
        config = config_lib.replaced(config, {"evaluation.samples": samples})
    config_lib.check(config)
    if not config.evaluation.benchmarks:
        raise ValueError("there is nothing to evaluate on: --benchmarks=FILE.jsonl[,FILE.jsonl].")
    return config


def _newest(workdir: pathlib.Path, config: Config) -> int:
    """The iteration of the newest checkpoint."""
    from reinforce_ada_jax.training import checkpoint  # noqa: PLC0415  (Orbax takes a second to import)

    if not checkpoint.holds_checkpoint(workdir):
        raise ValueError(f"{workdir} holds no checkpoint: train first, or name another --workdir.")
    checkpoints = checkpoint.Checkpoints(workdir, keep=config.checkpoint.keep)
    try:
        newest = checkpoints.latest()
    finally:
        checkpoints.close()
    if newest is None:
        raise ValueError(f"{workdir} holds no finished checkpoint: train on, or name another --workdir.")
    return newest


def _weights(config: Config, components: Components, workdir: pathlib.Path | None, iteration: int) -> Params:
    """Of the run's checkpoint, or of the model folder."""
    from reinforce_ada_jax import export  # noqa: PLC0415  (as in `_newest`)

    if workdir is None:
        return huggingface.load(components.folder, components.mesh, config.model.compute_dtype)[1]
    return export.read_params(workdir, config, components, iteration, config.model.compute_dtype)[1]


def _fingerprint(workdir: pathlib.Path | None, folder: pathlib.Path, iteration: int) -> str:
    from reinforce_ada_jax.training import checkpoint  # noqa: PLC0415  (as in `_newest`)

    return adapter_files.fingerprint(folder) if workdir is None else checkpoint.fingerprint(workdir, iteration)


def _output(workdir: pathlib.Path | None, model: str | None, iteration: int) -> pathlib.Path:
    """Where responses and table are kept unless --output says."""
    if workdir is None:
        return pathlib.Path("evaluations") / components_lib.model_folder(model).resolve().name
    return workdir / "evaluations" / f"{iteration:06d}"


def _newest_output(workdir: pathlib.Path | None, model: str | None) -> pathlib.Path:
    """The one with the newest responses that are there."""
    if workdir is None:
        return _output(workdir, model, 0)
    stored = [int(folder.name) for folder in (workdir / "evaluations").glob("[0-9]*") if folder.is_dir()]
    if not stored:
        raise ValueError(f"{workdir} holds no stored responses: evaluate without --regrade first.")
    return _output(workdir, model, max(stored))


def sample(config: Config, workdir: pathlib.Path | None, model: str | None, output: pathlib.Path | None) -> Evaluation:
    """Draws and grades what the stores don't have yet."""
    evaluation = config.evaluation
    with cli.user_input():
        iteration = 0 if workdir is None else _newest(workdir, config)
        components = components_lib.build(config, components_lib.model_folder(model or config.model.path))
        sets = load_benchmarks(components, config)
        output, graders = output or _output(workdir, model, iteration), components_lib.benchmark_graders(config)
        sampling = {key: getattr(evaluation, key) for key in ("temperature", "top_k", "top_p", "max_response_tokens")}
        sampling |= {"stop_ids": list(components.tokenizer.stop_ids), "iteration": iteration}
        drawn = response_store.drawn_with(
            config, _fingerprint(workdir, components.folder, iteration), sampling, evaluation.samples
        )
        stores, missing = {}, {}
        for name, prompts in sets.items():
            problems = problems_hash((prompt.id, prompt.problem) for prompt in prompts)
            graded = response_store.graded_by(config, graders.get(name, ""), [prompt.answer for prompt in prompts])
            header = {"drawn": drawn | {"problems": problems}, "graded": graded}
            stores[name] = Store(output / f"{name}.jsonl", header)
            there = stores[name].of((prompt.id for prompt in prompts), evaluation.samples)
            missing[name] = [prompt for prompt in prompts if prompt.id not in there]
        verifier_pool = components_lib.verifier_pool(config)
        params = _weights(config, components, workdir, iteration) if any(missing.values()) else None
    who = str(components.folder) if workdir is None else f"{workdir}, iteration {iteration}"
    counts = {name: (len(prompts), len(missing[name])) for name, prompts in sets.items()}
    print(summary.drawing(config, components, who, counts, evaluation.samples, evaluation, output), flush=True)
    if params is not None:
        _fill(config, components, params, iteration, stores, missing, verifier_pool, sum(map(len, sets.values())))
    return Evaluation(
        drawn,
        output,
        {name: {prompt.id: prompt.labels for prompt in prompts} for name, prompts in sets.items()},
        {
            name: stores[name].of((prompt.id for prompt in prompts), evaluation.samples)
            for name, prompts in sets.items()
        },
    )


def _fill(
    config: Config,
    components: Components,
    params: Params,
    iteration: int,
    stores: Mapping[str, Store],
    missing: Benchmarks,
    verifier_pool: VerifierPool,
    num_problems: int,
) -> None:
    """Draws, grades and stores the responses to `missing`."""
    with contextlib.ExitStack() as stack:
        with cli.user_input():
            for store in stores.values():
                stack.enter_context(store)
        progress = Progress(num_problems, num_problems - sum(map(len, missing.values())), "problems")
        stack.enter_context(contextlib.closing(progress))
        rollouts = Rollouts(components.engine)
        sample_fn = sampler(params, rollouts, config, iteration)
        fns = verify_fns(components, stack.enter_context(verifier_pool), config)
        for name, prompts in missing.items():

            def report(closed: int, drawn: int, name: str = name, done: int = progress.done) -> None:
                progress.reach(done + closed, f"{name}: {drawn:,} responses")

            _draw(prompts, sample_fn, fns[name], rollouts, config, report, stores[name])


def regrade(config: Config, workdir: pathlib.Path | None, model: str | None, output: pathlib.Path | None) -> Evaluation:
    """Grades what is stored again: no weight is read and no engine built."""
    with cli.user_input():
        output = output or _newest_output(workdir, model)
        sets = {name: load_problems(source) for name, source in named(config.evaluation.benchmarks).items()}
        graders, stores = components_lib.benchmark_graders(config), {}
        for name, problems in sets.items():
            file = output / f"{name}.jsonl"
            drawn = response_store.read_header(file)["drawn"]
            drawn["problems"] = problems_hash((problem["id"], problem["problem"]) for problem in problems)
            graded = response_store.graded_by(
                config, graders.get(name, ""), [problem["answer"] for problem in problems]
            )
            stores[name] = Store(file, {"drawn": drawn, "graded": graded}, regrade=True)
        if len({store.header["drawn"]["samples"] for store in stores.values()}) > 1:
            raise ValueError(f"the benchmarks in {output} have different numbers of samples: --benchmarks=one of them.")
        verifier_pool = components_lib.verifier_pool(config)
    shaping = Shaping(config.reward.positive_threshold)
    progress = Progress(sum(len(store) for store in stores.values()), 0, "responses")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(progress))
        with cli.user_input():
            for store in stores.values():
                stack.enter_context(store)
        verifiers = stack.enter_context(verifier_pool)
        for name, store in stores.items():

            def grade(pairs, lengths, grader: str = graders.get(name, "")) -> list[Verdict]:
                return shaping.all(verifiers.grade_all(pairs, grader), lengths)

            begin, answers = progress.done, {problem["id"]: problem["answer"] for problem in sets[name]}
            for done in store.regrade(answers, grade):
                progress.reach(begin + done, name)
    samples = drawn["samples"]
    found = {name: stores[name].of((problem["id"] for problem in sets[name]), samples) for name in sets}
    unfinished = [
        f"{name} {len(found[name]):,} of {len(sets[name]):,}" for name in sets if len(found[name]) < len(sets[name])
    ]
    if unfinished:
        cli.fail(
            f"what is stored is graded again, but not all problems have their responses ({', '.join(unfinished)}): the "
            "same command without --regrade draws the others.",
            cli.STOPPED,
        )
    labels = {name: {problem["id"]: problem.get("labels", {}) for problem in sets[name]} for name in sets}
    return Evaluation(drawn, output, labels, found)


def published_rows(workdir: pathlib.Path) -> list[paper_results.Row]:
    """The paper's runs of the model and the algorithm that this run was trained with, as its config.json says."""
    file = workdir / "config.json"
    if not file.exists():
        return []
    saved = json.loads(file.read_text())
    name, collection = components_lib.model_folder(saved["model"]["path"]).name, saved["collection"]
    return paper_results.rows(name, collection["strategy"], collection["group_size"])


def main(
    config: Config,
    workdir: str | None,
    model: str | None,
    benchmarks: Sequence[str],
    samples: int | None,
    output: str | None = None,
    again: bool = False,
) -> None:
    """Evaluates, prints the table, and keeps it; with `again`, grades what is stored."""
    with cli.user_input():
        if (workdir is None) == (model is None):
            raise ValueError("give either --workdir (a run of ours) or --model (a Hugging Face folder).")
        run = None if workdir is None else pathlib.Path(workdir)
        config = _choose(config, benchmarks, samples)
        if run is not None:
            keys = config_lib.DRAWN_WITH + (() if again else config_lib.GRADED_BY)
            config_lib.check_evaluated(config, run, keys)
    with cli.interruptible("What is graded is kept"):
        how = regrade if again else sample
        made = how(config, run, model, None if output is None else pathlib.Path(output))
    results = {name: statistics(found.values()) for name, found in made.responses.items()}
    shown = scores.table(
        results,
        samples=made.drawn["samples"],
        temperature=made.drawn["temperature"],
        max_response_tokens=made.drawn["max_response_tokens"],
        labelled={name: scores.by_label(made.labels[name], found) for name, found in made.responses.items()},
        rows=[] if run is None else published_rows(run),
    )
    print(shown)
    write_atomically(made.output / "table.md", shown + "\n")
    metrics: dict[str, float] = {}
    for name, result in results.items():
        metrics |= _metrics(name, result)
    figures = made.output / "results.json"
    if run is None:
        _merge(figures, {"model": model}, metrics)
    else:
        figures = save(run, made.drawn["iteration"], metrics)
    print(f"responses and table.md are kept in {made.output}, figures in {figures}")


if __name__ == "__main__":
    CONFIG = cli.define_config()
    WORKDIR = flags.DEFINE_string("workdir", None, "A run's work directory: its newest checkpoint is evaluated.")
    MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder to evaluate instead.")
    BENCHMARKS = flags.DEFINE_list("benchmarks", [], "JSONL files, in place of the configured ones.")
    SAMPLES = flags.DEFINE_integer("samples", None, "Responses for each problem, in place of evaluation.samples.")
    OUTPUT = flags.DEFINE_string(
        "output",
        None,
        "The folder that keeps responses and table; default: WORKDIR/evaluations/ITERATION, or evaluations/NAME of the "
        "model's folder.",
    )
    REGRADE = flags.DEFINE_bool("regrade", False, "Grade the stored responses again; no model is needed.")
    cli.run(
        lambda: main(
            config_lib.resolve(CONFIG.value),
            WORKDIR.value,
            MODEL.value,
            BENCHMARKS.value,
            SAMPLES.value,
            OUTPUT.value,
            REGRADE.value,
        )
    )

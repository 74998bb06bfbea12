"""Evaluation of a policy on benchmarks while it trains: avg@k, pass@k and all-correct@k, without keeping responses.

The command `evaluate` uses `stored_evaluation`, which stores every response.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import VerifyFn
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data.prompts import benchmark_name
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Stop
from reinforce_ada_jax.evaluation import fixed_draws
from reinforce_ada_jax.evaluation.response_store import GradedResponses, hash_of_problems
from reinforce_ada_jax.evaluation.scores import Statistics, by_difficulty, difficulty_statistics, statistics
from reinforce_ada_jax.files.durable import exclusive, read_object, write_atomically
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.history import PROBLEMS
from reinforce_ada_jax.reporting.writers import Metrics
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.programs import num_replicas
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.token import stream
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import reward_check
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.drawing_hosts import DRAW, DrawingHosts, Order
from reinforce_ada_jax.training.run import Inputs, Run, TrainingStopped
from reinforce_ada_jax.training.sharded_collection import Counts, DrawFn, Job, collect_shards
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import Pool, Prompt

Benchmarks = dict[str, list[Prompt]]
REMEDY = "Remove it, then run the same command."  # where a file of evaluations/ is damaged


def by_name(sources: Sequence[str]) -> dict[str, str]:
    """Returns the sources by the names of their benchmarks; ValueError if two have the same name."""
    named: dict[str, str] = {}
    for source in sources:
        name = benchmark_name(source)
        if name in named:
            remedy = "name it once" if source == named[name] else "rename one of the files"
            raise ValueError(f"two benchmarks are called {name!r}: {remedy}.")
        named[name] = source
    return named


def load_benchmarks(components: Components, config: Config, report: Callable[[str], None] | None = None) -> Benchmarks:
    """Returns the tokenised prompts of the configured benchmarks by name; `report` gets a line on each."""
    components_lib.check_graders(config, config.evaluation.benchmarks)
    sources = by_name(config.evaluation.benchmarks)
    return {name: components.prompts(source, config, report) for name, source in sources.items()}


def known_pass_rates(prompts: Sequence[Prompt]) -> dict[str, float]:
    """Returns {id: pass rate before training} of the prompts whose source gives one."""
    return {prompt.id: prompt.pass_rate for prompt in prompts if prompt.pass_rate is not None}


def load_evaluator(config: Config, components: Components) -> "Evaluator | None":
    benchmarks = load_benchmarks(components, config)
    return Evaluator(benchmarks) if benchmarks else None


def streams(benchmarks: Mapping[str, Sequence[Prompt]], iteration: int) -> dict[str, int]:
    """Returns the first word of the addresses of each benchmark's samples.

    The other words are the id of a problem and the number of the draw. A benchmark that has an id of an earlier
    benchmark gets its own first word. Otherwise both would have the same noise, and averages over both a larger error.
    """
    words, earlier = {}, set[str]()
    for name, prompts in benchmarks.items():
        ids = {prompt.id for prompt in prompts}
        words[name] = stream(iteration, evaluation=True, benchmark="" if ids.isdisjoint(earlier) else name)
        earlier |= ids
    return words


def verify_fns(components: Components, verifiers: VerifierPool, config: Config) -> dict[str, VerifyFn]:
    """Returns the verification function of each benchmark. Rewards are not shaped: a response is right or wrong."""
    shaping, graders = Shaping(config.reward.positive_threshold), components_lib.benchmark_graders(config)
    names = map(benchmark_name, config.evaluation.benchmarks)
    return {name: components.verify_fn(verifiers, shaping, graders.get(name, "")) for name in names}


def as_metrics(results: Mapping[str, Statistics]) -> Metrics:
    """Returns {"evaluation/BENCHMARK/KEY": value} of the statistics of each benchmark."""
    return {f"evaluation/{name}/{key}": value for name, result in results.items() for key, value in result.items()}


def results_file(workdir: pathlib.Path, iteration: int) -> pathlib.Path:
    return workdir / "evaluations" / f"{iteration:06d}.json"


def hashes(benchmarks: Benchmarks) -> dict[str, str]:
    """Returns {"evaluation/BENCHMARK/problems_hash": hash}, by which `plot` compares runs on the same problems only."""
    return {f"evaluation/{name}/{PROBLEMS}": hash_of_problems(prompts) for name, prompts in benchmarks.items()}


def other_problems(workdir: pathlib.Path, iteration: int, now: Mapping[str, str]) -> str:
    """Returns a warning if the evaluation before this iteration had other `hashes` than those of now; "" if not."""
    folder = results_file(workdir, iteration).parent
    earlier = [file for file in folder.glob("*.json") if file.stem.isdecimal() and int(file.stem) < iteration]
    if not earlier:
        return ""
    newest = max(earlier, key=lambda file: int(file.stem))
    try:
        saved = read_object(newest, REMEDY)
    except ValueError:  # a damaged file of the past is no reason to stop
        return ""
    other = [key.split("/")[1] for key, value in now.items() if saved.get(key, value) != value]
    return "" if not other else (
        f"warning: {', '.join(other)} had other problems after iteration {int(newest.stem)}, so the results can't be "
        "compared. Give other problems a file of another name."
    )  # fmt: skip


def save_results(file: pathlib.Path, about: Mapping[str, int | str | None], metrics: Mapping[str, float | str]) -> None:
    """Writes metrics into a file that begins with `about`; metrics of other benchmarks stay in the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(file.parent):
        before = read_object(file, REMEDY) if file.exists() else about
        now = {key.split("/")[1] for key in metrics}
        others = {key: value for key, value in before.items() if "/" not in key or key.split("/")[1] not in now}
        write_atomically(file, json.dumps({**others, **metrics}, indent=2) + "\n")


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluation of a training run on benchmarks; `train` passes it to the loop."""

    benchmarks: Benchmarks

    def __call__(self, run: Run, state: RunState) -> Metrics:
        """Returns `evaluation/BENCHMARK/...` of a run's policy, and writes evaluations/<iteration>.json.

        Raises Interrupted if the run was asked to end, TrainingStopped if too many responses could not be graded, or
        the file is damaged.
        """
        assert run.rollouts is not None
        config, components, iteration = run.config, run.components, state.iteration
        weights, words = run.rollouts.decode_weights(run.policy(state)), streams(self.benchmarks, iteration)
        verify = verify_fns(components, run.verifiers, config)
        graders = components.graders(run.verifiers)
        results, verdicts, graders.failure = {}, [], ""
        for name, prompts in self.benchmarks.items():

            def on_progress(closed: int, drawn: int, name: str = name, count: int = len(prompts)) -> None:
                run.stop.check(f"evaluating {name}: {closed}/{count} problems, {drawn:,} responses")

            if isinstance(run.rollouts, DrawingHosts):
                drawn = self._drawn_by(run.rollouts, run, name, iteration)
            else:
                draw = fixed_draws.from_policy(
                    weights, run.rollouts, config.evaluation, words[name], config, components, verify[name]
                )
                drawn = draw(prompts, samples=config.evaluation.samples, on_progress=on_progress)
            verdicts += [response.verdict for responses in drawn.values() for response in responses]
            difficulties = by_difficulty(known_pass_rates(prompts), drawn)
            results[name] = statistics(drawn.values()) | difficulty_statistics(difficulties)
        what, remedy = f"the evaluation after iteration {iteration}", reward_check.training_remedy(config)
        if message := reward_check.too_many_failed(config, graders, what, verdicts, remedy):
            raise TrainingStopped(message)
        metrics = as_metrics(results)
        if processes.is_writer():
            problems = hashes(self.benchmarks)
            if warning := other_problems(run.workdir, iteration, problems):
                run.progress.say(warning)
            try:
                save_results(results_file(run.workdir, iteration), {"iteration": iteration}, metrics | problems)
            except ValueError as error:
                raise TrainingStopped(str(error)) from error
        return metrics

    def _drawn_by(self, hosts: DrawingHosts, run: Run, benchmark: str, iteration: int) -> GradedResponses:
        """Returns graded responses that the processes which only draw have drawn with the newest weights."""
        samples, engine, prompts = run.config.evaluation.samples, run.components.engine, self.benchmarks[benchmark]
        shards = hosts.shards(Order(action=DRAW, benchmark=benchmark, iteration=iteration, samples=samples), run.stop)
        size, drawn = fixed_draws.chunk_size(engine.options.slots * num_replicas(engine.mesh), samples), {}
        for first in range(0, len(prompts), size):
            pools, _ = collect_shards(Job(prompts[first : first + size], strategies.fixed(samples)), shards)
            drawn |= {pool.prompt.id: fixed_draws.graded(pool) for pool in pools}
        return drawn

    def draw_fn(
        self, run: Inputs, rollouts: Rollouts, weights: Params, benchmark: str, iteration: int, stop: Stop
    ) -> DrawFn:
        """Returns the function that draws and grades problems of a benchmark, on the devices of this process."""
        config, components = run.config, run.components
        collect_fn, verify_fn = fixed_draws.collector(
            weights, rollouts, config.evaluation, streams(self.benchmarks, iteration)[benchmark], config, components,
            verify_fns(components, run.verifiers, config)[benchmark],
        )  # fmt: skip

        def on_progress(closed: int, drawn: int) -> None:
            stop.check(f"evaluating {benchmark}: {closed} problems, {drawn:,} responses")

        def draw(job: Job) -> tuple[list[Pool], Counts]:
            return collect_fn(job.prompts, verify_fn=verify_fn, config=job.strategy, on_progress=on_progress), Counts()

        return draw

    def is_done(self, run: Run, iteration: int) -> bool:
        """Returns True in every process if evaluations/<iteration>.json has all benchmarks."""
        file = results_file(run.workdir, iteration)
        saved = read_object(file, REMEDY) if file.exists() else {}
        return processes.any_of(all(f"evaluation/{name}/avg" in saved for name in self.benchmarks))

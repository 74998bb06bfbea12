"""History of a run, read from its work directory: metrics.jsonl, evaluations/, config.json and started.json."""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from reinforce_ada_jax.files.durable import read_object
from reinforce_ada_jax.reporting.writers import Metrics, read_metrics

# Seconds that `COLLECTING` includes: parts of collecting, and work at the same time. They are not added again.
WITHIN_COLLECTING = ("time/host_between_windows_s", "time/reshard_s", "time/verify_s")
# If a run collects while it updates, only the wait for the collection takes time of its own.
COLLECTING, WAITING = "time/collect_s", "time/wait_s"
NEEDED = ("collection/tokens", "collection/zero_signal_share")
EVALUATING = "time/evaluate_s"
CONFIG = "config.json"
STARTED = "started.json"  # date, commit and device of the newest start of a run
PROBLEMS = "problems_hash"  # evaluation/BENCHMARK/problems_hash in evaluations/*.json: the hash of its problems
# {"pass", "all_correct" or "initial": {updates: {x: value}}} of one benchmark. x is k. For "initial", x is the middle
# of a range of initial pass rates, and the value is the accuracy of the problems in this range.
EvaluationCurves = dict[str, dict[float, dict[float, float]]]


class Accuracy(NamedTuple):
    """The E evaluations of one benchmark over a run."""

    updates: Float[np.ndarray, " E"]
    tokens: Float[np.ndarray, " E"]
    average: Float[np.ndarray, " E"]
    error: Float[np.ndarray, " E"]  # standard error


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """Curves of one run over its I iterations."""

    name: str  # of the work directory
    samples: int  # responses per problem of an evaluation
    updates: Float[np.ndarray, " I"]  # number of updates at the end of each iteration
    # Running totals; NaN after an iteration without a line, because its share is not known.
    tokens: Float[np.ndarray, " I"]  # generated until then, with discarded draws, without evaluations
    seconds: Float[np.ndarray, " I"]  # spent until then on collecting and updating
    metrics: dict[str, Float[np.ndarray, " I"]]  # by key of metrics.jsonl; NaN where an iteration lacks the key
    evaluations: dict[str, Accuracy]  # by benchmark; the first may be the evaluation before the first iteration
    curves: dict[str, EvaluationCurves]  # by benchmark, from evaluations/
    config: dict[str, Any]  # config.json
    workdir: pathlib.Path
    before: Metrics = dataclasses.field(default_factory=dict)  # evaluation before the first iteration; {}: none
    started: dict[str, Any] = dataclasses.field(default_factory=dict)  # started.json: date, commit, device; {}: none
    problems: dict[str, str] = dataclasses.field(default_factory=dict)  # hash of its problems, by benchmark

    def at(self, updates: Float[np.ndarray, " E"], values: Float[np.ndarray, " I"]) -> Float[np.ndarray, " E"]:
        """Interpolates running totals (`tokens`, `seconds`) linearly at `updates`; after 0 updates they are 0."""
        return np.interp(updates, np.insert(self.updates, 0, 0.0), np.insert(values, 0, 0.0))


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file of a run; raises ValueError if there is none."""
    try:
        return read_object(file, "Name a run's work directory.")
    except OSError as error:
        raise ValueError(f"{file} can't be read ({error.strerror}): name a run's work directory.") from error


def _read_evaluation(file: pathlib.Path) -> Metrics:
    """Returns the results in a file of evaluations/; raises ValueError if it does not name its iteration."""
    result = read_json(file)
    if not isinstance(result.get("iteration"), int):
        raise ValueError(f"{file} is damaged: it has no number of an iteration. Remove it, then run the same command.")
    return result


def _curves(evaluations: Sequence[Metrics], per_iteration: int) -> dict[str, EvaluationCurves]:
    curves: dict[str, EvaluationCurves] = {}
    for result in evaluations:
        for key, value in result.items():
            match = re.fullmatch(r"evaluation/(.+)/(?:(pass|all_correct)_at|avg_(initial))_([\d._]+)", key)
            if match:
                x = float(np.mean([float(end) for end in match[4].split("_")]))
                by_updates = curves.setdefault(match[1], {}).setdefault(match[2] or match[3], {})
                by_updates.setdefault(float(result["iteration"] * per_iteration), {})[x] = value
    return curves


def _accuracies(points: Sequence[tuple[float, float, Metrics]]) -> dict[str, Accuracy]:
    """Returns the evaluations by benchmark; each point is (updates, tokens, metrics)."""
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    for updates, tokens, metrics in points:
        for key, value in metrics.items():
            if key.startswith("evaluation/") and key.endswith("/avg"):
                error = metrics.get(f"{key}_standard_error", np.nan)
                rows.setdefault(key.split("/")[1], []).append((updates, tokens, value, error))
    return {name: Accuracy(*np.array(found, float).T) for name, found in rows.items()}


def _problems(evaluations: Sequence[Metrics]) -> dict[str, str]:
    """Returns {benchmark: hash of its problems} from the files of evaluations/; the newest file decides."""
    found = [(key.split("/"), value) for result in evaluations for key, value in result.items()]
    return {parts[1]: str(value) for parts, value in found if parts[0] == "evaluation" and parts[2:] == [PROBLEMS]}


def load(workdir: pathlib.Path) -> History:
    """Reads a work directory; leaves out an unfinished last line of metrics.jsonl. ValueError if it holds no run."""
    lines = read_metrics(workdir)
    if not lines:
        raise ValueError(f"{workdir} has no metrics.jsonl with a finished iteration: name a run's work directory.")
    return of_lines(workdir, lines)


def of_lines(workdir: pathlib.Path, lines: Sequence[Metrics]) -> History:
    """Returns the history of a work directory with these lines of metrics.jsonl; there may be no line yet."""
    config = read_json(workdir / CONFIG)
    try:
        per_iteration = config["collection"]["prompts_per_iteration"] // config["learning"]["prompts_per_update"]
        samples = config["evaluation"]["samples"]
        needed = np.array([[line[key] for key in NEEDED] for line in lines], float).reshape(-1, len(NEEDED))
    except KeyError as error:
        raise ValueError(f"{workdir} is no run of train: its config.json or metrics.jsonl lacks {error}.") from error
    except ZeroDivisionError as error:
        raise ValueError(f"{workdir / CONFIG} is damaged: its learning.prompts_per_update is 0.") from error
    discarded = np.array([line.get("collection/discarded_tokens", 0) for line in lines], float)
    iterations = np.array([line["iteration"] for line in lines], float)
    after_gap = iterations != np.arange(1, len(lines) + 1)  # an earlier iteration has no line
    tokens = np.where(after_gap, np.nan, np.cumsum(needed[:, 0] + discarded))
    updates = per_iteration * iterations
    found = (key for line in lines for key, value in line.items() if isinstance(value, int | float))
    names = dict.fromkeys(["iteration", *found])
    columns = {name: np.array([line.get(name, np.nan) for line in lines], float) for name in names}
    elsewhere = (*WITHIN_COLLECTING, EVALUATING, *([COLLECTING] if WAITING in columns else []))
    spent = [
        np.nan_to_num(column)
        for name, column in columns.items()
        if re.fullmatch(r"time/\w+_s", name) and name not in elsewhere
    ]
    seconds = np.cumsum(np.sum(spent, axis=0)) if spent else np.full(len(lines), np.nan)
    seconds = np.where(after_gap, np.nan, seconds)
    evaluations = [_read_evaluation(file) for file in sorted((workdir / "evaluations").glob("*.json"))]
    before = next((result for result in evaluations if result["iteration"] == 0), {})
    return History(
        name=workdir.resolve().name,
        samples=samples,
        updates=updates,
        tokens=tokens,
        seconds=seconds,
        metrics=columns,
        evaluations=_accuracies([(0.0, 0.0, before), *zip(updates, tokens, lines, strict=True)]),
        curves=_curves(evaluations, per_iteration),
        config=config,
        workdir=workdir,
        before=before,
        started=read_json(workdir / STARTED) if (workdir / STARTED).exists() else {},
        problems=_problems(evaluations),
    )


def unique_names(workdirs: Sequence[pathlib.Path]) -> list[str]:
    """Returns the shortest ends of the paths of work directories that differ; ValueError if one is named twice."""
    parts = [workdir.resolve().parts for workdir in workdirs]
    for workdir, end in zip(workdirs, parts, strict=True):
        if parts.count(end) > 1:
            raise ValueError(f"the work directory {workdir} is named twice: name each once.")
    depth = next(depth for depth in itertools.count(1) if len({path[-depth:] for path in parts}) == len(parts))
    return ["/".join(path[-depth:]) for path in parts]


def with_unique_names(histories: Sequence[History]) -> list[History]:
    names = unique_names([history.workdir for history in histories])
    return [dataclasses.replace(history, name=name) for history, name in zip(histories, names, strict=True)]


def with_distinct_benchmarks(histories: Sequence[History]) -> list[History]:
    """Returns the runs; a benchmark gets another name if an earlier run has other problems under its name.

    The new name is `NAME of RUN`, where RUN is the first run with these problems. So results on different problems are
    never compared.
    """
    first: dict[tuple[str, str], str] = {}  # (benchmark, hash of its problems): the run that has it first
    for history in histories:
        for benchmark in (*history.evaluations, *history.curves):
            first.setdefault((benchmark, history.problems.get(benchmark, "")), history.name)
    names: dict[tuple[str, str], str] = {}
    for (benchmark, problems), run_name in first.items():
        names[benchmark, problems] = f"{benchmark} of {run_name}" if benchmark in names.values() else benchmark
    renamed = []
    for run in histories:
        benchmarks = (*run.evaluations, *run.curves)
        name = {benchmark: names[benchmark, run.problems.get(benchmark, "")] for benchmark in benchmarks}
        changes = {
            "evaluations": {name[benchmark]: accuracy for benchmark, accuracy in run.evaluations.items()},
            "curves": {name[benchmark]: found for benchmark, found in run.curves.items()},
            "metrics": {_renamed(key, name): column for key, column in run.metrics.items()},
            "before": {_renamed(key, name): value for key, value in run.before.items()},
        }
        renamed.append(dataclasses.replace(run, **changes))
    return renamed


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """Returns the key of a metric, with the new name of its benchmark if it is evaluation/BENCHMARK/..."""
    room, _, rest = key.partition("/")
    benchmark, slash, statistic = rest.partition("/")
    return f"{room}/{names.get(benchmark, benchmark)}/{statistic}" if room == "evaluation" and slash else key


def smooth(values: Float[np.ndarray, " N"], window: int = 5) -> Float[np.ndarray, " N"]:
    """Computes the mean over the last `window` values, over fewer at the beginning."""
    # Differences of running sums would keep the rounding of a value such as 1e18 in all later means.
    sums = np.convolve(values, np.ones(window))[: len(values)] if len(values) else values
    return sums / np.minimum(np.arange(1, len(values) + 1), window)


def at_tokens(history: History, benchmark: str, budget: float) -> float:
    """Interpolates the average at `budget` generated tokens linearly between evaluations."""
    accuracy = history.evaluations[benchmark]
    known = np.isfinite(accuracy.tokens)
    return float(np.interp(budget, accuracy.tokens[known], accuracy.average[known]))

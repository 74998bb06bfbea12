"""Figures of runs: panels of curves made from their histories, with captions.

A run that lacks the metrics of a panel is left out of it, a panel without runs is left out of its figure, and a figure
without panels is not drawn; `Figure.missing` says so.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from reinforce_ada_jax.reporting.history import COLLECTING, EVALUATING, WAITING, History, smooth
from reinforce_ada_jax.reporting.panels import Curve, Panel

SMOOTHED = 5  # iterations
ROUNDS_TO_MEET = 2  # as in figure 5 of arXiv 2510.04996
EARLY, LATE = slice(None, 25), slice(-25, None)
RELIABILITY_BINS = 5  # of collection/estimators.py
UPDATES = "updates"
# By the word in a title: label of the x axis, and its values at the end of each iteration.
BUDGETS: dict[str, tuple[str, Callable[[History], Float[np.ndarray, " I"]]]] = {
    "updates": (UPDATES, lambda history: history.updates),
    "tokens": ("generated tokens", lambda history: history.tokens),
    "time": ("seconds of collecting and updating", lambda history: history.seconds),
}
# What a run may also lack where a panel is missing, by the word for the axis in its title.
OF_AXIS = {
    "updates": "", "tokens": ", or no line of an earlier iteration",
    "time": ", or no time/*_s, or no line of an earlier iteration",
}  # fmt: skip
# Curves of one run, from its index and history; none if it lacks the metrics.
CurvesFn = Callable[[int, History], Sequence[Curve]]


@dataclasses.dataclass(frozen=True, eq=False)
class Figure:
    """Panels with a title, and a caption on how to read them."""

    name: str  # of its files
    title: str
    caption: str
    panels: Sequence[Panel]  # empty if there is nothing to draw
    columns: int  # panels side by side
    missing: Sequence[str]  # sentences on what is not drawn, and why


class _Builder:
    """Collects the panels of a figure, and sentences on what they lack."""

    def __init__(self, histories: Sequence[History]):
        self.histories = histories
        self.panels: list[Panel] = []
        self.missing: list[str] = []

    def add(self, panel: Panel, curves_fn: CurvesFn, needs: str) -> None:
        """Adds a panel with the curves of the runs that have the metrics which it `needs`."""
        curves = [curve for index, run in enumerate(self.histories) for curve in curves_fn(index, run)]
        drawn = [curve for curve in curves if np.isfinite(curve.x + curve.y).any()]
        names = {curve.label for curve in drawn}
        without = [history.name for history in self.histories if history.name not in names]
        if drawn:
            self.panels.append(dataclasses.replace(panel, curves=drawn))
        if without:
            what = "is without " + ", ".join(without) if drawn else "is not drawn"
            self.missing.append(f"“{panel.title}” {what}: no {needs}.")

    def metric(self, title: str, key: str, y_label: str, top: float | None = None, lowest: float | None = 0.0) -> None:
        """Adds a panel of a metric against updates; its y axis goes from `lowest` to `top` (None: as the curves)."""
        panel = Panel(title, UPDATES, y_label, limits=(lowest, top), counted=True)
        self.add(panel, lambda index, run: _smoothed(index, run, run.updates, _column(run, key)), key)

    def figure(self, name: str, title: str, caption: str, columns: int = 3) -> Figure:
        return Figure(name, title, caption, self.panels, columns, self.missing)


def _column(history: History, key: str) -> Float[np.ndarray, " I"]:
    """Returns a metric by iteration; NaN where an iteration lacks it."""
    return history.metrics.get(key, np.full(len(history.updates), np.nan))


def _has(history: History, key: str) -> bool:
    return bool(np.isfinite(_column(history, key)).any())


def _smoothed(index: int, history: History, x: Float[np.ndarray, " I"], y: Float[np.ndarray, " I"]) -> list[Curve]:
    known = np.isfinite(y)
    return [Curve(history.name, index, x[known], smooth(y[known], SMOOTHED))]


def learning(histories: Sequence[History]) -> Figure:
    """Returns accuracy on every benchmark and first-round reward against updates, tokens and time."""
    builder = _Builder(histories)
    benchmarks = list(dict.fromkeys(name for history in histories for name in history.evaluations))
    samples = "/".join(map(str, sorted({history.samples for history in histories})))
    for benchmark in benchmarks:
        for word, (label, budget) in BUDGETS.items():

            def accuracy(index: int, run: History, benchmark=benchmark, budget=budget) -> list[Curve]:
                if benchmark not in run.evaluations:
                    return []
                found = run.evaluations[benchmark]
                return [Curve(run.name, index, run.at(found.updates, budget(run)), found.average, found.error)]

            title = f"{benchmark}: accuracy by {word}"
            panel = Panel(title, label, f"avg@{samples}", limits=(0.0, None), counted=label == UPDATES)
            builder.add(panel, accuracy, f"evaluation of {benchmark}{OF_AXIS[word]}")
    if not benchmarks:
        builder.missing.append("Accuracy is not drawn: no run was evaluated.")
    for word, (label, budget) in BUDGETS.items():
        panel = Panel(f"Reward by {word}", label, "first-round reward", counted=label == UPDATES)
        builder.add(
            panel,
            lambda index, run, budget=budget: _smoothed(index, run, budget(run), _column(run, "reward/first_round")),
            f"reward/first_round{OF_AXIS[word]}",
        )
    caption = (
        "The same curves against different costs. Seconds are those of collecting and updating, without evaluation, "
        "and without waiting for programs to compile. Bars are one standard error over problems. The first-round "
        "reward is the mean over the first draws of each prompt, which no stopping rule biases; here its mean over the "
        f"last {SMOOTHED} iterations."
    )
    return builder.figure("learning", "Learning", caption)


def signal(histories: Sequence[History]) -> Figure:
    """Returns the share of groups without a gradient and the entropy against updates, and reward against entropy."""
    builder = _Builder(histories)
    builder.metric("Groups without a signal", "collection/zero_signal_share", "share of groups", 1.04)
    builder.metric("Entropy over training", "update/entropy", "entropy, nats a token")

    def trade(index: int, run: History) -> list[Curve]:
        entropy, reward = _column(run, "update/entropy"), _column(run, "reward/first_round")
        known = np.isfinite(entropy) & np.isfinite(reward)
        return [Curve(run.name, index, smooth(entropy[known], SMOOTHED), smooth(reward[known], SMOOTHED))]

    panel = Panel("Reward for entropy spent", "entropy, nats a token", "first-round reward")
    builder.add(panel, trade, "update/entropy and reward/first_round")
    caption = (
        "Groups without a signal are those whose advantages are all 0: they change nothing. Reward for entropy spent "
        "is the reward against the remaining entropy; each line ends at the newest iteration. "
        f"Means over the last {SMOOTHED} iterations."
    )
    return builder.figure("signal", "Signal and entropy", caption)


def _active(part: slice, num_rounds: int, index: int, run: History) -> list[Curve]:
    """Returns the share of prompts that drew each round, over the iterations in `part`; a missing key counts as 0."""
    rounds = range(1, num_rounds + 1)
    counts = np.array([np.nansum(_column(run, f"collection/active_round_{number}")[part]) for number in rounds])
    return [Curve(run.name, index, np.array(rounds, float), counts / counts[0])] if counts[:1].any() else []


def _met_early(prefix: str, index: int, run: History) -> list[Curve]:
    """Returns by iteration the share of prompts in `collection/<prefix>_round_<k>`, for the first ROUNDS_TO_MEET k."""
    found = [_column(run, f"collection/{prefix}_round_{number}") for number in range(1, ROUNDS_TO_MEET + 1)]
    # If its prompts drew fewer rounds, an iteration lacks the last keys, and the count of its last round is used.
    shares = np.fmax.reduce(found) / _column(run, "collection/active_round_1")
    return _smoothed(index, run, run.updates, shares)


def sampling(histories: Sequence[History]) -> Figure:
    """Returns draws per prompt, shares of prompts that draw each round, and prompts whose rule is not met."""
    builder = _Builder(histories)

    def draws(index: int, run: History) -> list[Curve]:
        columns = (_column(run, f"collection/draws_{name}") for name in ("mean", "p10", "p90"))
        mean, low, high = (curve for column in columns for curve in _smoothed(index, run, run.updates, column))
        return [dataclasses.replace(mean, band=(low.y, high.y))] if len(mean.y) == len(low.y) == len(high.y) else []

    panel = Panel("Draws for a prompt", UPDATES, "responses", limits=(0.0, None), counted=True)
    builder.add(panel, draws, "collection/draws_*")
    num_rounds = max(sum(key.startswith("collection/active_round_") for key in run.metrics) for run in histories)
    for title, part in (("early", EARLY), ("late", LATE)):
        name = f"Prompts that draw a round, {title}"
        panel = Panel(name, "round", "share of prompts", limits=(0.0, 1.05), counted=True)
        builder.add(panel, functools.partial(_active, part, num_rounds), "collection/active_round_1")

    for what, prefix in (("k_pos correct", "met_k_pos"), ("Rule met", "met")):
        name = f"{what} within two rounds"
        panel = Panel(name, UPDATES, "share of prompts", limits=(0.0, 1.05), counted=True)
        builder.add(panel, functools.partial(_met_early, prefix), f"collection/{prefix}_round_1")
    builder.metric("Extra samples", "collection/extra_samples", "responses beyond GRPO's", lowest=None)
    for side, word in (("pos", "correct"), ("neg", "wrong")):
        name = f"Fewer than k_{side} {word} at the end"
        builder.metric(name, f"collection/below_k_{side}_share", "share of prompts")
    caption = (
        "Draws for a prompt are a mean and, shaded, the range from the 10th to the 90th percentile. Early are the "
        "first 25 iterations, late the last 25. The rule is met for all where a strategy has none. Extra samples "
        "are responses of an iteration beyond n for each prompt. Where the axis is updates, means over the last "
        f"{SMOOTHED} iterations."
    )
    return builder.figure("sampling", "Sampling dynamics", caption)


def _first_and_last(benchmark: str, kind: str, index: int, run: History) -> list[Curve]:
    """Returns two curves of one kind: from the first evaluation, which is faint, and from the last one."""
    by_updates = run.curves.get(benchmark, {}).get(kind, {})
    curves = []
    for updates in sorted({min(by_updates), max(by_updates)}) if by_updates else ():
        x, y = np.array(sorted(by_updates[updates].items()), float).T
        curves.append(Curve(run.name, index, x, y, faint=updates < max(by_updates)))
    return curves


def _benchmarks(histories: Sequence[History], *kinds: str) -> list[str]:
    """Returns the benchmarks for which a run has curves of these kinds."""
    found = [(name, curves) for history in histories for name, curves in history.curves.items()]
    return list(dict.fromkeys(name for name, curves in found if not curves.keys().isdisjoint(kinds)))


def pass_at_k(histories: Sequence[History]) -> Figure:
    """Returns pass@k and all-correct@k before and after training."""
    builder = _Builder(histories)
    kinds = {"pass": ("at least one right", "pass@k"), "all_correct": ("all right", "all-correct@k")}
    for benchmark in _benchmarks(histories, *kinds):
        for kind, (title, label) in kinds.items():
            name = f"{benchmark}: {title} of k"
            panel = Panel(name, "k, samples for a problem", label, limits=(0.0, 1.04), powers=True)
            curves_fn = functools.partial(_first_and_last, benchmark, kind)
            builder.add(panel, curves_fn, f"{kind}_at_<k> in evaluations/")
    if not builder.panels:
        builder.missing.append("Nothing is drawn: no run was evaluated.")
    caption = (
        "The probability that at least one of k samples is right, and that all k are, estimated without bias from the "
        "samples of each problem. Thick, filled: the last evaluation; thin, hollow: the first one."
    )
    return builder.figure("pass_at_k", "pass@k", caption, 2)


def difficulty(histories: Sequence[History]) -> Figure:
    """Returns accuracy by initial pass rate, in the first and in the last evaluation."""
    builder = _Builder(histories)
    for benchmark in _benchmarks(histories, "initial"):
        name = f"{benchmark}: accuracy by initial difficulty"
        panel = Panel(name, "initial pass rate", "accuracy", limits=(0.0, 1.04), diagonal=True)
        curves_fn = functools.partial(_first_and_last, benchmark, "initial")
        builder.add(panel, curves_fn, "avg_initial_<range> in evaluations/")
    if not builder.panels:
        builder.missing.append(
            "Nothing is drawn: no evaluation knows initial pass rates (evaluate --initial, or pass_rate in the file)."
        )
    caption = (
        "Accuracy of the problems in each range of the initial pass rate, at the middle of the range. Thick, filled: "
        "the last evaluation; thin, hollow: the first one; on the dotted line nothing has changed. Initial pass rates "
        "of few samples are too low at the left end and too high at the right, for all runs alike."
    )
    return builder.figure("difficulty", "Accuracy by initial difficulty", caption, 2)


def _phases(history: History) -> dict[str, float] | None:
    """Computes the seconds of an iteration by phase: medians; for evaluation, its total divided by the iterations."""

    def median(key: str) -> float:
        return float(np.nanmedian(_column(history, key))) if _has(history, key) else 0.0

    if not _has(history, COLLECTING):
        return None
    reshard, host = median("time/reshard_s"), median("time/host_between_windows_s")
    decode = max(median(COLLECTING) - reshard - host, 0.0)
    if _has(history, WAITING):  # the sampler decodes during the updates
        decode, host = median(WAITING), 0.0
    return {
        "collect: weights to decoding": reshard,
        "collect: decode": decode,
        "collect: host between windows": host,
        "score and update": median("time/score_s") + median("time/update_s"),
        "evaluate": float(np.nansum(_column(history, EVALUATING))) / len(history.updates),
    }


def time(histories: Sequence[History]) -> Figure:
    """Returns the seconds of an iteration by phase, and over training."""
    builder = _Builder(histories)
    phases = {history.name: _phases(history) for history in histories}
    bars = {name: bar for name, bar in phases.items() if bar is not None}
    if bars:
        builder.panels.append(Panel("Where an iteration's time goes", "seconds", "", bars=bars))
    if len(bars) < len(phases):
        names = ", ".join(name for name, bar in phases.items() if bar is None)
        builder.missing.append(f"“Where an iteration's time goes” is without {names}: no time/collect_s.")
    for key, title in (("time/collect_s", "Collecting"), ("time/verify_s", "Grading, during collecting")):
        builder.metric(title, key, "seconds an iteration")
    caption = (
        "The bars are medians over iterations, so that compilation in the first ones does not count; evaluation is its "
        "total divided by the number of iterations. Grading runs while responses are decoded, and is not in the bars. "
        "Where a sampler on devices of its own decodes during the updates, decoding is the time that they wait for it."
    )
    return builder.figure("time", "Time", caption)


def calibration(histories: Sequence[History]) -> Figure:
    """Returns the estimated pass rates that draws were planned with, compared with the outcomes."""
    builder, title = _Builder(histories), "Calibration of estimates"
    others = [history.name for history in histories if not _has(history, "estimator/brier")]
    if len(others) == len(histories):
        builder.missing.append("Nothing is drawn: no run plans its draws with estimated pass rates.")
        return builder.figure("calibration", title, "")

    def reliability(index: int, run: History) -> list[Curve]:
        points = []
        for number in range(RELIABILITY_BINS):
            share = _column(run, f"estimator/bin_{number}_share")
            if _has(run, f"estimator/bin_{number}_share"):
                pair = (run.metrics[f"estimator/bin_{number}_{name}"] for name in ("estimate", "outcome"))
                points.append([np.nansum(values * share) / np.nansum(share) for values in pair])
        return [Curve(run.name, index, *np.array(points).T)] if points else []

    panel = Panel("Outcome at each estimate", "estimated pass rate", "share correct", diagonal=True)
    builder.add(panel, reliability, "estimator/bin_*")
    builder.metric("Squared error of estimates", "estimator/brier", "Brier score")
    builder.metric("Calibration error", "estimator/calibration_error", "mean |estimate - outcome|")
    caption = (
        "The share of correct draws among prompts by their estimate is over the whole run; on the dotted line "
        "estimates are right on average. The Brier score is the mean squared difference between estimate and outcome "
        "of a draw; the calibration error averages both within each of five bins of the estimate first."
    )
    # One sentence on the runs that do not plan, instead of one per panel.
    builder.missing = [f"Without {', '.join(others)}: no draws planned with estimates."] if others else []
    return builder.figure("calibration", title, caption)


def figures(histories: Sequence[History]) -> list[Figure]:
    """Returns every figure, in the order of a report."""
    return [make(histories) for make in (learning, signal, sampling, pass_at_k, difficulty, time, calibration)]

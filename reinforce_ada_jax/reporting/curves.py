"""Which figures runs have: from their histories to panels of curves, with the words that go with them.

A run that did not write what a panel needs is left out of it, a panel without any run out of its figure, and a figure
without any panel is not made; each time `missing` says so.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from reinforce_ada_jax.reporting.drawing import Curve, Panel
from reinforce_ada_jax.reporting.history import EVALUATING, History, smooth

SMOOTHED = 5  # iterations
RELIABILITY_BINS = 5  # of collection/estimators.py
UPDATES, TOKENS, SECONDS = "updates", "generated tokens", "seconds of collecting and updating"

NEEDS_TIME = "evaluation or reward, or no time/*_s"


@dataclasses.dataclass(frozen=True, eq=False)
class Figure:
    """Panels under one heading.

    Attributes:
      name: of its files.
      title: its heading.
      caption: what is seen, and how it is read.
      panels: what is drawn; empty: there is nothing to draw.
      columns: panels side by side.
      missing: what can't be drawn, and why.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    columns: int
    missing: Sequence[str]


class _Panels:
    """The panels of a figure in the making, and what they lack."""

    def __init__(self, histories: Sequence[History]):
        self.histories = histories
        self.made: list[Panel] = []
        self.missing: list[str] = []

    def add(self, panel: Panel, curve: Callable[[int, History], Curve | None], needs: str) -> None:
        """One curve a run; `curve` gives None for a run that lacks what it `needs`."""
        curves = [curve(index, history) for index, history in enumerate(self.histories)]
        drawn = [found for found in curves if found is not None and np.isfinite(found.x + found.y).any()]
        names = {found.label for found in drawn}
        without = [history.name for history in self.histories if history.name not in names]
        if drawn:
            self.made.append(dataclasses.replace(panel, curves=drawn))
        if without:
            what = "is without " + ", ".join(without) if drawn else "is not drawn"
            self.missing.append(f"“{panel.title}” {what}: no {needs}.")

    def figure(self, name: str, title: str, caption: str, columns: int) -> Figure:
        return Figure(name, title, caption, self.made, columns, self.missing)


def _column(history: History, key: str) -> np.ndarray | None:
    values = history.metrics.get(key)
    return None if values is None or np.isnan(values).all() else values


def _smoothed(index: int, history: History, x: np.ndarray, key: str, scale: float = 1.0) -> Curve | None:
    values = _column(history, key)
    if values is None:
        return None
    known = np.isfinite(values)
    return Curve(history.name, index, x[known], smooth(values[known] * scale, SMOOTHED))


def learning(histories: Sequence[History]) -> Figure:
    """Accuracy of every benchmark and the first-round reward against updates, tokens and time."""
    panels = _Panels(histories)
    budgets = {
        UPDATES: lambda history: history.updates,
        TOKENS: lambda history: history.tokens,
        SECONDS: lambda history: history.seconds,
    }
    benchmarks = list(dict.fromkeys(name for history in histories for name in history.evaluations))
    samples = "/".join(map(str, sorted({history.samples for history in histories})))
    for benchmark in benchmarks:
        for label, budget in budgets.items():

            def evaluated(index: int, history: History, benchmark=benchmark, budget=budget) -> Curve | None:
                if benchmark not in history.evaluations:
                    return None
                updates, _, average, error = history.evaluations[benchmark]
                return Curve(history.name, index, history.at(updates, budget(history)), average, error)

            title = f"{benchmark}: accuracy by {label.split()[-1] if label != SECONDS else 'time'}"
            panel = Panel(title, label, f"avg@{samples}", limits=(0, None), counted=label == UPDATES)
            panels.add(panel, evaluated, NEEDS_TIME if label == SECONDS else f"evaluation of {benchmark}")
    if not benchmarks:
        panels.missing.append("Accuracy is not drawn: no run was evaluated.")
    for label, budget in budgets.items():
        title = f"Reward by {label.split()[-1] if label != SECONDS else 'time'}"
        panel = Panel(title, label, "first-round reward", counted=label == UPDATES)
        panels.add(
            panel,
            lambda index, history, budget=budget: _smoothed(index, history, budget(history), "reward/first_round"),
            NEEDS_TIME if label == SECONDS else "reward/first_round",
        )
    caption = (
        "The same curves against what they cost. Seconds are those of collecting and updating, what is compiled in the "
        "first iteration included, evaluation not. Bars are one standard error over problems. The first-round reward "
        "is the mean over the first draws of each prompt, which no stopping rule biases; here its mean over the last "
        f"{SMOOTHED} iterations."
    )
    return panels.figure("learning", "Learning", caption, 3)


def signal(histories: Sequence[History]) -> Figure:
    """Groups without a gradient, and entropy, alone and against reward."""
    panels = _Panels(histories)
    panels.add(
        Panel("Groups without a signal", UPDATES, "share of groups", limits=(0, 1.04), counted=True),
        lambda index, history: _smoothed(index, history, history.updates, "collection/zero_signal_share"),
        "collection/zero_signal_share",
    )
    panels.add(
        Panel("Entropy over training", UPDATES, "entropy, nats a token", limits=(0, None), counted=True),
        lambda index, history: _smoothed(index, history, history.updates, "update/entropy"),
        "update/entropy",
    )

    def trade(index: int, history: History) -> Curve | None:
        entropy, reward = (_column(history, key) for key in ("update/entropy", "reward/first_round"))
        if entropy is None or reward is None:
            return None
        known = np.isfinite(entropy) & np.isfinite(reward)
        return Curve(history.name, index, smooth(entropy[known], SMOOTHED), smooth(reward[known], SMOOTHED))

    panels.add(
        Panel("Reward for entropy spent", "entropy, nats a token", "first-round reward"),
        trade,
        "update/entropy and reward/first_round",
    )
    caption = (
        "Left: the share of groups whose advantages are all 0, which move nothing. Right: reward at the entropy that "
        "is left; each line's name stands where training has got to. "
        f"Means over the last {SMOOTHED} iterations."
    )
    return panels.figure("signal", "Signal and entropy", caption, 3)


def _num_rounds(history: History) -> int:
    return sum(key.startswith("collection/active_round_") for key in history.metrics)


def _active(history: History, part: slice, num_rounds: int) -> np.ndarray | None:
    """Share of prompts that drew each round, over the iterations in `part`. A round without a key had no prompt."""
    counts = [
        np.nansum(history.metrics.get(f"collection/active_round_{number}", np.zeros(1))[part])
        for number in range(1, num_rounds + 1)
    ]
    return np.array(counts) / counts[0] if counts and counts[0] else None


def sampling(histories: Sequence[History]) -> Figure:
    """Draws per prompt, prompts that go on from round to round, and what ended unmet."""
    panels = _Panels(histories)

    def draws(index: int, history: History) -> Curve | None:
        mean = _smoothed(index, history, history.updates, "collection/draws_mean")
        ends = [_smoothed(index, history, history.updates, f"collection/draws_{end}") for end in ("p10", "p90")]
        if mean is None or None in ends:
            return None
        return dataclasses.replace(mean, band=(ends[0].y, ends[1].y))

    panels.add(
        Panel("Draws for a prompt", UPDATES, "responses", limits=(0, None), counted=True),
        draws,
        "collection/draws_*",
    )
    num_rounds = max(map(_num_rounds, histories))
    for title, part in (("early", slice(None, 25)), ("late", slice(-25, None))):

        def active(index: int, history: History, part=part) -> Curve | None:
            shares = _active(history, part, num_rounds)
            if shares is None:
                return None
            return Curve(history.name, index, np.arange(1, len(shares) + 1), shares)

        name = f"Prompts that draw a round, {title}"
        panel = Panel(name, "round", "share of prompts", limits=(0, 1.05), counted=True)
        panels.add(panel, active, "collection/active_round_1")
    panels.add(
        Panel("Extra samples", UPDATES, "responses beyond the first n", limits=(0, None), counted=True),
        lambda index, history: _smoothed(index, history, history.updates, "collection/extra_samples"),
        "collection/extra_samples",
    )
    for side in ("correct", "wrong"):
        panels.add(
            Panel(f"Unmet, no {side} response", UPDATES, "share of prompts", limits=(0, None), counted=True),
            lambda index, history, side=side: _smoothed(
                index, history, history.updates, f"collection/unmet_no_{side}_share"
            ),
            f"collection/unmet_no_{side}_share",
        )
    caption = (
        "Top: responses drawn for a prompt, the mean and, shaded, the range from the 10th to the 90th percentile; the "
        "share of prompts that draw a first, second, ... round, in the first and in the last 25 iterations. Bottom: "
        "responses beyond the n of a group in an iteration; prompts whose stopping rule was not met by the last round, "
        "because none of the responses was correct, or none wrong. Where the axis is updates, means over the last "
        f"{SMOOTHED} iterations."
    )
    return panels.figure("sampling", "Sampling dynamics", caption, 3)


def pass_at_k(histories: Sequence[History]) -> Figure:
    """pass@k and all-correct@k before and after training."""
    panels = _Panels(histories)
    benchmarks = list(dict.fromkeys(name for history in histories for name in history.curves))
    for benchmark in benchmarks:
        for kind, title, label in (
            ("pass", "at least one right", "pass@k"),
            ("all_correct", "all right", "all-correct@k"),
        ):
            curves, without = [], []
            for index, history in enumerate(histories):
                by_updates = history.curves.get(benchmark, {}).get(kind, {})
                if not by_updates:
                    without.append(history.name)
                    continue
                for updates in sorted({min(by_updates), max(by_updates)}):
                    ks, values = map(np.array, zip(*sorted(by_updates[updates].items()), strict=True))
                    faint = updates < max(by_updates)
                    curves.append(Curve(history.name, index, ks.astype(float), values, faint=faint))
            name = f"{benchmark}: {title} of k"
            if curves:
                panels.made.append(
                    Panel(name, "k, samples for a problem", label, curves, limits=(0, 1.04), powers=True)
                )
            if without:
                what = "is without " + ", ".join(without) if curves else "is not drawn"
                panels.missing.append(f"“{name}” {what}: no {kind}_at_<k> in evaluations/.")
    if not benchmarks:
        panels.missing.append("Nothing is drawn: no run was evaluated.")
    caption = (
        "The chance that at least one of k samples is right, and that all k are, estimated without bias from the "
        "samples of each problem. Thick, filled: the last evaluation; thin, hollow: the first one."
    )
    return panels.figure("pass_at_k", "pass@k", caption, 2)


def _phases(history: History) -> dict[str, float] | None:
    """Seconds of an iteration by what they went into: medians, and evaluation spread over all iterations."""

    def median(key: str) -> float:
        values = _column(history, key)
        return 0.0 if values is None else float(np.nanmedian(values))

    if _column(history, "time/collect_s") is None:
        return None
    reshard, host = median("time/reshard_s"), median("time/host_between_windows_s")
    evaluating = _column(history, EVALUATING)
    return {
        "collect: weights to decoding": reshard,
        "collect: decode": max(median("time/collect_s") - reshard - host, 0.0),
        "collect: host between windows": host,
        "update": median("time/update_s"),
        "evaluate": 0.0 if evaluating is None else float(np.nansum(evaluating)) / len(evaluating),
    }


def time(histories: Sequence[History]) -> Figure:
    """What an iteration's seconds go into, and how they change."""
    panels = _Panels(histories)
    phases = {history.name: _phases(history) for history in histories}
    bars = {name: bar for name, bar in phases.items() if bar is not None}
    if bars:
        panels.made.append(Panel("Where an iteration's time goes", "seconds", "", bars=bars))
    if len(bars) < len(phases):
        names = ", ".join(name for name, bar in phases.items() if bar is None)
        panels.missing.append(f"“Where an iteration's time goes” is without {names}: no time/collect_s.")
    for key, title in (("time/collect_s", "Collecting"), ("time/verify_s", "Grading, beside collecting")):
        panels.add(
            Panel(title, UPDATES, "seconds an iteration", limits=(0, None), counted=True),
            lambda index, history, key=key: _smoothed(index, history, history.updates, key),
            key,
        )
    caption = (
        "Left: medians over iterations, so that what is compiled in the first ones does not count; evaluation is its "
        "total divided by the number of iterations. Grading runs beside decoding and is no part of the bars."
    )
    return panels.figure("time", "Time", caption, 3)


def calibration(histories: Sequence[History]) -> Figure:
    """How the estimated pass rates that draws were planned with compare with what was drawn."""
    panels = _Panels(histories)
    others = [history.name for history in histories if _column(history, "estimator/brier") is None]
    if len(others) == len(histories):
        panels.missing.append("Nothing is drawn: no run plans its draws with estimated pass rates.")
        return panels.figure("calibration", "Calibration of estimates", "", 3)

    def reliability(index: int, history: History) -> Curve | None:
        points = []
        for number in range(RELIABILITY_BINS):
            share = _column(history, f"estimator/bin_{number}_share")
            if share is not None:
                of = (history.metrics[f"estimator/bin_{number}_{name}"] for name in ("estimate", "outcome"))
                points.append([np.nansum(values * share) / np.nansum(share) for values in of])
        return Curve(history.name, index, *map(np.array, zip(*points, strict=True))) if points else None

    panels.add(
        Panel("Outcome at each estimate", "estimated pass rate", "share correct", diagonal=True),
        reliability,
        "estimator/bin_*",
    )
    for key, title, label in (
        ("estimator/brier", "Squared error of estimates", "Brier score"),
        ("estimator/calibration_error", "Calibration error", "mean |estimate - outcome|"),
    ):
        panels.add(
            Panel(title, UPDATES, label, limits=(0, None), counted=True),
            lambda index, history, key=key: _smoothed(index, history, history.updates, key),
            key,
        )
    caption = (
        "Left: the share of correct draws among prompts by their estimate, over the whole run; on the dotted line "
        "estimates are right on average. The Brier score is the mean squared difference between estimate and outcome "
        "of a draw; the calibration error averages both within each of five bins of the estimate first."
    )
    # Not each panel's lack, but what these runs do not do.
    panels.missing = [f"Without {', '.join(others)}: no draws planned with estimates."] if others else []
    return panels.figure("calibration", "Calibration of estimates", caption, 3)


def figures(histories: Sequence[History]) -> list[Figure]:
    """Every figure, in the order of a report."""
    return [make(histories) for make in (learning, signal, sampling, pass_at_k, time, calibration)]

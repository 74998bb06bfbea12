"""Comparison of runs: a table of each benchmark, and a sentence on the last and the first run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reinforce_ada_jax.reporting.history import History, at_tokens

EARLY_UPDATES = 25
DIGITS = 3  # of an average


class ComparedRun(NamedTuple):
    name: str
    averages: Mapping[int, tuple[float, float]]  # number of updates: (average after them, its standard error)
    costs: Sequence[str]  # one for each of `Comparison.cost_names`


@dataclasses.dataclass(frozen=True)
class Comparison:
    benchmark: str
    title: str  # heading of the column with the names of the runs
    updates: Sequence[int]  # numbers of updates after which a run was evaluated
    cost_names: Sequence[str]
    runs: Sequence[ComparedRun]
    sentence: str  # compares the last run with the first; "" for one run, or if no update has an evaluation of both

    def text(self) -> str:
        header = [self.title, *map(str, self.updates), "updates", *self.cost_names]
        rows = [header]
        for run in self.runs:
            averages = [f"{run.averages[at][0]:.{DIGITS}f}" if at in run.averages else "" for at in self.updates]
            rows.append([run.name, *averages, "", *run.costs])
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)


def _sentence(first: History, second: History, benchmark: str) -> str:
    """Returns a sentence that compares two runs after equal updates, and at equal numbers of generated tokens.

    At equal tokens one run has an evaluation. The average of the other one may be interpolated; it is marked then. The
    part on equal tokens is left out if the other one has no earlier evaluation. Nothing is said of tokens if those of a
    run are not known.
    """
    accuracies = [history.evaluations[benchmark] for history in (first, second)]
    last = max(set(accuracies[0].updates.tolist()) & set(accuracies[1].updates.tolist()), default=0.0)
    if not last:  # no update after which both runs were evaluated
        return ""
    ends = [float(accuracy.average[accuracy.updates.tolist().index(last)]) for accuracy in accuracies]
    spent = [float(history.at(np.array([last]), history.tokens)[0]) for history in (first, second)]
    text = f"After {last:.0f} updates {second.name} reaches {ends[1]:.3f} and {first.name} {ends[0]:.3f}"
    if not np.isfinite(spent).all():
        return f"{text}."
    ratio = spent[1] / spent[0]
    text += f", and {second.name} generated {ratio:{'.1f' if ratio >= 1 else '.2g'}} times the tokens for it"
    budget = min(spent)
    if any(budget < accuracy.tokens[0] for accuracy in accuracies):
        return f"{text}."
    level = [f"{at_tokens(history, benchmark, budget):.3f}" for history in (first, second)]
    for index, accuracy in enumerate(accuracies):
        level[index] += "" if budget in accuracy.tokens else " (between two evaluations)"
    return (
        f"{text}; when both have generated {budget:,.0f} tokens, {second.name} reaches {level[1]} and {first.name} "
        f"{level[0]}."
    )


def compare(histories: Sequence[History], benchmark: str) -> Comparison:
    evaluated = [history for history in histories if benchmark in history.evaluations]
    moments = sorted({int(update) for history in evaluated for update in history.evaluations[benchmark].updates})
    runs = []
    for history in evaluated:
        accuracy = history.evaluations[benchmark]
        values = zip(accuracy.average.tolist(), accuracy.error.tolist(), strict=True)
        averages = dict(zip(accuracy.updates.astype(int).tolist(), values, strict=True))
        early = history.metrics["collection/zero_signal_share"][history.updates <= EARLY_UPDATES]
        tokens, share = history.tokens[-1], f"{early.mean():.2f}" if early.size else ""
        costs = [share, *(f"{x:,.0f}" if np.isfinite(x) else "" for x in (tokens, tokens / history.updates[-1]))]
        runs.append(ComparedRun(history.name, averages, costs))
    samples = "/".join(map(str, sorted({history.samples for history in evaluated})))
    title = f"{benchmark} avg@{samples} after"
    cost_names = (f"zero-signal 1-{EARLY_UPDATES}", "tokens", "tokens/update")
    both = len(histories) == len(evaluated) > 1
    sentence = _sentence(histories[0], histories[-1], benchmark) if both else ""
    return Comparison(benchmark, title, moments, cost_names, runs, sentence)


def compare_all(histories: Sequence[History]) -> list[Comparison]:
    """Compares the runs on each benchmark that one of them was evaluated on."""
    return [compare(histories, name) for name in dict.fromkeys(name for run in histories for name in run.evaluations)]

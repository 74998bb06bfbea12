"""Scores of an evaluation, computed from graded responses; `results_table` shows them."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from reinforce_ada_jax.evaluation.response_store import GradedResponse, GradedResponses
from reinforce_ada_jax.types import FAILURES

# A label with more values than this, or with one value only, has no table.
MOST_LABEL_VALUES = 16
# Ends of the ranges of initial pass rates in `by_difficulty`; 0 and 1 are ranges of their own.
DIFFICULTY_EDGES = (0, 0.25, 0.5, 0.75, 1)

Statistics = dict[str, int | float]
# {label: {its value: (problems, avg)}} of one benchmark.
Labelled = Mapping[str, Mapping[str, tuple[int, float]]]


class Difficulty(NamedTuple):
    """Scores of the problems whose initial pass rates are in one range."""

    range: str  # "0", "0_0.25", ..., "1"; excludes its lower end, includes its upper end; "0.75_1" excludes both
    problems: int
    initial: float  # their mean initial pass rate
    average: float  # avg@n
    error: float  # standard error of `average`, over problems; nan for one problem


def sizes(samples: int) -> list[int]:
    """Returns the k of pass@k: 1, 2, 4, ... and `samples` itself."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Computes the probability that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).

    Integers are subtracted, and only the quotient is rounded, so that small results are accurate, too.
    """
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_correct, k)) / subsets


def all_correct_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Computes the probability that all of k samples are correct, without bias: C(c, k) / C(n, k)."""
    return math.comb(num_correct, k) / math.comb(num_samples, k)


def statistics(by_problem: Collection[Sequence[GradedResponse]]) -> Statistics:
    """Computes avg@n, its standard error over problems, pass@k and all-correct@k for k = 1, 2, 4, ..., n, and shares.

    One problem has no standard error. The shares are those of responses that are truncated, have no answer, or were not
    graded because the verifier failed. `tokens_mean` is the mean length of all responses.
    """
    num_correct = np.array([sum(response.verdict.correct for response in draws) for draws in by_problem])
    everything = [response for draws in by_problem for response in draws]
    samples = len(everything) // len(num_correct)
    shares = num_correct / samples
    result: Statistics = {"problems": len(shares), "avg": float(shares.mean())}
    if len(shares) > 1:
        result["avg_standard_error"] = _standard_error(shares)
    for name, probability in (("pass", pass_at_k), ("all_correct", all_correct_at_k)):
        for k in sizes(samples):
            result[f"{name}_at_{k}"] = float(np.mean([probability(int(c), samples, k) for c in num_correct]))
    reasons = [response.verdict.reason for response in everything]
    return result | {
        "truncated_share": float(np.mean([response.truncated for response in everything])),
        "no_answer_share": float(np.mean([reason == "no_answer" for reason in reasons])),
        "failure_share": float(np.mean([reason in FAILURES for reason in reasons])),
        "tokens_mean": float(np.mean([response.tokens for response in everything])),
    }


def _standard_error(values: Float[np.ndarray, " N"]) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def by_difficulty(initial: Mapping[str, float], drawn: GradedResponses) -> list[Difficulty]:
    """Returns scores by initial pass rate, hardest problems first; ranges without a problem are left out.

    Initial pass rates that were estimated from few samples bias `average - initial`: problems with 0 of 16 right look
    harder than they are. Runs that are compared with the same initial pass rates share this bias.
    `initial` has pass rates in [0, 1] by problem id; problems without one are left out.
    """
    names = [name for name in drawn if name in initial]
    rates = np.array([initial[name] for name in names])
    shares = np.array([np.mean([response.verdict.correct for response in drawn[name]]) for name in names])
    # 0: a rate of 0; 1, 2, ...: the ranges; the last: a rate of 1.
    index = np.searchsorted(DIFFICULTY_EDGES, rates) + (rates == 1)
    ends = [f"{edge:g}" for edge in DIFFICULTY_EDGES]
    ranges = ["0", *(f"{low}_{high}" for low, high in itertools.pairwise(ends)), "1"]
    return [
        Difficulty(name, int(of.sum()), float(rates[of].mean()), float(shares[of].mean()), _standard_error(shares[of]))
        for name, of in ((name, index == number) for number, name in enumerate(ranges))
        if of.any()
    ]


def difficulty_statistics(found: Sequence[Difficulty]) -> Statistics:
    """Returns `by_difficulty` as statistics: `avg_initial_<range>` and `problems_initial_<range>`."""
    averages = {f"avg_initial_{each.range}": each.average for each in found}
    return averages | {f"problems_initial_{each.range}": each.problems for each in found}


def by_label(labels: Mapping[str, Mapping[str, str]], drawn: GradedResponses) -> Labelled:
    """Returns {label: {value: (problems, avg)}}, values in alphabetical order."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, draws in drawn.items():
        share = float(np.mean([response.verdict.correct for response in draws]))
        for label, value in labels[name].items():
            found.setdefault(label, {}).setdefault(value, []).append(share)
    return {
        label: {value: (len(shares), float(np.mean(shares))) for value, shares in sorted(values.items())}
        for label, values in found.items()
        if 1 < len(values) <= MOST_LABEL_VALUES
    }


def weighted(results: Mapping[str, Statistics]) -> tuple[int, float, float]:
    """Computes (problems, avg over all of them, its standard error) of several benchmarks.

    The error is that of a mean over strata: sqrt(sum_i n_i^2 e_i^2) / sum_i n_i; nan if a benchmark has one problem.
    """
    problems = sum(result["problems"] for result in results.values())
    average = sum(result["problems"] * result["avg"] for result in results.values()) / problems
    variance = sum(
        (result["problems"] * result.get("avg_standard_error", math.nan)) ** 2 for result in results.values()
    )
    return int(problems), average, math.sqrt(variance) / problems

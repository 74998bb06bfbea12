"""The figures of an evaluation: from graded responses to numbers, and to Markdown with published ones beside them."""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from reinforce_ada_jax.collection.metrics import FAILURES
from reinforce_ada_jax.evaluation import paper_results
from reinforce_ada_jax.evaluation.response_store import Graded, Responses

# A label with more values than this is no table; one with a single value says nothing.
MOST_LABEL_VALUES = 16

Statistics = Mapping[str, float]
# {label: {its value: (problems, avg)}} of one benchmark.
Labelled = Mapping[str, Mapping[str, tuple[int, float]]]


def sizes(samples: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... and `samples` itself."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """The unbiased chance that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def all_correct_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """The unbiased chance that all of k samples are correct: C(c, k) / C(n, k)."""
    return math.comb(num_correct, k) / math.comb(num_samples, k)


def statistics(by_problem: Collection[Sequence[Graded]]) -> dict[str, float]:
    """avg@n with its standard error over problems, pass@k and all-correct@k for k = 1, 2, 4, ..., n, and shares of
    responses: truncated, without an answer, not graded because the verifier failed.

    Args:
      by_problem: n responses of each problem.
    """
    num_correct = np.array([sum(response.verdict.correct for response in draws) for draws in by_problem])
    everything = [response for draws in by_problem for response in draws]
    samples = len(everything) // len(num_correct)
    shares = num_correct / samples
    error = shares.std(ddof=1) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
    result = {"problems": len(shares), "avg": float(shares.mean()), "avg_standard_error": float(error)}
    for k in sizes(samples):
        result[f"pass_at_{k}"] = float(np.mean([pass_at_k(int(c), samples, k) for c in num_correct]))
    for k in sizes(samples):
        result[f"all_correct_at_{k}"] = float(np.mean([all_correct_at_k(int(c), samples, k) for c in num_correct]))
    reasons = [response.verdict.reason for response in everything]
    return result | {
        "truncated_share": float(np.mean([response.truncated for response in everything])),
        "no_answer_share": float(np.mean([reason == "no_answer" for reason in reasons])),
        "failure_share": float(np.mean([reason in FAILURES for reason in reasons])),
        "tokens_mean": float(np.mean([response.tokens for response in everything])),
    }


def by_label(labels: Mapping[str, Mapping[str, str]], drawn: Responses) -> Labelled:
    """{label: {value: (problems, avg)}}, values in alphabetical order.

    Args:
      labels: of each problem, by id.
      drawn: responses by id.
    """
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
    """(problems, avg over all of them, its standard error) of benchmarks with any numbers of problems.

    The error is that of a mean over strata: sqrt(sum_i n_i^2 e_i^2) / sum_i n_i.
    """
    problems = sum(result["problems"] for result in results.values())
    average = sum(result["problems"] * result["avg"] for result in results.values()) / problems
    variance = sum((result["problems"] * result["avg_standard_error"]) ** 2 for result in results.values())
    return int(problems), average, math.sqrt(variance) / problems


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table that can be read as it is: the first column to the left, numbers to the right."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]  # a label may be anything
    widths = [max(len(line[place]) for line in (header, *lines)) for place in range(len(header))]

    def row(cells: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join((first, *others))} |"

    rule = ["-" * width if not place else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    return "\n".join([row(header), row(rule), *map(row, lines)])


def _beside(row: paper_results.Row, name: str | None, problems: int) -> tuple[str, str]:
    """(cell, note) of a published figure; the note says why it can't be compared."""
    if name is None:
        return "", ""
    figure, of = row.figures[name], paper_results.PROBLEMS[name]
    if problems == of:
        return f"{figure:.3f}", ""
    return f"({figure:.3f})", f"({figure:.3f}) is of {of:,} problems, here are {problems:,}: not comparable."


def _settings_note(samples: int, temperature: float, max_response_tokens: int) -> str:
    ours = (samples, temperature, max_response_tokens)
    theirs = (paper_results.SAMPLES, paper_results.TEMPERATURE, paper_results.MAX_RESPONSE_TOKENS)
    if ours == theirs:
        return ""
    values = [f"avg@{k} at temperature {t:g} and {length:,} tokens" for k, t, length in (theirs, ours)]
    return f"The published figures are {values[0]}, these {values[1]}: not comparable."


def table(
    results: Mapping[str, Statistics],
    *,
    samples: int,
    temperature: float,
    max_response_tokens: int,
    labelled: Mapping[str, Labelled] | None = None,
    rows: Sequence[paper_results.Row] = (),
) -> str:
    """All that is known of an evaluation: figures by benchmark, curves over k, averages by label.

    Args:
      results: `statistics` by benchmark.
      samples: responses a problem, k of avg@k.
      temperature: of the evaluation.
      max_response_tokens: of the evaluation.
      labelled: averages by what the problems are labelled with.
      rows: published runs to be set beside.
    """
    notes: dict[str, None] = {}

    def line(name: str, problems: int, average: float, error: float, cells: Sequence[str], of: str | None) -> list[str]:
        beside = [_beside(row, of, problems) for row in rows]
        notes.update(dict.fromkeys(note for _, note in beside if note))
        return [name, f"{problems:,}", f"{average:.3f} ± {error:.3f}", *(cell for cell, _ in beside), *cells]

    shares = ("truncated_share", "no_answer_share", "failure_share")
    header = ["benchmark", "problems", f"avg@{samples}", *(row.name for row in rows)]
    header += [f"pass@{samples}", f"all@{samples}", "truncated", "no answer", "failed", "tokens"]
    lines = []
    for name, result in results.items():
        cells = [f"{result[key]:.3f}" for key in (f"pass_at_{samples}", f"all_correct_at_{samples}", *shares)]
        lines.append(line(name, int(result["problems"]), result["avg"], result["avg_standard_error"],
                          [*cells, f"{result['tokens_mean']:,.0f}"], paper_results.column(name)))  # fmt: skip
    if len(results) > 1:
        columns = [paper_results.column(name) for name in results]
        all_four = sorted(filter(None, columns)) == sorted(paper_results.SETS) and None not in columns
        of = paper_results.WEIGHTED if all_four else None
        lines.append(line(paper_results.WEIGHTED, *weighted(results), [""] * (len(shares) + 3), of))
    parts = [markdown(header, lines)]
    if any(row.figures for row in rows):
        note = _settings_note(samples, temperature, max_response_tokens)
        notes.update({note: None} if note else {})
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    parts.append(_curves(results, samples))
    parts += [
        _by_label(name, label, values) for name, labels in (labelled or {}).items() for label, values in labels.items()
    ]
    return "\n\n".join(parts)


def _curves(results: Mapping[str, Statistics], samples: int) -> str:
    """At least one of k correct, and all of k."""
    counts = sizes(samples)
    lines = [
        [f"{name}, {shown}", *(f"{result[f'{key}_at_{k}']:.3f}" for k in counts)]
        for name, result in results.items()
        for key, shown in (("pass", "pass@k"), ("all_correct", "all@k"))
    ]
    return markdown(["k", *map(str, counts)], lines)


def _by_label(name: str, label: str, values: Mapping[str, tuple[int, float]]) -> str:
    lines = [[value, f"{problems:,}", f"{average:.3f}"] for value, (problems, average) in values.items()]
    return markdown([f"{name}, {label}", "problems", "avg"], lines)

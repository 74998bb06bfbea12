"""Markdown tables of an evaluation's scores, with the paper's results where they can be compared."""

import pathlib
from collections.abc import Mapping, Sequence

from reinforce_ada_jax.evaluation import paper_results
from reinforce_ada_jax.evaluation.scores import (
    Difficulty,
    Labelled,
    Statistics,
    by_difficulty,
    by_label,
    difficulty_statistics,
    sizes,
    statistics,
    weighted,
)
from reinforce_ada_jax.evaluation.stored_evaluation import StoredEvaluation


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns: the first one to the left, numbers to the right."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]  # a label may be anything
    widths = [max(len(line[index]) for line in (header, *lines)) for index in range(len(header))]

    def row(cells: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join((first, *others))} |"

    rule = ["-" * (width - 1) + ":" if index else "-" * width for index, width in enumerate(widths)]
    return "\n".join([row(header), row(rule), *map(row, lines)])


def _paper_cell(averages: Mapping[str, float], name: str | None, problems: int) -> tuple[str, str]:
    """Returns (cell, note) of a result of the paper; the note says why it cannot be compared."""
    if name is None:
        return "", ""
    average, count = averages[name], paper_results.PROBLEMS[name]
    if problems == count:
        return f"{average:.3f}", ""
    return f"({average:.3f})", f"({average:.3f}) is over {count:,} problems, here are {problems:,}: not comparable."


def _settings_note(samples: int, temperature: float, max_response_tokens: int) -> str:
    ours = (samples, temperature, max_response_tokens)
    theirs = (paper_results.SAMPLES, paper_results.TEMPERATURE, paper_results.MAX_RESPONSE_TOKENS)
    if ours == theirs:
        return ""
    values = [f"avg@{k} at temperature {t:g} and {length:,} tokens" for k, t, length in (theirs, ours)]
    return f"The paper's results are {values[0]}, these {values[1]}: not comparable."


def table(
    results: Mapping[str, Statistics],
    *,
    samples: int,
    temperature: float,
    max_response_tokens: int,
    labelled: Mapping[str, Labelled],
    difficulties: Mapping[str, Sequence[Difficulty]],
    paper: paper_results.Comparison,
    graders: Mapping[str, str],
) -> str:
    """Returns the tables of an evaluation: scores by benchmark, curves over k, by initial difficulty, by label.

    `results`, `labelled` and `difficulties` are `statistics`, `by_label` and `by_difficulty` of each benchmark,
    `graders` the kind of its reward: results of the paper's run are shown only where it is the paper's.
    """
    notes: dict[str, None] = {}
    columns = {name: paper_results.column(name) for name in results if paper.averages}
    for name, column in columns.items():
        if column is not None and graders[name] != (published := paper_results.GRADERS[column]):
            columns[name] = None
            notes[f"{name} is graded by {graders[name]!r}, the paper's results by {published!r}."] = None

    def line(
        name: str, problems: int, average: float, error: float, cells: Sequence[str], column: str | None
    ) -> list[str]:
        published, note = _paper_cell(paper.averages, column, problems)
        notes.update({note: None} if note else {})
        papers = [published] if paper.averages else []
        return [name, f"{problems:,}", f"{average:.3f} ± {error:.3f}", *papers, *cells]

    shares = ("truncated_share", "no_answer_share", "failure_share")
    header = ["benchmark", "problems", f"avg@{samples}", *([paper.name] if paper.averages else [])]
    header += [f"pass@{samples}", f"all@{samples}", "truncated", "no answer", "failed", "tokens"]
    lines = []
    for name, result in results.items():
        cells = [f"{result[key]:.3f}" for key in (f"pass_at_{samples}", f"all_correct_at_{samples}", *shares)]
        lines.append(line(name, int(result["problems"]), result["avg"], result["avg_standard_error"],
                          [*cells, f"{result['tokens_mean']:,.0f}"], columns.get(name)))  # fmt: skip
    if len(results) > 1:
        all_four = len(results) == len(paper_results.SETS) and {*columns.values()} == {*paper_results.SETS}
        column = paper_results.WEIGHTED if all_four else None
        lines.append(line(paper_results.WEIGHTED, *weighted(results), [""] * (len(shares) + 3), column))
    sections = [markdown(header, lines)]
    if paper.averages:
        note = _settings_note(samples, temperature, max_response_tokens)
        notes.update({note: None} if note else {})
    if paper.differences:
        note = "The paper has results of this model and strategy, which this run can't be compared with: "
        notes[f"{note}{'; '.join(paper.differences)}."] = None
    if notes:
        sections.append("\n".join(f"- {note}" for note in notes))
    sections.append(_curves(results, samples))
    sections += [_by_difficulty(name, found, samples) for name, found in difficulties.items() if found]
    sections += [_by_label(name, label, values) for name, found in labelled.items() for label, values in found.items()]
    return "\n\n".join(sections)


def _curves(results: Mapping[str, Statistics], samples: int) -> str:
    counts = sizes(samples)
    lines = [
        [f"{name}, {shown}", *(f"{result[f'{key}_at_{k}']:.3f}" for k in counts)]
        for name, result in results.items()
        for key, shown in (("pass", "pass@k"), ("all_correct", "all@k"))
    ]
    return markdown(["k", *map(str, counts)], lines)


def _by_difficulty(name: str, found: Sequence[Difficulty], samples: int) -> str:
    lines = [
        [each.range.replace("_", " to "), f"{each.problems:,}", f"{each.initial:.3f}",
         f"{each.average:.3f} ± {each.error:.3f}", f"{each.average - each.initial:+.3f}"]
        for each in found
    ]  # fmt: skip
    return markdown([f"{name}, initial pass rate", "problems", "initial", f"avg@{samples}", "change"], lines)


def _by_label(name: str, label: str, values: Mapping[str, tuple[int, float]]) -> str:
    lines = [[value, f"{problems:,}", f"{average:.3f}"] for value, (problems, average) in values.items()]
    return markdown([f"{name}, {label}", "problems", "avg"], lines)


def with_section(text: str, title: str, table: str) -> str:
    """Returns the text of table.md with a section of this title, in place of an earlier one; other sections stay."""
    _, *sections = f"\n{text}".split("\n## ")
    others = [section for section in sections if section.partition("\n")[0] != title]
    return "\n".join(f"## {section.rstrip()}\n" for section in (*others, f"{title}\n\n{table}"))


def summarize(evaluation: StoredEvaluation, workdir: pathlib.Path | None) -> tuple[dict[str, Statistics], str]:
    """Returns (statistics by benchmark, the tables); `workdir` is the evaluated run's, None for a model folder."""
    responses, drawn_with = evaluation.responses, evaluation.drawn
    difficulties = {name: by_difficulty(evaluation.initial[name], drawn) for name, drawn in responses.items()}
    results = {
        name: statistics(drawn.values()) | difficulty_statistics(difficulties[name])
        for name, drawn in responses.items()
    }
    return results, table(
        results,
        **{key: drawn_with[key] for key in ("samples", "temperature", "max_response_tokens")},
        labelled={name: by_label(evaluation.labels[name], drawn) for name, drawn in responses.items()},
        difficulties=difficulties,
        paper=paper_results.comparison_of_run(workdir),
        graders=evaluation.graders,
    )

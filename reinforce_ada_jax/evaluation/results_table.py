"""Markdown tables of an evaluation's scores, with the paper's results where they can be compared."""

import math
import pathlib
from collections.abc import Mapping, Sequence

from reinforce_ada_jax.evaluation import paper_results, scores
from reinforce_ada_jax.evaluation.scores import Difficulty, Labelled, Statistics
from reinforce_ada_jax.evaluation.stored_evaluation import StoredEvaluation
from reinforce_ada_jax.files.durable import exclusive, write_atomically
from reinforce_ada_jax.training.reward_check import without_answer


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns: the first one to the left, numbers to the right."""
    # A label may be anything, also several lines.
    lines = [[" ".join(cell.splitlines()).replace("|", "\\|") for cell in line] for line in lines]
    first, *others = (max(map(len, column)) for column in zip(header, *lines, strict=True))
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
    rows = [[line[0].ljust(first), *map(str.rjust, line[1:], others)] for line in (header, rule, *lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
    """Returns the tables of an evaluation: scores by benchmark, curves over k, scores by difficulty and by label.

    `results`, `labelled` and `difficulties` are `statistics`, `by_label` and `by_difficulty` of each benchmark.
    `graders` is the kind of its reward: the paper's results are shown only where the paper used the same kind.
    """
    notes: list[str] = []
    columns = {name: paper_results.column(name) for name in results if paper.averages}
    for name, column in columns.items():
        if column is not None and graders[name] != (published := paper_results.GRADERS[column]):
            columns[name] = None
            notes.append(f"{name} is graded by {graders[name]!r}, the paper's results by {published!r}.")

    def line(
        name: str, problems: int, average: float, error: float, cells: Sequence[str], column: str | None
    ) -> list[str]:
        papers = [""] if paper.averages else []
        if column is not None:
            papers, count = [f"{paper.averages[column]:.3f}"], paper_results.PROBLEMS[column]
            if problems != count:
                papers = [f"({papers[0]})"]
                notes.append(f"{papers[0]} is over {count:,} problems, here are {problems:,}: not comparable.")
        return [name, f"{problems:,}", _with_error(average, error), *papers, *cells]

    shares = ("truncated_share", "no_answer_share", "failure_share")
    header = ["benchmark", "problems", f"avg@{samples}", *([paper.name] if paper.averages else [])]
    header += [f"pass@{samples}", f"all@{samples}", "truncated", "no answer", "failed", "tokens"]
    lines = []
    for name, result in results.items():
        cells = [f"{result[key]:.3f}" for key in (f"pass_at_{samples}", f"all_correct_at_{samples}", *shares)]
        lines.append(line(name, int(result["problems"]), result["avg"], result.get("avg_standard_error", math.nan),
                          [*cells, f"{result['tokens_mean']:,.0f}"], columns.get(name)))  # fmt: skip
    if len(results) > 1:
        all_four = len(results) == len(paper_results.SETS) and {*columns.values()} == {*paper_results.SETS}
        column = paper_results.WEIGHTED if all_four else None
        lines.append(line(paper_results.WEIGHTED, *scores.weighted(results), [""] * (len(shares) + 3), column))
    ours = (samples, temperature, max_response_tokens)
    theirs = (paper_results.SAMPLES, paper_results.TEMPERATURE, paper_results.MAX_RESPONSE_TOKENS)
    if paper.averages and ours != theirs:
        values = [f"avg@{k} at temperature {t:g} and {length:,} tokens" for k, t, length in (theirs, ours)]
        notes.append(f"The paper's results are {values[0]}, these {values[1]}: not comparable.")
    if paper.differences:
        note = "The paper has results of this model and strategy, which this run can't be compared with: "
        notes.append(f"{note}{'; '.join(paper.differences)}.")
    for name, result in results.items():
        flag = f"--config.evaluation.graders='(\"{name}=gsm8k\",)' with --regrade"
        notes.append(without_answer(graders.get(name, ""), result["no_answer_share"], f" to {name}", flag))
    counts = scores.sizes(samples)
    curves = [
        [f"{name}, {shown}", *(f"{result[f'{key}_at_{k}']:.3f}" for k in counts)]
        for name, result in results.items()
        for key, shown in (("pass", "pass@k"), ("all_correct", "all@k"))
    ]
    sections = [markdown(header, lines), "\n".join(f"- {note}" for note in dict.fromkeys(filter(None, notes)))]
    sections.append(markdown(["k", *map(str, counts)], curves))
    sections += [_by_difficulty(name, found, samples) for name, found in difficulties.items() if found]
    sections += [_by_label(name, label, values) for name, found in labelled.items() for label, values in found.items()]
    return "\n\n".join(filter(None, sections))


def _with_error(average: float, error: float) -> str:
    """Returns an average with its standard error over problems, where it has one."""
    return f"{average:.3f}" if math.isnan(error) else f"{average:.3f} ± {error:.3f}"


def _by_difficulty(name: str, found: Sequence[Difficulty], samples: int) -> str:
    lines = [
        [each.range.replace("_", " to "), f"{each.problems:,}", f"{each.initial:.3f}",
         _with_error(each.average, each.error), f"{each.average - each.initial:+.3f}"]
        for each in found
    ]  # fmt: skip
    return markdown([f"{name}, initial pass rate", "problems", "initial", f"avg@{samples}", "change"], lines)


def _by_label(name: str, label: str, values: Mapping[str, tuple[int, float]]) -> str:
    lines = [[value, f"{problems:,}", f"{average:.3f}"] for value, (problems, average) in values.items()]
    return markdown([f"{name}, {label}", "problems", "avg"], lines)


def with_section(text: str, title: str, table: str) -> str:
    """Returns the text of table.md with this section, which replaces one of the same title; other sections stay."""
    _, *sections = f"\n{text}".split("\n## ")
    others = [section for section in sections if section.partition("\n")[0] != title]
    return "\n".join(f"## {section.rstrip()}\n" for section in (*others, f"{title}\n\n{table}"))


def write(file: pathlib.Path, title: str, table: str) -> None:
    """Writes a section of table.md under a lock: other evaluations of the same run may end at the same time."""
    with exclusive(file.parent):
        before = file.read_text("utf-8", errors="replace") if file.exists() else ""
        write_atomically(file, with_section(before, title, table))


def summarize(evaluation: StoredEvaluation, workdir: pathlib.Path | None) -> tuple[dict[str, Statistics], str]:
    """Returns (statistics by benchmark, the tables); `workdir` is the evaluated run's, None for a model folder."""
    results, labelled, difficulties = {}, {}, {}
    for name, drawn in evaluation.responses.items():
        difficulties[name] = scores.by_difficulty(evaluation.initial[name], drawn)
        results[name] = scores.statistics(drawn.values()) | scores.difficulty_statistics(difficulties[name])
        labelled[name] = scores.by_label({each.id: each.labels for each in evaluation.benchmarks[name]}, drawn)
    return results, table(
        results,
        **{key: evaluation.drawn[key] for key in ("samples", "temperature", "max_response_tokens")},
        labelled=labelled,
        difficulties=difficulties,
        paper=paper_results.comparison_of_run(workdir),
        graders={name: store.header["graded"]["reward"] for name, store in evaluation.stores.items()},
    )

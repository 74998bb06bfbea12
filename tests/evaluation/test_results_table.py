"""The table of an evaluation, literally, and the runs and settings that have no place in it."""

import concurrent.futures
import math

from reinforce_ada_jax.evaluation import paper_results, results_table
from reinforce_ada_jax.evaluation.scores import Difficulty, Statistics, statistics
from tests.evaluation.test_scores import problem


def table(results, **settings):
    """The tables of an evaluation with these settings, of a run that the paper has not."""
    others = {"temperature": 1.0, "max_response_tokens": 8, "labelled": {}, "difficulties": {}, "graders": {}}
    return results_table.table(results, **others | {"paper": paper_results.Comparison()} | settings)


def test_table():
    """The table has a row for each benchmark, label and range of difficulty."""
    results = {
        "heldout": statistics([problem("0100"), problem("1101")]),
        "b": statistics([problem("1111", truncated=2, reasons="nt")]),
    }
    labelled = {"b": {"level": {"2": (1, 1.0)}}}
    difficulties = {
        "heldout": [Difficulty("0", 1, 0.0, 0.25, math.nan), Difficulty("0.5_0.75", 1200, 0.625, 0.5, 0.1)],
        "b": [],
    }
    shown = table(results, samples=4, labelled=labelled, difficulties=difficulties)
    assert shown.splitlines() == [
        "| benchmark        | problems |         avg@4 | pass@4 | all@4 | truncated | no answer | failed | tokens |",
        "| ---------------- | -------: | ------------: | -----: | ----: | --------: | --------: | -----: | -----: |",
        "| heldout          |        2 | 0.500 ± 0.250 |  1.000 | 0.000 |     0.000 |     0.000 |  0.000 |     25 |",
        "| b                |        1 |         1.000 |  1.000 | 1.000 |     0.500 |     0.250 |  0.250 |     25 |",
        "| weighted average |        3 |         0.667 |        |       |           |           |        |        |",
        "",
        "| k               |     1 |     2 |     4 |",
        "| --------------- | ----: | ----: | ----: |",
        "| heldout, pass@k | 0.500 | 0.750 | 1.000 |",
        "| heldout, all@k  | 0.500 | 0.250 | 0.000 |",
        "| b, pass@k       | 1.000 | 1.000 | 1.000 |",
        "| b, all@k        | 1.000 | 1.000 | 1.000 |",
        "",
        "| heldout, initial pass rate | problems | initial |         avg@4 | change |",
        "| -------------------------- | -------: | ------: | ------------: | -----: |",
        "| 0                          |        1 |   0.000 |         0.250 | +0.250 |",
        "| 0.5 to 0.75                |    1,200 |   0.625 | 0.500 ± 0.100 | -0.125 |",
        "",
        "| b, level | problems |   avg |",
        "| -------- | -------: | ----: |",
        "| 2        |        1 | 1.000 |",
    ]


def test_a_grader_that_reads_nothing_has_a_note():
    results = {
        "a": statistics([problem("0000", reasons="nnnn")]),
        "b": statistics([problem("0001", reasons="nn")]),
    }
    lines = table(results, samples=4, graders={"a": "math", "b": "math"}).splitlines()
    notes = [line for line in lines if line.startswith("- ")]
    assert len(notes) == 1 and notes[0].startswith("- 100% of the responses to a have no")
    assert """--config.evaluation.graders='("a=gsm8k",)' with --regrade""" in notes[0]
    notes = [
        line for line in table(results, samples=4, graders={"a": "gsm8k", "b": "math"}).splitlines() if line[0:1] == "-"
    ]
    assert notes == []


def test_a_bar_in_a_label_does_not_end_its_cell():
    assert results_table.markdown(["x", "n"], [["|a|", "1"]]).splitlines()[2] == r"| \|a\| | 1 |"


def test_a_label_of_several_lines_stays_in_its_row():
    # "## b" on a line of its own would begin a section of table.md.
    shown = results_table.markdown(["x", "n"], [["a\n## b", "1"]])
    assert shown.splitlines()[2:] == ["| a ## b | 1 |"]


def full_size(**problems: int) -> dict[str, Statistics]:
    """Statistics of benchmarks with these numbers of problems."""
    return {name: statistics([problem("10")] * 2) | {"problems": count} for name, count in problems.items()}


def test_paper_results_are_shown_with_what_they_can_be_compared_with():
    averages = dict(zip(paper_results.PROBLEMS, (0.774, 0.365, 0.405, 0.175, 0.476), strict=True))
    published = dict.fromkeys(("math500", "olympiadbench", "aime_like", "aime_like_160"), "reference_evaluation")
    published["minerva_math"] = "reference_minerva"
    settings = {"samples": 2, "max_response_tokens": 4096, "graders": published}
    settings["paper"] = paper_results.Comparison("paper", averages)
    results = full_size(math500=500, minerva_math=272, olympiadbench=675, aime_like_160=160, gsm8k_test=1319)
    lines = table(results, **settings).splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[4:5]] for line in lines[2:8]}
    assert cells == {
        "math500": ["0.774"],
        "minerva_math": ["0.365"],
        "olympiadbench": ["0.405"],
        "aime_like_160": ["(0.175)"],
        "gsm8k_test": [""],
        "weighted average": [""],  # of five sets
    }
    assert "- (0.175) is over 230 problems, here are 160: not comparable." in lines
    assert (
        "- The paper's results are avg@32 at temperature 1 and 4,096 tokens, these avg@2 at temperature 1 and 4,096 "
        "tokens: not comparable."
    ) in lines
    del results["gsm8k_test"]
    lines = table(results, **settings).splitlines()
    assert "| 0.500 ± 0.000 | (0.476) |" in lines[6]
    assert "- (0.476) is over 1,677 problems, here are 1,607: not comparable." in lines
    results = full_size(math500=500, minerva_math=272, olympiadbench=675, aime_like=230)
    shown = table(results, **settings)
    assert "| 0.476 |" in shown.splitlines()[6] and "is over" not in shown
    # A set that was graded by other rules has no figure beside it, and the average over all four has none.
    shown = table(results, **settings | {"graders": published | {"minerva_math": "minerva"}})
    assert "0.365" not in shown and "0.476" not in shown and "0.774" in shown
    assert "- minerva_math is graded by 'minerva', the paper's results by 'reference_minerva'." in shown


def test_a_run_with_other_settings_has_no_figures_and_says_why():
    paper = paper_results.Comparison(differences=("collection.objective is 'log', the paper's 'identity'",))
    shown = table(full_size(math500=500), samples=2, paper=paper, graders={"math500": "math"})
    assert "can't be compared with: collection.objective is 'log', the paper's 'identity'." in shown
    assert "graded by" not in shown


def test_a_table_file_has_a_section_for_each_set_of_benchmarks():
    text = ""
    for title, table in (("gsm8k", "| a |"), ("aime, math", "| b |\n\n| c |"), ("gsm8k", "| d |")):
        text = results_table.with_section(text, title, table)
    assert text == "## aime, math\n\n| b |\n\n| c |\n\n## gsm8k\n\n| d |\n"


def test_evaluations_that_end_together_keep_each_others_sections(tmp_path):
    file, titles = tmp_path / "table.md", [f"set{number}" for number in range(16)]
    with concurrent.futures.ThreadPoolExecutor(len(titles)) as threads:
        list(threads.map(lambda title: results_table.write(file, title, "| a |"), titles))
    assert sorted(line[3:] for line in file.read_text().splitlines() if line.startswith("## ")) == sorted(titles)
    assert list(tmp_path.iterdir()) == [file]

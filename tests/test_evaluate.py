import itertools
import json
import types

import numpy as np
import pytest

from reinforce_ada_jax import assembly, evaluate, published
from reinforce_ada_jax import evaluation_figures as figures
from reinforce_ada_jax.assembly import Parts
from reinforce_ada_jax.config import defaults
from reinforce_ada_jax.responses import Graded
from reinforce_ada_jax.types import Verdict
from tests.running import tiny


def problem(correct: str, truncated: int = 0, reasons: str = "") -> list[Graded]:
    """A problem's responses from "1001": which are correct; the first few are truncated, and have these reasons."""
    words = {"n": "no_answer", "t": "timeout", "l": "too_long"}
    padded = reasons.ljust(len(correct))
    return [
        Graded(10 * (draw + 1), draw < truncated, Verdict(digit == "1", float(digit), words.get(reason, "")))
        for draw, (digit, reason) in enumerate(zip(correct, padded, strict=True))
    ]


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_any_and_all_of_k_are_shares_of_the_draws_of_k(num_samples):
    for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        correct = [index < num_correct for index in range(num_samples)]
        draws = list(itertools.combinations(correct, k))
        assert figures.pass_at_k(num_correct, num_samples, k) == pytest.approx(np.mean([any(x) for x in draws]))
        assert figures.all_correct_at_k(num_correct, num_samples, k) == pytest.approx(np.mean([all(x) for x in draws]))


def test_statistics_by_hand():
    # One and three of four are correct: averages 1/4 and 3/4, standard deviation sqrt(1/8), error sqrt(1/8 / 2) = 1/4.
    # Of the six pairs three hold the one correct response, and all six one of the three: (1/2 + 1) / 2 = 3/4. No pair
    # is correct in the first, and three of six in the second: 1/4.
    assert evaluate.statistics([problem("0100", truncated=3, reasons="nnlt"), problem("1101", reasons="n")]) == {
        "problems": 2,
        "avg": 0.5,
        "avg_standard_error": pytest.approx(0.25),
        "pass_at_1": 0.5,
        "pass_at_2": 0.75,
        "pass_at_4": 1.0,
        "all_correct_at_1": 0.5,
        "all_correct_at_2": 0.25,
        "all_correct_at_4": 0.0,
        "truncated_share": 3 / 8,
        "no_answer_share": 3 / 8,
        "failure_share": 1 / 8,
        "tokens_mean": 25.0,
    }


def test_one_problem_has_no_error_and_the_samples_are_a_k_too():
    result = evaluate.statistics([problem("010100")])
    assert result["avg_standard_error"] == 0.0
    assert [key for key in result if key.startswith("pass")] == ["pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6"]


def test_averages_by_label():
    labels = {
        "a": {"level": "5", "source": "x"},
        "b": {"level": "2", "source": "x"},
        "c": {"level": "5", "source": "x"},
        "d": {},
    }
    drawn = {name: problem(correct) for name, correct in zip("abcd", ["01", "11", "00", "11"], strict=True)}
    # A single source says nothing, and 17 values of a label are no table.
    assert figures.by_label(labels, drawn) == {"level": {"2": (1, 1.0), "5": (2, 0.25)}}
    many = {str(number): {"type": str(number)} for number in range(17)}
    assert figures.by_label(many, {name: problem("1") for name in many}) == {}


def test_the_weighted_average():
    # (3 * 0.5 + 1 * 0.1) / 4 = 0.4; the error sqrt((3 * 0.1)^2 + (1 * 0.4)^2) / 4 = 0.125.
    results = {
        "a": {"problems": 3, "avg": 0.5, "avg_standard_error": 0.1},
        "b": {"problems": 1, "avg": 0.1, "avg_standard_error": 0.4},
    }
    assert figures.weighted(results) == (4, pytest.approx(0.4), pytest.approx(0.125))


def test_table():
    results = {
        "heldout": evaluate.statistics([problem("0100"), problem("1101")]),
        "b": evaluate.statistics([problem("1111", truncated=2, reasons="nt")]),
    }
    labelled = {"b": {"level": {"2": (1, 1.0)}}}
    shown = figures.table(results, samples=4, temperature=1.0, max_response_tokens=8, labelled=labelled)
    assert shown.splitlines() == [
        "| benchmark        | problems |         avg@4 | pass@4 | all@4 | truncated | no answer | failed | tokens |",
        "| ---------------- | -------: | ------------: | -----: | ----: | --------: | --------: | -----: | -----: |",
        "| heldout          |        2 | 0.500 ± 0.250 |  1.000 | 0.000 |     0.000 |     0.000 |  0.000 |     25 |",
        "| b                |        1 | 1.000 ± 0.000 |  1.000 | 1.000 |     0.500 |     0.250 |  0.250 |     25 |",
        "| weighted average |        3 | 0.667 ± 0.167 |        |       |           |           |        |        |",
        "",
        "| k               |     1 |     2 |     4 |",
        "| --------------- | ----: | ----: | ----: |",
        "| heldout, pass@k | 0.500 | 0.750 | 1.000 |",
        "| heldout, all@k  | 0.500 | 0.250 | 0.000 |",
        "| b, pass@k       | 1.000 | 1.000 | 1.000 |",
        "| b, all@k        | 1.000 | 1.000 | 1.000 |",
        "",
        "| b, level | problems |   avg |",
        "| -------- | -------: | ----: |",
        "| 2        |        1 | 1.000 |",
    ]


# ---- published figures -----------------------------------------------------------------------------------------------


def test_published_averages_are_those_of_their_columns():
    # A slip in a digit would show: each average is that of four rounded figures weighted by problems, up to 0.16. Of
    # three rows the paper's own averages are farther off.
    tables = {"easy": published._FIGURES, "hard": published._ON_HARD_PROMPTS}
    assert [len(rows) for rows in tables.values()] == [17, 6]
    off = {
        (name, *key): round(float(np.average(columns, weights=list(published.SETS.values())) - average), 2)
        for name, rows in tables.items()
        for key, (*columns, average) in rows.items()
    }
    assert {key: value for key, value in off.items() if abs(value) > 0.16} == {
        ("easy", "Qwen2.5-Math-7B", "positive", 4): -0.18,
        ("hard", "Qwen2.5-Math-1.5B", "positive", 4): -0.3,
        ("hard", "Qwen2.5-Math-1.5B", "balance", 4): 0.23,
    }


def full_size(**problems: int) -> dict[str, dict[str, float]]:
    """Statistics of benchmarks with so many problems."""
    return {name: evaluate.statistics([problem("10")]) | {"problems": count} for name, count in problems.items()}


def test_published_figures_stand_beside_those_that_they_can_be_compared_with():
    rows = published.rows("Qwen2.5-Math-1.5B", "balance", 4)
    assert [row.name for row in rows] == ["published", "published, hard prompts"]
    settings = {"samples": 2, "temperature": 1.0, "max_response_tokens": 4096, "rows": rows}
    results = full_size(math500=500, minerva_math=272, olympiadbench=675, aime_like_160=160, gsm8k_test=1319)
    lines = figures.table(results, **settings).splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[4:6]] for line in lines[2:8]}
    assert cells == {
        "math500": ["0.774", "0.747"],
        "minerva_math": ["0.365", "0.337"],
        "olympiadbench": ["0.405", "0.387"],
        "aime_like_160": ["(0.175)", "(0.176)"],
        "gsm8k_test": ["", ""],
        "weighted average": ["", ""],  # of five sets
    }
    assert "- (0.175) is of 230 problems, here are 160: not comparable." in lines
    assert (
        "- The published figures are avg@32 at temperature 1 and 4,096 tokens, these avg@2 at temperature 1 and 4,096 "
        "tokens: not comparable."
    ) in lines
    del results["gsm8k_test"]
    lines = figures.table(results, **settings).splitlines()
    assert "| 0.500 ± 0.000 |   (0.476) |" in lines[6]
    assert "- (0.476) is of 1,677 problems, here are 1,607: not comparable." in lines
    results = full_size(math500=500, minerva_math=272, olympiadbench=675, aime_like=230)
    shown = figures.table(results, **settings | {"rows": rows[:1]})
    assert "|     0.476 |" in shown.splitlines()[6] and "is of" not in shown


def test_what_was_not_published_has_no_row():
    assert published.rows("Qwen2.5-Math-1.5B", "ngu", 4) == published.rows("cipher", "balance", 4) == []
    (row,) = published.rows("Qwen2.5-Math-1.5B", "grpo", 16)
    assert row.figures["math500"] == pytest.approx(0.769)


# ---- parts of the command --------------------------------------------------------------------------------------------


def test_other_benchmarks_stay_in_the_file(tmp_path):
    evaluate.save(tmp_path, 7, {"evaluation/a/avg": 0.1, "evaluation/a/pass_at_16": 0.9, "evaluation/b/avg": 0.2})
    # With fewer samples there is no pass@16 any more: the old one must not stand beside the new average.
    file = evaluate.save(tmp_path, 7, {"evaluation/a/avg": 0.3})
    assert file == tmp_path / "evaluations" / "000007.json"
    assert json.loads(file.read_text()) == {"iteration": 7, "evaluation/b/avg": 0.2, "evaluation/a/avg": 0.3}
    assert list(file.parent.iterdir()) == [file]


def test_benchmarks_of_one_name_are_refused(monkeypatch):
    monkeypatch.setattr(Parts, "prompts", lambda self, source, config: [])
    config = defaults()
    config.evaluation.benchmarks = ("x/aime.jsonl", "y/aime.jsonl")
    with pytest.raises(ValueError, match="two benchmarks are called 'aime': rename"):
        evaluate.load_benchmarks(object.__new__(Parts), config)
    config.evaluation.benchmarks = ("x/aime.jsonl", "cipher:heldout")
    assert list(evaluate.load_benchmarks(object.__new__(Parts), config)) == ["aime", "heldout"]


def test_benchmarks_with_a_rule_of_their_own_are_graded_by_it():
    config = tiny(**{"evaluation.benchmarks": ("data/gsm8k_test.jsonl", "math500.jsonl")})
    parts = types.SimpleNamespace(verify_fn=lambda verifiers, shaping, grader: (shaping.overlong_tokens, grader))
    assert evaluate.verify_fns(parts, None, config) == {"gsm8k_test": (0, "gsm8k"), "math500": (0, "")}
    # The pool has the graders that are named so, and a pair goes to the one that its benchmark has.
    config.reward.kind, config.reward.workers = "math", 0
    with assembly.verifier_pool(config) as verifiers:
        pairs = [("The total is 1,200 apples.", "1200")]
        assert [verifiers.grade_all(pairs, grader)[0].correct for grader in ("gsm8k", "")] == [True, False]

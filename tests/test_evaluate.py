import itertools
import json
import types

import numpy as np
import pytest

from reinforce_ada_jax import assembly, evaluate
from reinforce_ada_jax.assembly import Parts
from reinforce_ada_jax.config import defaults
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict
from tests.running import tiny


def pool(correct: str, truncated: int = 0) -> Pool:
    """A pool from "1001": which responses are correct; the first few are truncated."""
    prompt = Prompt("p", "", "", np.zeros(1, np.int32))
    responses = tuple(
        Response("p", draw, np.zeros(1, np.int32), np.zeros(1, np.float32), draw < truncated)
        for draw in range(len(correct))
    )
    verdicts = tuple(Verdict(digit == "1", float(digit)) for digit in correct)
    return Pool(prompt, responses, verdicts, rounds=1, met=True)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_correct_one(num_samples):
    for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        correct = [index < num_correct for index in range(num_samples)]
        draws = [any(draw) for draw in itertools.combinations(correct, k)]
        assert evaluate.pass_at_k(num_correct, num_samples, k) == pytest.approx(sum(draws) / len(draws))


def test_statistics_by_hand():
    # One and three of four are correct: averages 1/4 and 3/4, standard deviation sqrt(1/8), error sqrt(1/8 / 2) = 1/4.
    # Of the six pairs three hold the one correct response, and all six one of the three: (1/2 + 1) / 2 = 3/4.
    assert evaluate.statistics([pool("0100", truncated=3), pool("1101")]) == {
        "avg": 0.5,
        "avg_standard_error": pytest.approx(0.25),
        "pass_at_1": 0.5,
        "pass_at_2": 0.75,
        "pass_at_4": 1.0,
        "truncated_share": 3 / 8,
    }


def test_one_problem_has_no_error_and_powers_of_two_end_below_the_samples():
    result = evaluate.statistics([pool("010100")])
    assert result["avg_standard_error"] == 0.0
    assert [key for key in result if key.startswith("pass")] == ["pass_at_1", "pass_at_2", "pass_at_4"]


def test_table():
    metrics = {
        f"evaluation/{name}/{key}": value
        for name, pools in {"heldout": [pool("0100"), pool("1101")], "b": [pool("1111")]}.items()
        for key, value in evaluate.statistics(pools).items()
    }
    assert evaluate.table(metrics, samples=4).splitlines() == [
        "benchmark  avg@4          pass@2  pass@4  truncated",
        "heldout    0.500 ± 0.250  0.750   1.000   0.000    ",
        "b          1.000 ± 0.000  1.000   1.000   0.000    ",
    ]


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

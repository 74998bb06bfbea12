"""Choosing prompts by their pass rates: bounds, duplicates, overlaps with benchmarks, and what a line keeps."""

import json

import numpy as np
import pytest

from reinforce_ada_jax.data.problems import Problem, to_row
from reinforce_ada_jax.data.prompts import load_problems
from reinforce_ada_jax.evaluation import preparation
from reinforce_ada_jax.evaluation.preparation import Band
from reinforce_ada_jax.rewards import math_answer
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.types import Prompt, Verdict
from tests.running import tiny


def exact(response, answer):
    return Verdict(response == answer, float(response == answer))


def test_a_warning_of_fewer_prompts_than_an_iteration_takes():
    assert preparation.few_prompts(512, 512) == ""
    text = preparation.few_prompts(9, 512)
    assert "takes 512 different prompts (collection.prompts_per_iteration), and there are 9." in text
    assert "prompts_per_update of at most 9" in text


def test_the_band_is_open_below_and_closed_above():
    # The paper's sets of 16 draws: hard has 1 or 2 correct, easy 1 to 5.
    for most, kept in ((0.125, [1, 2]), (0.313, [1, 2, 3, 4, 5])):
        assert [number for number in range(17) if number / 16 in Band(0.0, most)] == kept
    assert [number for number in range(5) if number / 4 in Band(0.25, 0.75)] == [2, 3]
    assert 1.0 in Band(0.0, 1.0)


@pytest.mark.parametrize("ends", [(0.5, 0.5), (0.6, 0.5), (-0.1, 0.5), (0.0, 1.1), (float("nan"), 0.5)])
def test_bands_that_are_none(ends):
    with pytest.raises(ValueError, match=r"--min_pass_rate is .* the first below the second"):
        Band(*ends)


def test_duplicates_are_found_by_their_normalised_text():
    def problem(name, text):
        return {"id": name, "problem": text, "answer": name}

    problems = [
        problem("a", "Find  $x$."),
        problem("b", "Find $X$."),  # another letter
        problem("c", " Find\n$x$. "),
        problem("d", "caf\u00e9"),
        problem("e", "cafe\u0301"),
    ]
    assert [one["id"] for one in preparation.first_of_each(problems)] == ["a", "b", "d"]


def test_histogram():
    """The histogram has a bar for each pass rate, and marks those of the band."""
    assert preparation.histogram([0, 0, 0, 0, 1, 2, 2], 2, Band(0.0, 0.5)).splitlines() == [
        "pass rate  problems",
        "    0.000         4  ########################################",
        "    0.500 *       1  ##########",
        "    1.000         2  ####################",
    ]


def test_references_are_verified_in_a_box_or_as_they_are():
    answers = (r"\frac{1}{2}", r"\text{}")
    prompts = [Prompt(str(index), "", answer, np.zeros(1, np.int32)) for index, answer in enumerate(answers)]
    with VerifierPool(math_answer.grade, workers=0, time_limit_s=1.0) as verifiers:
        graded = preparation.verify_references(tiny(), prompts, verifiers)
    assert [(text, verdict.correct) for text, verdict in graded] == [
        (r"\boxed{\frac{1}{2}}", True),
        (r"\boxed{\text{}}", False),
    ]
    # A verifier that reads whole texts: in the box the answer is another one.
    same = VerifierPool(exact, workers=0, time_limit_s=1.0)
    with same as verifiers:
        assert preparation.verify_references(tiny(), prompts[:1], verifiers) == [(r"\frac{1}{2}", Verdict(True, 1.0))]


def test_a_line_keeps_labels_and_messages(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "é?"}]
    problem: Problem = {"id": "a", "problem": "é?", "answer": "1", "labels": {"level": "2"}, "prompt": messages}
    (tmp_path / "chosen.jsonl").write_text(json.dumps(to_row({**problem, "pass_rate": 0.25})))
    (again,) = load_problems(str(tmp_path / "chosen.jsonl"))
    assert again.pop("columns")["level"] == "2" and again.pop("origin")
    assert again == problem | {"pass_rate": 0.25}


def test_a_line_keeps_the_columns_of_its_row(tmp_path):
    row = {"question": "1+1?", "answer": "It is two.\n#### 2", "data_source": "made/up", "extra_info": {"split": "a"}}
    (tmp_path / "some.jsonl").write_text(json.dumps(row))
    (problem,) = load_problems(str(tmp_path / "some.jsonl"))
    (tmp_path / "chosen.jsonl").write_text(json.dumps(to_row({**problem, "pass_rate": 0.25})))
    (again,) = load_problems(str(tmp_path / "chosen.jsonl"))
    assert (again["id"], again["problem"], again["answer"]) == (problem["id"], "1+1?", "2")
    # A reward reads the same columns before and after `prepare`.
    assert row.items() <= again["columns"].items()


def test_conversations_that_end_alike_are_no_duplicates():
    def row(name: str, first: str, system: str) -> Problem:
        contents = {"system": system, "user": first, "assistant": "Yes.", "user ": "Go on."}
        prompt = [{"role": role.strip(), "content": content} for role, content in contents.items()]
        return {"id": name, "problem": "Go on.", "answer": "1", "prompt": prompt}

    rows = [row("a", "p?", "s"), row("b", "q?", "s"), row("c", "p?", "another")]
    assert [problem["id"] for problem in preparation.first_of_each(rows)] == ["a", "b"]

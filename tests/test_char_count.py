"""examples/char_count.py: its problems, its worked answers, and its files as the commands read them."""

import collections
import json

import numpy as np
import pytest

from reinforce_ada_jax import user_code
from reinforce_ada_jax.rewards import math_answer
from tests import forked
from tests.running import CONFIGS, ROOT, environment, load

EXAMPLE = user_code.run(ROOT / "examples" / "char_count.py")


def test_a_worked_answer_has_a_line_for_each_letter_and_ends_in_the_count():
    problem = EXAMPLE.Problem("n", "nine")
    assert problem.text == "How many n are there in word n-i-n-e?"
    assert problem.solution == "n = n.\ni != n.\nn = n.\ne != n.\n\\boxed{2} n in n-i-n-e."


def test_every_worked_answer_is_graded_right_and_the_next_number_wrong():
    problems, heldout = EXAMPLE.splits(40, 10, 4, 8, seed=0)
    for problem in (*problems, *heldout):
        assert math_answer.grade(problem.solution, str(problem.answer)).correct
        assert not math_answer.grade(problem.solution, str(problem.answer + 1)).correct


def test_lengths_and_counts_are_uniform_and_no_problem_is_in_both_files():
    rng = np.random.default_rng(0)
    drawn = [EXAMPLE.make_problem(rng, 4, 8) for _ in range(9000)]
    lengths = collections.Counter(len(problem.word) for problem in drawn)
    assert set(lengths) == {4, 5, 6, 7, 8} and all(abs(count - 1800) < 190 for count in lengths.values())  # 5 sigma
    counts = collections.Counter(problem.answer for problem in drawn if len(problem.word) == 4)
    assert set(counts) == {0, 1, 2, 3, 4}
    assert all(abs(count - lengths[4] / 5) < 5 * (lengths[4] * 0.16) ** 0.5 for count in counts.values())
    problems, heldout = EXAMPLE.splits(300, 60, 2, 3, seed=1)
    assert len({*problems, *heldout}) == 360


def test_the_command_writes_what_train_and_sft_read(tmp_path):
    output = tmp_path / "data"
    command = ["examples/char_count.py", f"--output={output}", "--min_letters=4"]
    command += ["--max_letters=8", "--problems=30", "--heldout=10", "--demonstrations=20"]
    assert forked.run(command, environment()).returncode == 0
    rows = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in output.iterdir()}
    assert {name: len(lines) for name, lines in rows.items()} == {
        "problems": 30, "demonstrations": 20, "heldout": 10, "validation": 10,
    }  # fmt: skip
    for problem, worked in zip(rows["problems"], rows["demonstrations"], strict=False):
        assert problem["problem"] == worked["prompt"]
        assert rf"\boxed{{{problem['answer']}}}" in worked["completion"]
    again = forked.run(command, environment())
    assert again.returncode == 2 and "exists already" in again.stderr


def test_words_without_letters_are_refused(tmp_path):
    command = ["examples/char_count.py", f"--output={tmp_path / 'data'}", "--min_letters=9"]
    ended = forked.run(command, environment())
    assert ended.returncode == 2 and "--min_letters=9 and --max_letters=5" in ended.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("strategy", ["grpo", "balance", "positive"])
def test_the_configuration_takes_each_of_the_three_methods(strategy):
    from reinforce_ada_jax import config as config_lib  # noqa: PLC0415

    config = load(CONFIGS / "smollm2_char_count.py").get_config()
    config.collection.strategy = strategy
    assert config_lib.resolve(config).data.prompts == "runs/smollm2/data/problems.jsonl"

"""The two examples of docs/how_to/environments.md: how they answer, and that their models and runs can be made."""

import json
import subprocess
import sys

import pytest

from reinforce_ada_jax.environments.episode import Episode
from tests import forked
from tests.running import ROOT, environment, load, reproducible

EXAMPLES = load(ROOT / "examples" / "environments.py")


@pytest.mark.parametrize(
    ("turns", "answers"),
    [
        (["5"], [1.0]),
        (["2", "7", " 5 "], ["higher", "lower", 1.0]),
        (["8"], [0.0]),  # no number of the game
        (["five"], [0.0]),
    ],
)
def test_the_game_answers_guesses(turns, answers):
    episode = Episode(EXAMPLES.Game, {"problem": "Guess.", "answer": "5"}, (0,))
    assert episode.messages == [{"role": "user", "content": "Guess."}]
    replies = [episode.answer(turn) for turn in turns]
    assert [reply if isinstance(reply, float) else reply[0]["content"] for reply in replies] == answers


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 + 30", "42"),
        ("12 - 30", "-18"),
        ("12 * 30", "error: ValueError: the expression must be two numbers with + or - between them"),
    ],
)
def test_the_calculator_answers_calls_and_then_grades(expression, result):
    episode = Episode(EXAMPLES.Calculator, {"problem": "12 + 30", "answer": "42"}, (0,))
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    reply = episode.answer(f"<tool_call>{call}</tool_call>")
    assert reply == [{"role": "tool", "name": "calculate", "content": result}]
    assert episode.answer(result) == float(result == "42")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["game", "calculator"])
def test_models_are_made_and_train(tmp_path, task):
    folder = tmp_path / task
    command = [sys.executable, "examples/environment_models.py", f"--task={task}", f"--output={folder}"]
    made = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    changes = {
        "model.path": folder / "model", "data.prompts": folder / "problems.jsonl", "iterations": 2,
        "evaluation.every": 2, "evaluation.benchmarks": f"('{folder}/heldout.jsonl',)",
    }  # fmt: skip
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    workdir = tmp_path / "run"
    command = ["-m", "reinforce_ada_jax.train", f"--config=configs/{task}.py", f"--workdir={workdir}", *flags]
    done = forked.run(command, environment())
    assert done.returncode == 0, done.stderr
    metrics = reproducible(workdir)
    assert len(metrics) == 2 and all(line["collection/verifier_failures"] == 0 for line in metrics)
    assert all(line["collection/turns_mean"] > 1 for line in metrics)

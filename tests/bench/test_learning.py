"""`bench.learning`: what is read from runs, at equal updates and at equal tokens."""

import pathlib

import numpy as np
import pytest
from absl import flags

from bench import command_line, learning, options
from reinforce_ada_jax.reporting.history import Accuracy, History


def history(tokens_per_update: int, last: float) -> History:
    """A run of 200 updates, a second each, whose held-out average rises in a straight line from 0 to `last`."""
    updates = np.arange(1.0, 201.0)
    tokens = tokens_per_update * updates
    evaluated = np.array([0.0, 100.0, 200.0])
    evaluation = Accuracy(evaluated, tokens_per_update * evaluated, evaluated / 200 * last, np.zeros(3))
    curves = {"heldout": {"pass": {100.0: {1: 0.0, 16: 0.1}, 200.0: {1: last, 16: 1.0}}}}
    metrics = {"collection/entropy": np.linspace(2.0, 0.01, 200)}
    return History(
        "run", 16, updates, tokens, updates, metrics, {"heldout": evaluation}, curves, {}, pathlib.Path("run")
    )


HISTORIES = {"grpo-4": [history(320, 0.4), history(320, 0.8)], "balance": [history(3350, 1.0), history(3350, 0.9)]}


def test_summary():
    found = learning.summary(learning.TASKS["cipher"], HISTORIES)
    # Half of the way: 0.2 and 0.4, whose standard error is 0.1; 12.706 times that with one degree of freedom.
    assert found["grpo-4"]["avg_at_100_updates"] == pytest.approx([0.3, 1.2706], abs=1e-4)
    assert found["grpo-4"]["tokens_at_100_updates"] == [32_000.0, 0.0]
    # 46,000 tokens are 143.75 of 200 updates; grpo ends at 64,000.
    assert found["grpo-4"]["avg_at_tokens"]["46000"][0] == pytest.approx(0.6 * 143.75 / 200)
    assert found["grpo-4"]["avg_at_tokens"]["70000"] is None and found["grpo-4"]["reached_threshold"] == 0
    # 0.9 is reached after 180 and 200 updates, a second each.
    assert found["balance"]["seconds_to_threshold"][0] == pytest.approx(190.0)
    assert found["balance"]["tokens_to_threshold"][0] == pytest.approx(190.0 * 3350)
    assert found["balance"]["pass_at_end"] == [1.0, 0.0]
    # 0.01 a update from 2 to 0.01: the last ten are 0.1 to 0.01.
    assert found["balance"]["entropy_at_end"] == pytest.approx([0.055, 0.0])
    row = learning.table(learning.TASKS["cipher"], found).splitlines()[2].split("|")
    row = [cell.strip() for cell in row[1:-1]]
    assert row[0] == "grpo-4" and row[3:5] == ["not reached", "0.300 ± 1.271"] and row[6] == "0 of the seeds"


@pytest.mark.parametrize(("count", "point"), [(5, 2.776), (10, 2.262), (11, 2.228)])
def test_the_interval_is_students(count, point):
    values = np.random.default_rng(0).normal(size=count).tolist()
    mean, half = learning.interval(values)
    assert mean == pytest.approx(np.mean(values))
    assert half == pytest.approx(point * np.std(values, ddof=1) / count**0.5, rel=1e-3)


def test_every_run_is_trained_and_drawn(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(learning, "train", lambda task, *run: trained.append(run))
    monkeypatch.setattr(learning, "load", lambda workdir: HISTORIES["balance"][0])
    values = options.define_flags(flags.FlagValues())
    values(
        [
            "bench",
            f"--output={tmp_path}",
            "--seeds=2",
            "--algorithms=ngu,dapo",
            "--updates=300",
            "--learning_rate=0.5",
        ]
    )
    result = command_line.measured(learning.run, values)
    runs = [(entry.name, seed, entry.updates, entry.learning_rate, workdir) for entry, seed, workdir in trained]
    assert sorted(runs) == [
        (name, seed, 300, 0.5, tmp_path / f"{name}-{seed}") for name in ("dapo", "ngu") for seed in (0, 1)
    ]
    assert list(result) == ["ngu", "dapo"]
    assert (tmp_path / "learning.md").read_text() == learning.table(learning.TASKS["cipher"], result) + "\n"
    assert (tmp_path / "learning.png").exists() and (tmp_path / "learning.svg").exists()


def test_an_unknown_algorithm(capsys):
    values = options.define_flags(flags.FlagValues())
    values(["bench", "--algorithms=ppo"])
    with pytest.raises(SystemExit, match="2"):
        command_line.measured(learning.run, values)
    assert "'ppo' is not one of exact-log, " in capsys.readouterr().err

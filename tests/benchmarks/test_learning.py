"""`benchmark learning`: what is read from runs, at equal updates and at equal tokens."""

import pathlib

import numpy as np
import pytest
from absl import flags

from reinforce_ada_jax import benchmark
from reinforce_ada_jax.benchmarks import learning
from reinforce_ada_jax.reporting.history import Accuracy, History


def history(tokens_per_update: int, last: float) -> History:
    """A run of 200 updates whose held-out average rises in a straight line from 0 to `last`."""
    updates = np.arange(1.0, 201.0)
    tokens = tokens_per_update * updates
    evaluated = np.array([0.0, 100.0, 200.0])
    evaluation = Accuracy(evaluated, tokens_per_update * evaluated, evaluated / 200 * last, np.zeros(3))
    metrics = {"collection/zero_signal_share": np.where(updates <= 25, 0.5, 0.9)}
    return History("run", 16, updates, tokens, updates, metrics, {"heldout": evaluation}, {}, {}, pathlib.Path("run"))


HISTORIES = {"grpo-4": [history(640, 0.4), history(640, 0.8)], "balance": [history(3350, 0.9)]}


def test_summary():
    found = learning.summary(HISTORIES)
    # Half of the way: 0.2 and 0.4, whose standard deviation over two seeds is 0.2 / sqrt(2).
    assert found["grpo-4"]["avg_at_100_updates"] == pytest.approx([0.3, 0.1414], abs=1e-4)
    assert found["grpo-4"]["tokens_at_100_updates"] == [64_000.0, 0.0]
    assert found["balance"]["zero_signal_1_25"] == [0.5, 0.0]
    # 335,000 tokens are 100 updates of balance; grpo ends at 128,000.
    assert found["balance"]["avg_at_tokens"]["335000"] == pytest.approx([0.45, 0.0])
    assert found["grpo-4"]["avg_at_tokens"]["64000"] == pytest.approx([0.3, 0.1414], abs=1e-4)
    assert found["grpo-4"]["avg_at_tokens"]["150000"] is None
    table = learning.table(found).splitlines()
    assert table[2] == "| grpo-4 | 0.300 ± 0.141 | 64,000 | 0.50 | 0.300 ± 0.141 | not reached | not reached |"


def test_every_run_is_trained_and_drawn(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(learning, "train", lambda entry, seed, workdir: trained.append((entry.name, seed, workdir)))
    monkeypatch.setattr(learning, "load", lambda workdir: HISTORIES["balance"][0])
    values = benchmark.define_flags(flags.FlagValues())
    values(["benchmark", f"--output={tmp_path}", "--seeds=2", "--algorithms=ngu,dapo"])
    result = benchmark.measured("learning", values)
    assert sorted(trained) == [(name, seed, tmp_path / f"{name}-{seed}") for name in ("dapo", "ngu") for seed in (0, 1)]
    assert list(result) == ["ngu", "dapo"]
    assert (tmp_path / "learning.md").read_text() == learning.table(result) + "\n"
    assert (tmp_path / "learning.png").exists() and (tmp_path / "learning.svg").exists()


def test_an_unknown_algorithm(capsys):
    values = benchmark.define_flags(flags.FlagValues())
    values(["benchmark", "--algorithms=ppo"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.measured("learning", values)
    assert "'ppo' is not one of grpo-4, grpo-8" in capsys.readouterr().err

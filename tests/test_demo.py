"""Claims about the built-in task, over three seeds: the tiny configuration as it is, about eight minutes."""

import subprocess
import sys

import numpy as np
import pytest

from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.reporting.comparison import compare
from reinforce_ada_jax.reporting.history import load
from tests.running import ROOT, environment

SEEDS = (0, 1, 2)
STRATEGIES = ("grpo", "balance")
RUNS = {strategy: f"--config.collection.strategy={strategy}" for strategy in STRATEGIES}
RUNS["overlap"] = "--config.collection.overlap=finish"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The work directory of each (name, seed)."""
    folder = tmp_path_factory.mktemp("demo")
    workdirs = {(name, seed): folder / f"{name}-{seed}" for name in RUNS for seed in SEEDS}
    for (name, seed), workdir in workdirs.items():
        flags = [f"--workdir={workdir}", f"--config.seed={seed}", RUNS[name]]
        subprocess.run(
            [sys.executable, "-m", "reinforce_ada_jax.train", "--config=configs/tiny.py", *flags],
            cwd=ROOT, env=environment(xla_flags=""), check=True, capture_output=True,
        )  # fmt: skip
    print("\n" + compare([load(workdir) for workdir in workdirs.values()], "heldout").text())
    return workdirs


@pytest.mark.slow
def test_balance_learns_more_from_an_update_than_grpo(runs):
    gains = []
    for seed in SEEDS:
        grpo, balance = (writers.read_metrics(runs[strategy, seed])[-1] for strategy in STRATEGIES)
        assert grpo["iteration"] == balance["iteration"] == 100
        gains.append(balance["evaluation/heldout/avg"] - grpo["evaluation/heldout/avg"])
    print(f"held-out avg@16 after 100 updates, balance - grpo: {np.round(gains, 3)}, mean {np.mean(gains):.3f}")
    assert np.mean(gains) >= 0.10


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "low", "high"), [("grpo", 0.6, 1.0), ("balance", 0.0, 0.45)])
def test_the_share_of_groups_without_a_signal_early_on(runs, strategy, low, high):
    early = [
        line["collection/zero_signal_share"]
        for seed in SEEDS
        for line in writers.read_metrics(runs[strategy, seed])[:25]
    ]
    print(f"{strategy}: zero-signal share of updates 1-25 {np.mean(early):.3f}")
    assert low < np.mean(early) < high


@pytest.mark.slow
def test_overlapping_iterations_fill_slots_and_learn_as_well(runs):
    def mean(name, key, lines=slice(None)):
        return np.mean([line[key] for seed in SEEDS for line in writers.read_metrics(runs[name, seed])[lines]])

    busy, reward = "collection/slot_utilisation", "reward/first_round"
    print({name: (round(mean(name, busy), 3), round(mean(name, reward), 3)) for name in ("balance", "overlap")})
    assert mean("overlap", busy) > mean("balance", busy) + 0.03
    assert mean("overlap", reward) > mean("balance", reward) - 0.02
    last = slice(-1, None)
    assert mean("overlap", "evaluation/heldout/avg", last) > mean("balance", "evaluation/heldout/avg", last) - 0.01

"""What the README claims of the demo, over three seeds: the tiny configuration as it is, about six minutes."""

import subprocess
import sys

import numpy as np
import pytest

from reinforce_ada_jax import metrics, plot
from tests.running import ROOT, environment

SEEDS = (0, 1, 2)
STRATEGIES = ("grpo", "balance")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The work directory of each (strategy, seed)."""
    folder = tmp_path_factory.mktemp("demo")
    workdirs = {(strategy, seed): folder / f"{strategy}-{seed}" for strategy in STRATEGIES for seed in SEEDS}
    for (strategy, seed), workdir in workdirs.items():
        flags = [f"--workdir={workdir}", f"--config.collection.strategy={strategy}", f"--config.seed={seed}"]
        subprocess.run(
            [sys.executable, "-m", "reinforce_ada_jax.train", "--config=configs/tiny.py", *flags],
            cwd=ROOT, env=environment(folder / "compiled"), check=True, capture_output=True,
        )  # fmt: skip
    print("\n" + plot.table([plot.load(workdir) for workdir in workdirs.values()], "heldout"))
    return workdirs


@pytest.mark.slow
def test_balance_learns_more_from_an_update_than_grpo(runs):
    gains = []
    for seed in SEEDS:
        grpo, balance = (metrics.read(runs[strategy, seed])[-1] for strategy in STRATEGIES)
        assert grpo["iteration"] == balance["iteration"] == 100
        gains.append(balance["evaluation/heldout/avg"] - grpo["evaluation/heldout/avg"])
    print(f"held-out avg@16 after 100 updates, balance - grpo: {np.round(gains, 3)}, mean {np.mean(gains):.3f}")
    assert np.mean(gains) >= 0.10


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "low", "high"), [("grpo", 0.6, 1.0), ("balance", 0.0, 0.45)])
def test_the_share_of_groups_without_a_signal_early_on(runs, strategy, low, high):
    early = [line["collection/zero_signal_share"] for seed in SEEDS for line in metrics.read(runs[strategy, seed])[:25]]
    print(f"{strategy}: zero-signal share of updates 1-25 {np.mean(early):.3f}")
    assert low < np.mean(early) < high

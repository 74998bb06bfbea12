"""Runs with `model.numerics` = "invariant": no gap, and the same training for any sizes of the engine."""

import json

import pytest

from reinforce_ada_jax.reporting import writers
from tests import forked
from tests.running import environment

TRAIN = """
import json, sys
import reinforce_ada_jax as ada
from tests.running import tiny
settings, runs = json.loads(sys.argv[1])
for workdir, changes in runs.items():
    ada.train.train(tiny(**settings | {"evaluation.benchmarks": ()} | changes), workdir)
"""
SETTINGS = {
    "model.numerics": "invariant", "iterations": 3, "evaluation.every": 0, "logging.trackers": "",
    "collection.prompts_per_iteration": 8, "learning.prompts_per_update": 8, "learning.warmup_updates": 0,
    "sampling.slots": 32,
}  # fmt: skip
RUNS = {
    "one": {},
    "other": {"sampling.slots": 5, "sampling.window": 3, "sampling.page_size": 4},
    "scored": {"learning.prompts_per_update": 4, "lora.rank": 4},  # two updates, after a scoring pass
}


@pytest.mark.slow
def test_runs_have_no_gap_and_do_not_depend_on_sizes(tmp_path):
    runs = {str(tmp_path / name): changes for name, changes in RUNS.items()}
    done = forked.run(["-c", TRAIN, json.dumps([SETTINGS, runs])], environment())
    assert done.returncode == 0, done.stderr
    metrics = {name: writers.read_metrics(tmp_path / name) for name in RUNS}
    for lines in metrics.values():
        assert [(line["update/logprob_gap"], line["update/logprob_gap_max"]) for line in lines] == [(0.0, 0.0)] * 3
        assert all(line["update/grad_norm"] > 0 for line in lines)
    for one, other in zip(metrics["one"], metrics["other"], strict=True):
        for name in ("reward/pool", "collection/tokens", "update/loss", "update/grad_norm", "update/entropy"):
            assert one[name] == other[name]

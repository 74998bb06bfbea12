"""Training on responses that were drawn in int8."""

import json

import numpy as np
import pytest

from reinforce_ada_jax.training.loop import Ending
from tests.running import tiny, train

SMALL = {
    "iterations": 2, "checkpoint.every": 0, "evaluation.every": 0, "logging.trackers": "",
    "collection.prompts_per_iteration": 8, "sampling.slots": 32, "sampling.weight_dtype": "int8",
    "sampling.kv_dtype": "int8",
}  # fmt: skip


# test_updates.py has what is said of the gap, tests/sampling/test_rollouts.py its size, and test_engine.py the copy.
@pytest.mark.slow
@pytest.mark.parametrize("prompts_per_update", [8, 4])
def test_the_gap_is_logged_and_does_not_stop_the_run(tmp_path, prompts_per_update):
    # With one update an iteration the gap is from the update's own program, with two from the scoring pass.
    config = tiny(**SMALL, **{"learning.prompts_per_update": prompts_per_update})
    assert train(config, tmp_path / "run").ending is Ending.FINISHED
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        # In float32 on a CPU 1e-4 would stop a run that draws from the learner's weights.
        assert 1e-3 < line["update/logprob_gap"] < 0.05 and line["update/logprob_gap_max"] > 1e-2
        assert np.isfinite(line["update/loss"]) and line["update/grad_norm"] > 0 and line["update/skipped"] == 0
        # 107,392 weights: a quarter of their 4 bytes, and scales, norms and biases.
        assert 107_392 < line["memory/reshard_bytes"] < 1.2 * 107_392

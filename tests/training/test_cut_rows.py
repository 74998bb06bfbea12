"""A run whose learner splits the tokens of each row over two devices is the run without that, to rounding."""

import json

import jax
import numpy as np
import pytest

from tests import running
from tests.running import reproducible, restored, tiny

SMALL = {
    "iterations": 2, "checkpoint.every": 0, "evaluation.every": 0, "logging.trackers": "", "logging.sampled_prompts": 8,
    "collection.prompts_per_iteration": 8, "learning.prompts_per_update": 4, "sampling.slots": 32,
    "learning.responses_per_row": 2,
}  # fmt: skip


def run(workdir, **changes):
    """(weights and moments, metrics, tokens of the responses) of a run in this process."""
    running.train(tiny(**SMALL | changes), workdir)
    files = sorted((workdir / "samples").iterdir())
    drawn = [json.loads(line)["response"] for file in files for line in file.read_text().splitlines()]
    return restored(workdir)[0], reproducible(workdir), drawn


@pytest.mark.slow  # tests/learning/test_context.py has the numbers of an update
def test_a_run_with_cut_rows_is_that_with_whole_ones(tmp_path):
    whole, cut = run(tmp_path / "whole"), run(tmp_path / "cut", **{"mesh.context": 2})
    assert whole[2] == cut[2] and len(whole[2]) > 100
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6), cut[0], whole[0])
    for ours, theirs in zip(cut[1], whole[1], strict=True):
        # The engine has two replicas, so its own metrics differ; so does rounding, which the gap measures.
        names = [name for name in theirs if name.startswith(("reward/", "update/")) and "gap" not in name]
        assert ours.keys() == theirs.keys() and {"update/loss", "reward/pool"} <= set(names)
        for name in names:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6, err_msg=name)

"""Runs with other layouts of rows, or rows split over devices, are the same runs, to rounding."""

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


def assert_same_run(ours, theirs):
    """The responses are the same; weights, moments and metrics are, to rounding."""
    assert ours[2] == theirs[2] and len(theirs[2]) > 100
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), ours[0], theirs[0])
    for line, expected in zip(ours[1], theirs[1], strict=True):
        # The engine may have two replicas, so its own metrics differ; so does rounding, which the gap measures.
        names = [name for name in expected if name.startswith(("reward/", "update/")) and "gap" not in name]
        assert line.keys() == expected.keys() and {"update/loss", "reward/pool"} <= set(names)
        for name in names:
            np.testing.assert_allclose(line[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow  # tests/learning/test_context.py has the numbers of an update
def test_a_run_with_cut_rows_is_that_with_whole_ones(tmp_path):
    whole, cut = run(tmp_path / "whole"), run(tmp_path / "cut", **{"mesh.context": 2})
    assert_same_run(cut, whole)


def test_a_run_whose_rows_share_prompts_is_that_with_a_row_for_each_response(tmp_path):
    # An entropy term needs all responses, so none is left out of either run.
    changes = {"learning.entropy_coefficient": 1e-3}
    alone = run(tmp_path / "alone", **{"learning.responses_per_row": 1} | changes)
    assert_same_run(run(tmp_path / "shared", **{"learning.responses_per_row": 16} | changes), alone)

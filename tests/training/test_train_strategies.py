"""Small runs by every strategy and with every term of the loss: what they write, and that they resume bit for bit."""

import shutil

import pytest

from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.training.loop import Ending
from reinforce_ada_jax.training.response_journal import FOLDER
from tests.running import ROOT, assert_same_state, reproducible, responses_kept, tiny, train

ITERATIONS = 3
FLAGS = {
    "iterations": ITERATIONS, "checkpoint.every": 2, "evaluation.every": 0, "logging.trackers": "",
    "collection.prompts_per_iteration": 8, "learning.prompts_per_update": 4, "sampling.slots": 32,
}  # fmt: skip
# Responses may be one update old by the time they are used.
NGU = {
    "collection.strategy": "ngu", "collection.max_draws": 16, "collection.overlap": "finish", "collection.max_age": 2,
    "learning.kl_coefficient": 0.01,
}  # fmt: skip
ESTIMATE = {"collection.strategy": "estimate", "collection.objective": "log"}
EXACT = {
    "collection.strategy": "positive", "collection.objective": "log", "collection.samples_per_round": 1,
    "collection.max_rounds": 16, "collection.control_variate": "noise", "reward.workers": 1,
    "reward.path": f"{ROOT}/examples/second_half.py:reward", "learning.entropy_coefficient": 1e-3,
    "learning.kl_coefficient": 0.01,
}  # fmt: skip
RUNS = {
    "value": ESTIMATE
    | {"estimator.kind": "value", "collection.baseline": "leave_one_out", "learning.micro_batches": 2},
    "dapo": {
        "collection.strategy": "dapo",
        "collection.normalize_by_std": True,
        "reward.overlong_tokens": 3,
        "learning.ratio": "sequence",
    },
    "ngu": NGU,
    "ngu without a limit": NGU | {"collection.max_draws": 0},
    # 32 draws in 24 slots, two tokens in a window: responses of the next iteration run when one ends.
    "in flight": {
        "collection.strategy": "grpo",
        "collection.overlap": "in_flight",
        "sampling.window": 2,
        "sampling.slots": 24,
        "model.numerics": "invariant",
    },
    "ema": ESTIMATE,
    "positive": {"collection.strategy": "positive", "collection.objective": "log", "collection.correction": "none"},
    # Single draws until the first success, some of them ahead of verdicts.
    "exact": EXACT,
}
# Of these prompts some come again, with another probability.
RUNS["proportional"] = RUNS["exact"] | {
    "collection.selection": "proportional", "collection.prompts_per_iteration": 64, "learning.prompts_per_update": 32,
}  # fmt: skip
# Estimates and the reference of "exact" and the partial rollouts of "in flight" resume in the same way;
# test_value_head.py has the state of "value", test_updates.py batches that grow, test_selection.py the state of
# `Proportional`. A run of test_rivals.py is killed in an update, and resumes with its selection.
SLOW = ("value", "ema", "positive", "dapo", "ngu", "proportional", "ngu without a limit")


def start(workdir, overrides):
    assert train(tiny(**FLAGS | overrides), workdir).ending is Ending.FINISHED


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS])
def test_a_run_resumes_bit_for_bit(tmp_path, name):
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    with responses_kept():
        start(unbroken, RUNS[name])
    # As after a kill in iteration 3: the checkpoint of iteration 2 is the newest, later lines are there. Of the value
    # head, whose features no file holds, the kill was in the updates: the responses of the iteration are kept.
    shutil.copytree(unbroken, resumed)
    shutil.rmtree(resumed / "checkpoints" / str(ITERATIONS))
    if name != "value":
        shutil.rmtree(resumed / FOLDER)
    start(resumed, RUNS[name])
    assert reproducible(resumed) == reproducible(unbroken)
    record = assert_same_state(resumed, unbroken)
    lines = writers.read_metrics(unbroken)
    if name != "ngu without a limit":  # whose batches grow
        assert [line["compile/count"] for line in lines[1:]] == [0] * (ITERATIONS - 1)
    if "learning.kl_coefficient" in RUNS[name]:
        assert min(line["update/kl"] for line in lines) >= 0 and lines[0]["update/kl"] < lines[-1]["update/kl"] < 0.1
    check(name, lines, record)


def check(name, lines, record):
    """Checks the metrics that only this run writes."""
    for line in lines:
        drawn, kept = line["collection/responses"], line["collection/kept"]
        if name in ("ema", "value"):
            # The budget: 8 draws a prompt on average, all of them kept.
            assert drawn == kept == 8 * 8
            assert 0 <= line["estimator/brier"] <= 1
            assert record["estimator"] is not None and ("estimator/loss" in line) == (name == "value")
        if name == "exact":
            # Of a prompt the first draw, the first correct one where that is another, and covered ones between them.
            assert 8 <= kept <= drawn and line["collection/rounds_mean"] == drawn / 8
            assert record["estimator"] is not None
        if name == "dapo":
            # Groups with a signal only, as many as prompts were asked for unless three batches more did not do.
            prompts = 8 + line["collection/replacements"]
            assert drawn == 4 * prompts and kept == 4 * round(prompts * (1 - line["collection/dropped_share"]))
            assert kept == 4 * 8 or prompts == 4 * 8
            assert line["reward/first_round"] <= line["reward/first_round_correct"]
        if name.startswith("ngu"):
            assert drawn % 4 == 0 and kept <= drawn
        if name == "positive":
            assert kept == 8 * 4 and drawn >= 8 * 8
    if name in ("ema", "value"):
        assert lines[0]["estimator/brier"] == 0.25  # 1/2 for everyone
    if name == "exact":
        # Nothing is known at first. Then draws between the first and the first correct one are rows as well.
        noise = [line["collection/score_noise_success"] for line in lines]
        assert lines[0]["collection/kept"] <= 16 < lines[1]["collection/kept"] and noise[0] == 0 < noise[1]
    if name == "proportional":  # equal probabilities where nothing is known, and other ones later
        assert lines[0]["selection/weight_max"] == pytest.approx(1, rel=1e-12)
        assert lines[-1]["selection/effective_share"] < 1 - 1e-9 and lines[-1]["selection/weight_max"] <= 4
        assert len(record["selection"]["pass_rates"]["counts"]) >= 64
    if name == "dapo":
        assert any(line["collection/replacements"] for line in lines)
    if name.startswith("ngu"):
        assert any(line["collection/ahead"] for line in lines)
    assert any(line["collection/in_flight"] for line in lines) == (name == "in flight")

"""`bench.split`: that the variants do the same work, and what the prediction adds up."""

import dataclasses

import pytest

from bench import models, split, split_plan, workloads
from bench.split_plan import Times
from reinforce_ada_jax.planning.plan import Statistics, packed_share
from reinforce_ada_jax.planning.roofline import chip_of
from reinforce_ada_jax.training.components import engine_options
from tests.bench.test_iteration import SMALL
from tests.bench.test_rollout import parsed
from tests.running import tiny

LENGTHS = workloads.constant(4)


@pytest.mark.slow  # it compiles the programs of three runs
def test_a_split_and_taking_turns_do_the_same_work(capsys):
    config = tiny(**SMALL)
    found = split.measure(config, repeat=1, lengths=LENGTHS, architecture=models.shaped("16x1"), iterations=1)
    for name in ("split", "turns", "together"):
        one = found[name]
        assert one["iterations_per_s"] == pytest.approx(1 / one["seconds"]) and len(one["all_seconds"]) == 1
        assert one["draw_s"] > 0 and one["update_s"] > 0
    assert found["ratio"] == found["split"]["iterations_per_s"] / found["turns"]["iterations_per_s"]
    # 4 prompts of one or two rounds of 4 draws, 4 tokens each; two updates.
    assert 16 <= found["collection/responses"] <= 32 and found["update/count"] == 2
    assert found["split"]["tokens"] == pytest.approx(4 * found["collection/responses"], rel=0.03)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 6 and said[0].startswith("0/1 split: ")


def test_the_parts_of_an_iteration_add_up():
    times = Times(draw=6.0, learn=3.0, hand_over=0.5)
    assert times.in_turn() == 9.5 and times.at_once() == 6.5
    assert dataclasses.replace(times, learn=8.0).at_once() == 8.5


def test_a_prediction():
    # Constant lengths and one round: on the whole slice each of 4 replicas has one slot for each of its 4 responses.
    config = tiny(**{
        "collection.strategy": "balance", "collection.samples_per_round": 4, "collection.max_rounds": 1,
        "collection.group_size": 4, "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 4,
        "sampling.slots": 4,
    })  # fmt: skip
    architecture, chip = models.shaped("128x4"), chip_of("v5e:2x2")
    options = engine_options(config, architecture, (0,))
    found = split_plan.predict_sizes(config, architecture, options, chip, 4, (1, 2), LENGTHS)
    together, half, quarter = found["together"], found["2+2"], found["1+3"]
    # With half of the replicas twice as many responses follow each other, with a quarter four times as many.
    assert half["draw"] == pytest.approx(2 * together["draw"], rel=0.1)
    assert quarter["draw"] == pytest.approx(4 * together["draw"], rel=0.1)
    # Of a model this small an update is bound by links: (n - 1) / n of its weights cross one, on n chips.
    assert half["learn"] == pytest.approx(together["learn"] * (1 / 2) / (3 / 4), rel=0.01)
    assert half["iteration"] == max(half["draw"], half["learn"]) + half["hand_over"]
    assert half["ratio"] == together["iteration"] / half["iteration"]


def test_no_response_fills_more_than_its_row():
    # Rows of 16 tokens, beside prompts of a mean length for models of their own size.
    config = tiny(**{"data.max_prompt_tokens": 8, "sampling.max_response_tokens": 8})
    assert packed_share(config, Statistics(split_plan.MEAN_PROMPT_TOKENS, 4.0, draws=0.0)) == 1.0


def test_what_is_refused():
    with pytest.raises(ValueError, match="--config is missing"):
        split.run(parsed())
    with pytest.raises(ValueError, match="v5e:1x1 has 1 chips, mesh.tensor is 2: neither a quarter nor half"):
        split_plan.predict(tiny(**{"mesh.tensor": 2}), parsed("--topology=v5e:1x1"))

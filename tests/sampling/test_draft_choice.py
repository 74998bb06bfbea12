"""The choice of drafts: chances, times and rows by literal numbers, in jax and in numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.sampling import draft_choice
from reinforce_ada_jax.sampling.state import empty_occupancy
from tests.sampling import tiny

# 512 x 8 layers: 33 million weights of 4 bytes, 8 KiB of keys and values for a token.
LARGE = from_hf(
    dict(
        model_type="qwen2", vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2,
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("guesses", "right", "expected"),
    [
        (0, 0, [256, 64, 16]),  # nothing known: 1/4
        (8, 8, [768, 576, 432]),  # 9/12
        (8, 0, [85, 7, 0]),  # 1/12
        (1, 0, [204, 40, 7]),  # 1/5
    ],
)
def test_chances_follow_from_counts(guesses, right, expected):
    counts = np.array([[guesses, right]], np.int32)
    assert draft_choice.chances(jnp.asarray(counts), 3).tolist() == [expected]


def test_old_guesses_count_half():
    counts = np.array([[63, 5], [64, 9], [70, 70]], np.int32)
    assert draft_choice.recent(counts).tolist() == [[63, 5], [32, 4], [35, 35]]


HALF, TENTH, SURE = [512, 256, 128], [102, 10, 0], [921, 828, 744]


@pytest.mark.parametrize(
    ("chance", "position", "sizes", "row_time", "token_time", "expected", "rows"),
    [
        # Two tokens in 1 + 2/12 = 1.17, or 2 + 1 + 1/2 + 1/4 = 3.75 in 1 + 8/12 = 1.67.
        ([HALF, HALF], [0, 0], (1, 2, 8), 1 / 12, 0, [3, 3], 8),
        # At most 2.2 tokens in 1.67, which is less than 2 in 1.17; a third size for one guess: 2.1 in 1.25, 1.68.
        ([TENTH, TENTH], [0, 0], (1, 2, 8), 1 / 12, 0, [0, 0], 2),
        ([TENTH, TENTH], [0, 0], (1, 2, 3, 8), 1 / 12, 0, [0, 0], 2),
        ([TENTH, TENTH], [0, 0], (1, 2, 3, 8), 1 / 32, 0, [1, 0], 3),  # 2.1 in 1.094 is 1.92; 2 in 1.0625 is 1.88
        # The rows of the step are there in any case: even one chance in a hundred is taken.
        ([TENTH, None], [0, 0], (3,), 1 / 12, 0, [2, 0], 3),
        # Rows that cost nothing: all that can be right.
        ([HALF, TENTH], [0, 0], (2, 8), 0, 0, [3, 2], 8),
        # The most probable guesses get the rows: 0.9, 0.81 and 0.73 before 1/2.
        ([HALF, SURE], [0, 0], (5,), 1 / 12, 0, [0, 3], 5),
        ([HALF, SURE], [0, 0], (7,), 1 / 12, 0, [2, 3], 7),
        # Each row reads 1,000 tokens: one token in 1 + 1; with a guess 1.5 in 1 + 2; with a sure one 1.9.
        ([HALF, None], [999, 0], (2,), 0, 0.001, [0, 0], 2),
        ([SURE, None], [999, 0], (2,), 0, 0.001, [1, 0], 2),
        ([None, None], [0, 0], (1, 2), 1 / 12, 0, [0, 0], 1),  # nothing decodes
    ],
)
def test_a_step_verifies_what_makes_most_tokens_for_its_time(
    chance, position, sizes, row_time, token_time, expected, rows
):
    options = dataclasses.replace(tiny.OPTIONS, slots=2, drafts=3, row_time=row_time, token_time=token_time)
    active = jnp.asarray([each is not None for each in chance])
    slots = empty_occupancy(options).slots.replace(active=active, position=jnp.asarray(position))
    given = jnp.asarray([each or [0, 0, 0] for each in chance])
    found, size = draft_choice.choose(jnp.tile(active[:, None], (1, 3)), given, slots, options, sizes)
    assert (found.sum(1).tolist(), int(size)) == (expected, rows)
    assert found.tolist() == np.sort(found)[:, ::-1].tolist()  # the first guesses of each slot


@pytest.mark.parametrize(
    ("architecture", "platform", "slots", "drafts", "expected"),
    [
        (LARGE, "cpu", 2, None, (3, 8)),
        (LARGE, "cpu", 7, None, (3, 8)),
        (LARGE, "cpu", 8, None, (0, 0)),  # rows that cost as much as the weights
        (tiny.ARCHITECTURE, "cpu", 2, None, (0, 0)),  # in the caches
        (LARGE, "tpu", 2, None, (0, 0)),  # not measured
        (LARGE, "tpu", 2, 5, (5, 240)),
        (tiny.ARCHITECTURE, "cpu", 64, 1, (1, 8)),
        (LARGE, "cpu", 2, 0, (0, 0)),
    ],
)
def test_an_engine_guesses_where_that_pays(architecture, platform, slots, drafts, expected):
    options = dataclasses.replace(tiny.OPTIONS, slots=slots)
    found = draft_choice.with_drafts(options, architecture, drafts, platform)
    assert (found.drafts, found.draft_rows) == expected
    assert found.drafts or found == options  # the program is the same


def test_times_are_those_of_reading_the_weights():
    options = draft_choice.with_drafts(dataclasses.replace(tiny.OPTIONS, slots=2), LARGE, None, "cpu")
    assert options.row_time == 1 / 8
    # 8 layers x 2 x 2 heads x 64 numbers, of as many weights as the model has.
    assert options.token_time == 8 * 2 * 2 * 64 / LARGE.num_parameters


@pytest.mark.parametrize(
    ("slots", "tail", "expected"),
    [(2, (2, 4), (1, 2, 8)), (1, (2,), (1, 4)), (7, (2, 4, 16), (1, 3, 7, 8)), (64, (2, 16), (4, 32, 64))],
)
def test_drafts_add_at_most_one_size(slots, tail, expected):
    options = dataclasses.replace(tiny.OPTIONS, slots=slots, drafts=3, draft_rows=8, tail=tail)
    assert draft_choice.step_sizes(options) == expected

"""Rows that have a prompt once for its responses: the layout by hand, and that no result knows of it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from reinforce_ada_jax.config import CollectionConfig, Config, DataConfig, LearningConfig, SamplingConfig, replaced
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.packing import RowLayout, SharedPrompts, pack
from reinforce_ada_jax.learning.platform import micro_rows_on, row_layout
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.types import Response
from tests.learning.test_learner import gradient, learner, score, updated
from tests.policy import recording
from tests.policy.adapting import ALL, random_adapters

LIMITS = dict(max_prompt_tokens=7, max_response_tokens=12)
SHARING = RowLayout(per_row=8, tokens=38, shares_prompts=True)


def response(tokens, logprobs, segments=()):
    return Response("p", 0, np.array(tokens, np.int32), np.array(logprobs, np.float32), False, segments=segments)


def test_the_layout_of_a_row_with_two_prompts():
    first, second = np.array([5, 6, 7], np.int32), np.array([3], np.int32)
    examples = [
        Example(first, response([8], [-1.0]), 1.5),
        Example(second, response([4, 2], [-2.0, -2.5]), 0.5),
        Example(first.copy(), response([9, 2], [-0.1, -0.2]), -0.75),
    ]
    made = make_batch(examples, max_prompt_tokens=3, max_response_tokens=2, num_rows=2, layout=RowLayout(4, 10, True))
    # The prompt 5 6 without its last token, 7 9 2 and 7 8 after it, and 3 4 2, whose prompt has nothing to share.
    np.testing.assert_array_equal(made.tokens, [[5, 6, 7, 9, 2, 7, 8, 3, 4, 2], [0] * 10])
    np.testing.assert_array_equal(made.positions, [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2], [0] * 10])
    np.testing.assert_array_equal(made.segment_ids, [[-1, -1, 0, 0, 0, 1, 1, 2, 2, 2], [4] * 10])
    np.testing.assert_array_equal(made.shared_ids, [[-1, -1, -1, -1, -1, -1, -1, 2, 2, 2], [4] * 10])
    np.testing.assert_array_equal(made.response_positions[0], [3, 4, 6, 8, 9, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(made.response_length, [[2, 1, 2, 0], [0] * 4])
    np.testing.assert_array_equal(made.advantages[0, :5], np.float32([-0.75, -0.75, 1.5, 0.5, 0.5]))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("joined", [1, 2, 5])
def test_rows_hold_everything_once_and_as_many_as_rows_of_one_each(seed, joined):
    random = np.random.default_rng(seed)
    prompts = random.integers(1, 33, 20)
    numbers = random.integers(0, 20, 200)
    lengths = prompts[numbers] + random.integers(1, 33, 200)
    lengths[:20], prompts[numbers[:20]] = 64, 32  # some are at both limits
    lengths = np.maximum(lengths, prompts[numbers] + 1)
    shared = SharedPrompts(numbers, prompts[numbers] - 1)
    rows = pack(lengths.tolist(), 64 * joined, 16 * joined, shared)
    assert sorted(number for row in rows for number in row) == list(range(200))
    assert len(rows) <= -(-200 // joined)
    for row in rows:
        once = {numbers[index]: prompts[numbers[index]] - 1 for index in row}
        assert sum(lengths[row] - prompts[numbers[row]] + 1) + sum(once.values()) <= 64 * joined
    assert len(rows) < 0.8 * len(pack(lengths.tolist(), 64 * joined, 16 * joined))


def test_a_batch_has_room_for_the_longest_sequences():
    # Two of 40 tokens fit into 100, so 9 need 5 rows, and 6 in whole micro-batches of 3; alone they need 9.
    assert [RowLayout(16, 100).num_rows(9, 40, multiple) for multiple in (1, 3)] == [5, 6]
    assert [RowLayout().num_rows(9, 40, multiple) for multiple in (1, 2)] == [9, 10]
    assert RowLayout(16, 100).num_rows(1, 100, 1) == RowLayout().row_tokens(1) == 1


@functools.cache
def examples():
    """Four responses to one prompt, three to another, and one to a prompt of one token; one has two turns."""
    random = np.random.default_rng(0)
    made = []
    for before, lengths in ((5, (8, 1, 6, 3)), (7, (12, 2, 5)), (1, (4,))):
        prompt = random.integers(3, 96, before).astype(np.int32)
        for length in lengths:
            turns = (2, 1, 2) if length == 5 else ()
            tokens, logprobs = random.integers(3, 96, length), random.normal(-4, 1, length)
            made.append(Example(prompt, response(tokens, logprobs, turns), random.normal()))
    return made


def batches():
    """The examples in rows of their own, and in rows that share prompts, with the same old log-probabilities."""
    alone, shared = make_batch(examples(), **LIMITS), make_batch(examples(), **LIMITS, num_rows=8, layout=SHARING)
    return [rows.replace(old_logprobs=rows.behaviour_logprobs + 0.1 * rows.response_mask) for rows in (alone, shared)]


def by_token(rows, values):
    """Values of the response tokens, in the order of their log-probabilities, which differ."""
    return values[rows.response_mask][np.argsort(rows.behaviour_logprobs[rows.response_mask])]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "olmo2", "smollm3", "gemma3", "phi3"])
def test_scores_are_those_of_rows_of_their_own(family):
    architecture, params, _ = recording.golden(family)
    alone, shared = batches()
    assert (shared.tokens[:2] > 0).sum() < (alone.tokens > 0).sum() and not shared.tokens[2:].any()
    of = learner(architecture=architecture)
    ours, expected = (by_token(rows, score(of, rows, params)) for rows in (shared, alone))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def assert_same_gradient(state, expected):
    # By array: a single entry that is nearly 0 has the rounding of the terms that cancel in it.
    differences = jax.tree.map(
        lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), gradient(state), gradient(expected)
    )
    assert max(jax.tree.leaves(differences)) < 1e-5


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"entropy_coefficient": 0.1, "truncated_is_cap": 2.0}),
        ("olmo2", {"ratio": "sequence", "aggregation": "seq-mean-token-mean"}),
    ],
)
def test_gradients_and_metrics_are_those_of_rows_of_their_own(family, changes):
    architecture, params, _ = recording.golden(family)
    of = learner(architecture=architecture, **changes)
    (alone, metrics), (shared, metrics_of_shared) = (updated(of, rows, params) for rows in batches())
    assert_same_gradient(shared, alone)
    np.testing.assert_allclose(metrics_of_shared.loss, metrics.loss, rtol=1e-5)
    np.testing.assert_allclose(metrics_of_shared.entropy, metrics.entropy, rtol=1e-5)
    np.testing.assert_allclose(metrics_of_shared.grad_norm, metrics.grad_norm, rtol=1e-5)


def test_gradients_of_adapters_are_those_of_rows_of_their_own():
    architecture, params, _ = recording.golden("qwen2")
    of, adapters = learner(rank=ALL.rank), random_adapters(architecture)
    base = jax.device_put(params, transformer.param_shardings(architecture, of.mesh))
    (alone, _), (shared, _) = (updated(of, rows, adapters, base) for rows in batches())
    assert_same_gradient(shared, alone)


CONFIG = Config(
    data=DataConfig(max_prompt_tokens=48),
    sampling=SamplingConfig(max_response_tokens=48),
    collection=CollectionConfig(group_size=8),
    learning=LearningConfig(prompts_per_update=16),
)


@pytest.mark.parametrize(
    ("changes", "family", "axes", "expected", "micro_rows"),
    [
        # 96 tokens for a prompt and a response: five fit, and 128 responses take 26 rows. Four have 2,048 tokens:
        # of four rows there are seven micro-batches, with two empty rows, of three nine, with one.
        ({}, "qwen2", {}, RowLayout(80, 500, True), 3),
        ({"learning.micro_batches": 8}, "qwen2", {}, RowLayout(80, 500, True), 4),
        ({}, "qwen2", {"data": 8}, RowLayout(80, 500, True), 8),
        # A row is no longer than what a device has of a micro-batch: one response, or two.
        ({"learning.micro_batches": 128}, "qwen2", {}, RowLayout(16, 96, True), 1),
        ({"learning.prompts_per_update": 2}, "qwen2", {"data": 8}, RowLayout(32, 192, True), 8),
        ({"learning.responses_per_row": 65_536}, "qwen2", {}, RowLayout(500, 500, True), 3),
        ({"sampling.max_response_tokens": 600}, "qwen2", {}, RowLayout(16, 648, True), 2),
        ({}, "mistral_window", {}, RowLayout(80, 500, True), 3),
        ({}, "qwen3_moe", {}, RowLayout(80, 500), 3),
        ({}, "qwen2", {"context": 2}, RowLayout(16), 16),
        ({"learning.responses_per_row": 1}, "qwen2", {}, RowLayout(), 16),
        ({"learning.attention": "jnp"}, "qwen2", {}, RowLayout(16), 16),
        ({"model.numerics": "invariant"}, "qwen2", {}, RowLayout(16), 16),
    ],
)
def test_the_layout_goes_by_settings_and_model(changes, family, axes, expected, micro_rows):
    config = replaced(CONFIG, {"model.compute_dtype": "float32"} | changes)
    architecture = dataclasses.replace(recording.golden(family)[0], hidden_size=500)
    mesh = mesh_lib.make_mesh(**axes)
    assert row_layout(mesh, config, architecture) == expected
    assert micro_rows_on(mesh, config, architecture) == micro_rows


def test_activations_bound_the_rows():
    # SmolLM2-135M has 576 hidden numbers; a fifth of its layers more, and 512 MiB hold fewer tokens.
    config = replaced(CONFIG, {"model.compute_dtype": "float32"})
    sizes = dict(hidden_size=576, ffn_size=1536, num_heads=9, num_kv_heads=3, head_dim=64)
    small, large = (dataclasses.replace(recording.golden("llama")[0], num_layers=n, **sizes) for n in (30, 60))
    assert row_layout(mesh_lib.make_mesh(), config, small).tokens == 576
    assert 96 < row_layout(mesh_lib.make_mesh(), config, large).tokens < 400

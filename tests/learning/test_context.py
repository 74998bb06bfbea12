"""Rows whose tokens are split over devices: all numbers are those of whole rows on one device, to rounding."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reinforce_ada_jax.config import (
    CollectionConfig,
    Config,
    DataConfig,
    LearningConfig,
    LoraConfig,
    ModelConfig,
    SamplingConfig,
)
from reinforce_ada_jax.distributed.mesh import cut_rows, join_rows, make_mesh
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.types import Response
from tests.policy import recording
from tests.policy.adapting import ALL, random_adapters
from tests.policy.recording import replaying

PROMPT, RESPONSE, ROWS = 112, 400, 4  # rows of 512 tokens
# A step that is smooth in the gradient, and a first moment that is the gradient.
EXACT = dict(b1=0.0, clip_norm=1e9, epsilon=1e-3, learning_rate=1e-3, warmup_updates=0)


@functools.cache
def learner(family, axes=(), rank=0, per_row=5):
    config = Config(
        model=ModelConfig(compute_dtype="float32"),
        data=DataConfig(max_prompt_tokens=PROMPT),
        sampling=SamplingConfig(max_response_tokens=RESPONSE, temperature=0.7),
        collection=CollectionConfig(group_size=ROWS),
        learning=LearningConfig(
            prompts_per_update=1, micro_batches=1, responses_per_row=per_row, entropy_coefficient=0.1, **EXACT
        ),
        lora=LoraConfig(rank=rank, alpha=ALL.alpha),
    )
    return Learner(recording.golden(family)[0], config, make_mesh(**dict(axes)))


@functools.cache
def batch(per_row):
    """Four full or half-filled rows; with five responses to a row, whose edges are on no edge of a part."""
    rng = np.random.default_rng(0)
    if per_row == 1:
        lengths = [(112, 400), (30, 217), (100, 33), (1, 399)]
    else:
        lengths = [(before, after) for before in (3, 17, 41, 30) for after in (5, 150, 67, 31)]
    examples = [
        Example(
            rng.integers(3, 96, before).astype(np.int32),
            Response("p", 0, rng.integers(3, 96, after).astype(np.int32), rng.normal(-4.5, 0.5, after), False),
            advantage=rng.normal(),
        )
        for before, after in lengths
    ]  # fmt: skip
    limits = dict(max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE)
    return make_batch(examples, num_rows=ROWS, layout=RowLayout(per_row), **limits)


@functools.cache
def results(family, axes=(), rank=0, per_row=5):
    """(scores, gradient, metrics) of one update."""
    of, (architecture, params, _) = learner(family, axes, rank, per_row), recording.golden(family)
    # Copies: a state is donated.
    base = jax.device_put(params, transformer.param_shardings(architecture, of.mesh)) if rank else None
    trained = random_adapters(architecture) if rank else params
    trained = jax.device_put(jax.tree.map(np.array, trained), of.param_shardings)
    rows = batch(per_row)
    placed = of.put(replaying(architecture, rows) if architecture.num_experts else rows)
    scores = np.concatenate(of.score(of.policy(trained, base), placed))
    # With a version, as `UpdatePrograms.programs` lowers an update: tests of its collectives have the same program.
    state, metrics = of.update(of.init(trained), placed, base, np.int32(0))
    return scores, jax.device_get(optax.tree_utils.tree_get(state.optimizer, "mu")), jax.device_get(metrics)


def axes(**sizes):
    return tuple(sizes.items())


def assert_numbers_of_one_device(family, split, *more, tolerance):
    """The results of a split are those of one device; returns the scores."""
    (scores, gradient, metrics), (of_one, gradient_of_one, metrics_of_one) = (
        results(family, each, *more) for each in (split, ())
    )
    np.testing.assert_allclose(scores, of_one, rtol=tolerance, atol=tolerance)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), metrics, metrics_of_one)
    # By array: a single entry that is nearly 0 has the rounding of the terms that cancel in it.
    differences = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), gradient, gradient_of_one)
    assert all(difference < 1e-5 for difference in jax.tree.leaves(differences))
    assert metrics.grad_norm > 0.1
    return scores


@pytest.mark.parametrize(
    ("family", "split", "rank", "per_row"),
    [
        ("qwen2", axes(fsdp=2, context=2, tensor=2), ALL.rank, 5),
        # test_blocked_attention.py has parts of rows with windows of some layers and sinks.
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mistral_window", axes(context=8), 0, 1),
                ("qwen2", axes(fsdp=2, context=4), 0, 5),
                ("gemma3", axes(data=2, context=4), 0, 5),
                ("gpt_oss", axes(fsdp=2, context=2, tensor=2), 0, 5),
                ("qwen2", axes(context=2), 0, 5),
                ("qwen2", axes(context=8), 0, 1),
                ("llama", axes(data=2, context=4), 0, 5),
                ("gemma3", axes(context=4), 0, 5),
                ("qwen3_moe", axes(fsdp=2, context=2, tensor=2), 0, 5),
                ("olmo3", axes(context=4), 0, 5),
                ("olmoe", axes(fsdp=2, context=2), 0, 5),
                ("phi3", axes(context=4), 0, 5),
            )
        ),
        *(
            pytest.param(family, axes(fsdp=2, context=4), rank, per_row, marks=pytest.mark.slow)
            for family in ("qwen3", "mistral", "smollm3", "olmo2")
            for rank, per_row in ((0, 5), (ALL.rank, 1))
        ),
    ],
)
def test_parts_of_rows_give_the_numbers_of_whole_rows(family, split, rank, per_row):
    scores = assert_numbers_of_one_device(family, split, rank, per_row, tolerance=1e-5)
    assert np.abs(scores).max() > 4  # what is compared is far from 0


def test_rows_are_cut_part_by_part_and_joined_again():
    rows = jnp.arange(24).reshape(2, 12)
    cut = cut_rows(rows, 3)
    np.testing.assert_array_equal(
        cut, [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [16, 17, 18, 19], [8, 9, 10, 11], [20, 21, 22, 23]]
    )
    np.testing.assert_array_equal(join_rows(cut, 3), rows)


def compiled(split):
    """The program of a case above."""
    of, params = learner("mistral_window", split, per_row=1), recording.golden("mistral_window")[1]
    state = of.init(jax.device_put(jax.tree.map(np.array, params), of.param_shardings))
    return of.update.programs(state, of.put(batch(1)), None)["update"]().compile()


def test_activations_are_split_and_of_rows_keys_and_values_alone_pass_between_devices():
    whole, split = (compiled(each) for each in ((), axes(context=8)))
    ours, all_ = (program.memory_analysis().temp_size_in_bytes for program in (split, whole))
    assert ours < all_ / 3
    sent = re.compile(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)\(")
    sizes = {math.prod(map(int, filter(None, each.split(",")))) for each in sent.findall(split.as_text())}
    # Of four rows of 512 tokens: two key heads of eight numbers, where a hidden state has 32.
    assert max(sizes) == ROWS * 512 * 2 * 8

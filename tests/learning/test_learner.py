"""Updates and scores of a learner: naive gradients, micro-batches, padding, devices, experts and adapters."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from reinforce_ada_jax.config import (
    CollectionConfig,
    Config,
    LearningConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    SamplingConfig,
)
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.chain import num_live
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.loss import LossConfig, aggregate, clipped_policy_loss, denominators, kl_estimate
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.policy import experts, lora, transformer
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.types import Response
from tests import standins
from tests.compiled_collectives import by_loop
from tests.policy import recording
from tests.policy.adapting import ALL, random_adapters
from tests.policy.recording import replaying
from tests.sampling.test_routes import chosen

ARCHITECTURE, PARAMS, _ = recording.golden("qwen2")
TEMPERATURE = 0.7
# Very different lengths, so that a mean of means is far off.
PROMPT_LENGTHS, RESPONSE_LENGTHS = (1, 5, 3, 2, 5, 4, 1, 2), (1, 8, 1, 7, 2, 1, 8, 1)


def learner(
    micro_batches=1, mesh=(1, 1, 1), rank=0, in_program=0, gathers=False, architecture=ARCHITECTURE, **changes
) -> Learner:
    """A learner whose first moment after one update is the gradient, and whose step is smooth in it.

    A program has `in_program` micro-batches (0: as many as on this machine), and with `gathers` there is room for a
    copy of the layers' weights, as on TPUs.
    """
    exact = dict(b1=0.0, clip_norm=1e9, epsilon=1e-3, learning_rate=1e-3, warmup_updates=0)
    config = Config(
        model=ModelConfig(compute_dtype="float32"),
        sampling=SamplingConfig(temperature=TEMPERATURE),
        collection=CollectionConfig(group_size=4),  # of two prompts: eight rows a minibatch
        learning=LearningConfig(**{"prompts_per_update": 2, "micro_batches": micro_batches} | exact | changes),
        lora=LoraConfig(rank=rank, alpha=ALL.alpha),
    )
    return learner_of(config, mesh, in_program, gathers, architecture)


@functools.cache
def learner_of(config: Config, mesh, in_program: int, gathers: bool, architecture=ARCHITECTURE) -> Learner:
    """Equal settings, however they are given, have one learner."""
    with pytest.MonkeyPatch.context() as patch:
        standins.accelerator(patch, in_program=in_program, gathers=gathers)
        return Learner(architecture, config, mesh_lib.make_mesh(*mesh))


def fresh_state(of: Learner, params=PARAMS):
    """A state over copies, for it is donated; numpy makes them without a program for each shape."""
    return of.init(jax.device_put(jax.tree.map(np.array, params), of.param_shardings))


@functools.cache
def responses():
    rng = np.random.default_rng(0)
    return [
        Example(
            rng.integers(3, 96, before).astype(np.int32),
            Response("p", 0, rng.integers(3, 96, after).astype(np.int32), rng.normal(-4, 1, after), False),
            advantage=rng.normal(),
        )
        for before, after in zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)
    ]  # fmt: skip


@functools.cache
def batch(max_prompt_tokens=5, max_response_tokens=8):
    """Eight rows, old log-probabilities far enough from the present ones that some ratios are clipped."""
    rows = make_batch(responses(), max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens)
    scored = score(learner(), rows)
    noise = np.random.default_rng(1).normal(0, 0.3, (8, 8))
    old = np.zeros(scored.shape, np.float32)
    old[:, :8] = scored[:, :8] + noise * rows.response_mask[:, :8]
    return rows.replace(old_logprobs=old)


def score(of: Learner, rows, params=PARAMS):
    """Results of `score` on the host, row by row."""
    return np.concatenate(of.score(params, of.put(rows)))


# Numbers of rows without tokens, which must not be looked at.
SPOILED = {"advantages": 7.0, "behaviour_logprobs": -np.inf, "old_logprobs": np.nan}


def with_empty_rows(rows, num_rows, spoiled=SPOILED):
    """The batch with rows behind it that have no token, and the numbers `spoiled` in them."""
    empty = make_batch([], max_prompt_tokens=5, max_response_tokens=8, num_rows=num_rows - len(rows.tokens))
    empty = empty.replace(**{name: np.full_like(empty.old_logprobs, value) for name, value in spoiled.items()})
    if rows.reference_logprobs is not None:
        empty = empty.replace(reference_logprobs=empty.old_logprobs)
    return jax.tree.map(lambda *parts: np.concatenate(parts), rows, empty)


def updated(of: Learner, rows=None, params=PARAMS, base=None):
    """(state, metrics) after one update."""
    return of.update(fresh_state(of, params), of.put(batch() if rows is None else rows), base)


def gradient(state):
    return optax.tree_utils.tree_get(state.optimizer, "mu")


def shifted(rows):
    """[B, T - 1] arrays over "token t predicts t + 1", filled row by row: another layout than the learner's."""
    size, length = rows.tokens.shape
    names = ("old", "behaviour", "advantage", "mask", "reference")
    arrays = {name: np.zeros((size, length - 1), np.float32) for name in names}
    for row in range(size):
        first, count = PROMPT_LENGTHS[row] - 1, rows.response_length[row, 0]
        arrays["old"][row, first : first + count] = rows.old_logprobs[row, :count]
        arrays["behaviour"][row, first : first + count] = rows.behaviour_logprobs[row, :count]
        arrays["advantage"][row, first : first + count] = rows.advantages[row, :count]
        arrays["mask"][row, first : first + count] = 1
        if rows.reference_logprobs is not None:
            arrays["reference"][row, first : first + count] = rows.reference_logprobs[row, :count]
    return arrays


DEFAULTS = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=10.0, aggregation="token-mean")


@jax.jit
def statistics_and_slope(params, tokens, along):
    """((log-probabilities, entropies) by whole logits, the gradient of their sum weighted by `along`)."""

    def statistics(params):
        distribution = jax.nn.log_softmax(transformer.logits(ARCHITECTURE, params, tokens)[:, :-1] / TEMPERATURE)
        logprobs = jnp.take_along_axis(distribution, tokens[:, 1:, None], axis=-1)[..., 0]
        return logprobs, -jnp.sum(jnp.exp(distribution) * distribution, axis=-1)

    found, slope = jax.vjp(statistics, params)
    return found, slope(along)[0]


@functools.partial(jax.jit, static_argnames="config")
def naive_loss(statistics, arrays, config):
    """((loss, metrics), gradient to the log-probabilities and entropies) of the whole minibatch."""

    def loss(statistics):
        logprobs, entropy = statistics
        value, metrics = clipped_policy_loss(
            logprobs, arrays["old"], arrays["advantage"], arrays["mask"], clip_low=config.clip_low,
            clip_high=config.clip_high, dual_clip=config.dual_clip, aggregation=config.aggregation,
            behaviour_logprobs=arrays["behaviour"], truncated_is_cap=config.truncated_is_cap, ratio=config.ratio,
        )  # fmt: skip
        mean = functools.partial(aggregate, mask=arrays["mask"], counts=denominators(arrays["mask"]))
        value = value - config.entropy_coefficient * mean(entropy, aggregation=config.aggregation)
        metrics |= {"entropy": mean(entropy, aggregation="token-mean")}
        if config.kl_coefficient:
            kl = kl_estimate(logprobs, arrays["reference"], config.kl_kind)
            value = value + config.kl_coefficient * mean(kl, aggregation=config.aggregation)
            metrics |= {"kl": mean(kl, aggregation="token-mean")}
        return value, metrics | {"loss": value}

    return jax.value_and_grad(loss, has_aux=True)(statistics)


def naive(params, tokens, arrays, **options):
    """((loss, metrics), gradient) by whole logits and the whole minibatch's loss; all options share the model's."""
    nothing = np.zeros_like(arrays["mask"])
    statistics, _ = statistics_and_slope(params, tokens, (nothing, nothing))
    found, along = naive_loss(statistics, arrays, dataclasses.replace(DEFAULTS, **options))
    return found, statistics_and_slope(params, tokens, along)[1]


def norm(tree):
    """Norm of all leaves together."""
    return np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in map(np.asarray, jax.tree.leaves(tree))))


def subtracted(left, right):
    """left - right, on the host."""
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), left, right)


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


def assert_trees_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_score_is_the_full_forward_pass():
    rows = batch()
    logits = jax.jit(functools.partial(transformer.logits, ARCHITECTURE))
    distribution = np.asarray(jax.jit(jax.nn.log_softmax)(logits(PARAMS, jnp.asarray(rows.tokens)) / TEMPERATURE))
    scored = score(learner(), rows)
    for row, (before, after) in enumerate(zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)):
        at = np.arange(before, before + after)
        np.testing.assert_allclose(
            scored[row, :after], distribution[row, at - 1, rows.tokens[row, at]], rtol=1e-5, atol=1e-5
        )
        assert not scored[row, after:].any()


# Another aggregation, the importance weight and the entropy bonus, in four micro-batches.
EVERYTHING = {"aggregation": "seq-mean-token-mean", "truncated_is_cap": 1.2, "entropy_coefficient": 0.01}


UPDATES = {
    "plain": (1, {}),
    "everything": (4, EVERYTHING),
    "sequence, k3": (4, {
        "aggregation": "seq-mean-token-sum", "ratio": "sequence", "clip_low": 0.05, "clip_high": 0.05,
        "kl_coefficient": 0.3, "kl_kind": "k3",
    }),
    "k2": (4, {"kl_coefficient": 0.3, "kl_kind": "k2"}),
    "k3": (1, {"kl_coefficient": 0.3, "kl_kind": "k3"}),
}  # fmt: skip
# test_loss.py has the estimates of KL with their slopes, and the ratio of sequences.
SLOW = ("sequence, k3", "k2", "k3")


def with_reference(rows):
    """The batch with a reference whose log-probabilities are elsewhere."""
    noise = np.random.default_rng(2).normal(0, 0.5, rows.old_logprobs.shape).astype(np.float32)
    return rows.replace(reference_logprobs=rows.old_logprobs + noise)


@pytest.mark.parametrize(
    ("micro_batches", "options"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in UPDATES.items()],
)
def test_the_update_follows_the_naive_gradient(micro_batches, options):
    rows = with_reference(batch()) if "kl_kind" in options else batch()
    state, metrics = updated(learner(micro_batches, **options), rows)
    (_, expected), slope = naive(PARAMS, jnp.asarray(rows.tokens), shifted(rows), **options)
    assert expected["clip_fraction"] > 0.1
    assert_trees_close(gradient(state), slope, rtol=1e-5, atol=1e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(slope))
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(metrics, name), value, rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(metrics.grad_norm, norm(slope), rtol=1e-5)
    assert metrics.finite and state.updates == 1


def test_regularization_reaches_the_loss():
    rows, coefficients = with_reference(batch()), {"entropy_coefficient": 0.3, "kl_coefficient": 0.3}
    (none, _), (zero, _) = updated(learner()), updated(
        learner(**coefficients), rows.replace(regularization=np.zeros_like(rows.advantages))
    )  # fmt: skip
    assert_trees_close(gradient(zero), gradient(none), rtol=1e-5, atol=1e-6)


def test_eight_micro_batches_are_one():
    (one, one_metrics), (eight, eight_metrics) = updated(learner()), updated(learner(8))
    assert_trees_close(gradient(eight), gradient(one), rtol=1e-5, atol=1e-6)
    assert_trees_close(eight.params, one.params, rtol=1e-6, atol=1e-6)
    assert_trees_close(eight_metrics, one_metrics, rtol=1e-5, atol=1e-6)


def test_a_mean_over_micro_batches_would_be_something_else():
    # The known bug that the test above is there for: each micro-batch divided by its own token count.
    rows = batch()
    arrays, tokens = shifted(rows), np.asarray(rows.tokens)
    right = naive(PARAMS, tokens, arrays)[1]
    own = [arrays["mask"] * (np.arange(8) == row)[:, None] for row in range(8)]
    alone = [naive(PARAMS, tokens, arrays | {"mask": mask})[1] for mask in own]
    wrong = jax.tree.map(lambda *slopes: np.mean(slopes, axis=0), *alone)
    assert norm(subtracted(wrong, right)) > 0.5 * norm(right)


def test_the_learning_rate_falls_over_the_updates_of_the_run():
    """The steps of Adam without memory are the learning rate: all of it in the first of two updates, then half."""
    of = learner_of(
        Config(
            iterations=2, collection=CollectionConfig(group_size=4, prompts_per_iteration=2),
            model=ModelConfig(compute_dtype="float32"), sampling=SamplingConfig(temperature=TEMPERATURE),
            learning=LearningConfig(
                prompts_per_update=2, micro_batches=4, schedule="linear", learning_rate=1e-3, warmup_updates=0, b1=0.0,
                b2=0.0, epsilon=1e-12, clip_norm=1e9,
            ),
        ),
        (1, 1, 1), 0, False,
    )  # fmt: skip
    state, before = fresh_state(of), PARAMS
    for rate in (1e-3, 0.5e-3):
        state, _ = of.update(state, of.put(batch()))
        after = jax.tree.map(np.array, state.params)
        steps = [np.abs(leaf).max() for leaf in jax.tree.leaves(subtracted(after, before))]
        np.testing.assert_allclose(steps, rate, rtol=1e-3)
        before = after


def test_score_keeps_the_rows_in_order():
    assert learner(8).score(PARAMS, learner(8).put(batch())).shape == (8, 1, 8)
    np.testing.assert_allclose(score(learner(8), batch()), score(learner(), batch()), rtol=1e-5)


def test_what_stands_in_the_padding_is_irrelevant():
    rows = batch()
    beyond = ~rows.response_mask
    garbage = rows.replace(
        tokens=np.where(rows.segment_ids == 0, rows.tokens, 95).astype(np.int32),
        advantages=np.where(beyond, np.float32(np.nan), rows.advantages),
        old_logprobs=np.where(beyond, np.float32(np.nan), rows.old_logprobs),
        behaviour_logprobs=np.where(beyond, np.float32(-np.inf), rows.behaviour_logprobs),
    )
    assert (garbage.tokens != rows.tokens).any()
    assert_trees_equal(updated(learner(), garbage), updated(learner()))


def test_mask_equals_slice():
    (state, metrics), (padded, padded_metrics) = updated(learner()), updated(learner(), batch(7, 12))
    assert_trees_close(gradient(padded), gradient(state), rtol=1e-5, atol=1e-6)
    assert_trees_close(padded_metrics, metrics, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # tests below have micro-batches that are empty or part empty
@pytest.mark.parametrize("micro_batches", [1, 8])
def test_empty_rows_change_nothing(micro_batches):
    # 40 more rows: 5 or 40 micro-batches without a token.
    padded = with_empty_rows(batch(), 48)
    state, metrics = updated(learner(micro_batches))
    padded_state, padded_metrics = updated(learner(micro_batches), padded)
    assert padded_metrics.finite
    assert_trees_close(gradient(padded_state), gradient(state), rtol=1e-6, atol=1e-6)
    assert_trees_close(padded_state.params, state.params, rtol=1e-6, atol=1e-6)
    assert_trees_close(padded_metrics, metrics, rtol=1e-6, atol=1e-6)
    scored = score(learner(micro_batches), padded)
    np.testing.assert_allclose(scored[:8], score(learner(micro_batches), batch()), rtol=1e-6)
    assert not scored[8:].any()


def test_a_micro_batch_may_be_part_empty():
    # Fourteen rows in two micro-batches of eight: the last two count nowhere.
    six = jax.tree.map(lambda x: x[:6], batch())
    fourteen = jax.tree.map(lambda *parts: np.concatenate(parts), batch(), six)
    state, metrics = updated(learner(), with_empty_rows(fourteen, 48))
    # Means over the 29 tokens of all eight and over the 20 of the first six.
    arrays, tokens = shifted(batch()), jnp.asarray(batch().tokens)
    first = arrays | {"mask": arrays["mask"] * (np.arange(8) < 6)[:, None]}
    parts = [naive(PARAMS, tokens, each) for each in (arrays, first)]

    def mean(eight, six):
        return (29 * np.asarray(eight) + 20 * np.asarray(six)) / 49

    assert_trees_close(gradient(state), jax.tree.map(mean, parts[0][1], parts[1][1]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(metrics.loss, mean(*(part[0][1]["loss"] for part in parts)), rtol=1e-5, atol=1e-5)


def test_empty_micro_batches_are_not_computed():
    # A weight that is nan makes every micro-batch that is computed nan, whatever its mask: `score` would hide that,
    # the gradient's sum cannot. Without a token there is nothing to compute, and the gradient is 0.
    poisoned = PARAMS | {"final_norm": PARAMS["final_norm"].at[0].set(jnp.nan)}
    nothing = with_empty_rows(jax.tree.map(lambda x: x[:0], batch()), 48)
    state, metrics = updated(learner(), nothing, poisoned)
    assert metrics.finite and metrics.grad_norm == 0 and metrics.loss == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient(state)))
    # One row makes one micro-batch of eight, and that one is computed.
    one = with_empty_rows(jax.tree.map(lambda x: x[:1], batch()), 48)
    assert not updated(learner(), one, poisoned)[1].finite


@pytest.mark.parametrize(
    ("lengths", "expected"), [((1, 1, 1, 1), 2), ((1, 1, 1, 0), 2), ((1, 1, 0, 0), 1), ((0,) * 4, 0)]
)
def test_live_micro_batches_are_counted(lengths, expected):
    rows = make_batch([], max_prompt_tokens=1, max_response_tokens=1, num_rows=4)
    two = jax.tree.map(
        lambda x: x.reshape(2, 2, *x.shape[1:]), rows.replace(response_length=np.array(lengths)[:, None])
    )
    assert num_live(two) == expected


def test_another_number_of_live_rows_compiles_nothing():
    # One, three and two micro-batches of eight.
    of, state = learner(), fresh_state(learner())
    many = jax.tree.map(lambda x: np.concatenate([x] * 3), batch())
    rows = [with_empty_rows(jax.tree.map(lambda x, size=size: x[:size], many), 48) for size in (3, 20, 9)]
    compiles, counts = CompileCounter(), []
    for live in rows:
        placed = of.put(live)
        placed = placed.replace(old_logprobs=of.score(state.params, placed))
        state, _ = of.update(state, placed)
        counts.append(compiles.since_last())
    assert counts[1:] == [0, 0]
    jax.jit(lambda x: x * 3 + 5)(1.0)
    assert compiles.since_last() == 1  # the counter counts


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_a_batch_is_cut_into_whole_micro_batches(rows):
    some = make_batch([], max_prompt_tokens=1, max_response_tokens=1, num_rows=rows)
    with pytest.raises(ValueError, match=f"a batch of {rows} rows cannot be cut into micro-batches of 4:"):
        learner(2).put(some)


def test_micro_batches_are_consecutive_rows():
    placed = learner(2).put(batch())
    assert learner(2).micro_rows == 4
    np.testing.assert_array_equal(placed.response_length, np.reshape(RESPONSE_LENGTHS, (2, 4, 1)))
    assert placed.tokens.shape == (2, 4, 13) and placed.reference_logprobs is None


def test_rows_are_split_over_data_and_fsdp():
    of = learner(2, (2, 2, 2))
    placed = of.put(batch())
    for scored in (placed.old_logprobs, of.score(fresh_state(of).params, placed)):
        assert {shard.data.shape for shard in scored.addressable_shards} == {(2, 1, 8)}


def test_no_advantage_no_change():
    state, metrics = updated(learner(), batch().replace(advantages=np.zeros_like(batch().advantages)))
    assert metrics.grad_norm == 0 and metrics.loss == 0
    assert_trees_equal(state.params, PARAMS)
    assert state.updates == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_advantage_that_is_not_finite_leaves_the_state_as_it_was(value):
    examples = list(responses())
    examples[3] = examples[3]._replace(advantage=value)
    rows = make_batch(examples, max_prompt_tokens=5, max_response_tokens=8)
    state, metrics = updated(learner(), batch().replace(advantages=rows.advantages))
    assert not metrics.finite
    assert_trees_equal(state, fresh_state(learner()))
    assert state.updates == 0


def test_a_weight_that_is_not_finite_leaves_the_state_as_it_was():
    poisoned = PARAMS | {"final_norm": PARAMS["final_norm"].at[0].set(jnp.nan)}
    state, metrics = updated(learner(), params=poisoned)
    assert not metrics.finite
    assert_trees_equal(state, fresh_state(learner(), poisoned))


@pytest.mark.slow  # test_weights_gathered_once_give_the_same_update compares eight devices with one
@pytest.mark.parametrize("micro_batches, mesh", [(2, (2, 2, 2)), (2, (1, 4, 2)), (1, (1, 8, 1)), (1, (2, 4, 1))])
def test_eight_devices_are_one(micro_batches, mesh):
    assert_eight_devices_are_one(updated(learner(micro_batches, mesh)))


def assert_eight_devices_are_one(of_eight):
    (one, one_metrics), (eight, eight_metrics) = updated(learner()), of_eight
    # Nothing but norms, biases and the like is whole on every device.
    whole = [x.size for x in jax.tree.leaves(eight.params) if x.sharding.is_fully_replicated]
    assert sum(whole) < 0.05 * sum(x.size for x in jax.tree.leaves(eight.params))
    assert_trees_close(gradient(eight), gradient(one), rtol=1e-5, atol=1e-5)
    assert_trees_close(eight.params, one.params, rtol=1e-5, atol=1e-5)
    assert_trees_close(eight_metrics, one_metrics, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "family, mesh, gathers",
    [
        # test_weights_gathered_once_give_the_same_update has the gathers of a model without experts.
        pytest.param("qwen3_moe", (2, 2, 2), True, marks=pytest.mark.slow),
        # test_experts.py has the gradients of experts on five devices.
        pytest.param("gpt_oss", (2, 2, 2), False, marks=pytest.mark.slow),
        pytest.param("olmoe", (2, 2, 1), False, marks=pytest.mark.slow),  # five experts, which two can't share
        *(pytest.param("qwen3_moe", mesh, False, marks=pytest.mark.slow) for mesh in ((1, 2, 1), (1, 1, 2))),
    ],
)
def test_experts_on_several_devices_are_those_of_one(family, mesh, gathers):
    architecture, params, _ = recording.golden(family)
    alone, spread = learner(architecture=architecture), learner(2, mesh, gathers=gathers, architecture=architecture)
    rows = replaying(architecture, batch())
    rows = rows.replace(old_logprobs=score(alone, rows, params))
    (one, one_metrics), (several, metrics) = updated(alone, rows, params), updated(spread, rows, params)
    assert_trees_close(gradient(several), gradient(one), rtol=1e-5, atol=1e-5)
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradient(one)))
    assert_trees_close(several.params, one.params, rtol=1e-5, atol=1e-5)
    assert_trees_close(metrics, one_metrics, rtol=1e-5, atol=1e-5)


def test_the_record_decides_which_experts_score_a_token():
    architecture, params, _ = recording.golden("qwen3_moe")
    of, rows = learner(architecture=architecture), replaying(architecture, batch())
    own = score(of, rows.replace(experts=np.asarray(chosen(architecture, params, rows.tokens))), params)
    np.testing.assert_allclose(own, score(of, batch(), params), atol=1e-6)
    nothing = score(of, rows.replace(experts=experts.empty_record(architecture, *rows.tokens.shape)), params)
    np.testing.assert_allclose(nothing, own, atol=1e-6)
    assert np.abs(score(of, rows, params) - own).max() > 0.01


@pytest.mark.parametrize(
    ("family", "per_row", "num_rows"), [pytest.param("olmoe", 1, 16, marks=pytest.mark.slow), ("gpt_oss", 3, 8)]
)
def test_the_load_of_experts_is_that_of_sequences_without_padding(family, per_row, num_rows):
    architecture, params, _ = recording.golden(family)
    # Sequences of 2, 4 and 9 tokens: those without padding have a program for each length.
    examples = 3 * [each for each in responses() if len(each.prompt) + len(each.response.tokens) in (2, 4, 9)]
    rows = make_batch(
        examples, max_prompt_tokens=5, max_response_tokens=8, num_rows=num_rows, layout=RowLayout(per_row)
    )
    assert (rows.segment_ids == rows.max_segments).any()
    of = learner(2, responses_per_row=per_row, architecture=architecture)
    _, metrics = updated(of, rows.replace(old_logprobs=rows.behaviour_logprobs), params)
    model, total = transformer.merge(architecture, params), np.zeros((2, architecture.num_experts))

    @jax.jit
    def load_of(tokens):
        routing, execution = experts.Routing(counted=jnp.ones(tokens.shape, bool)), transformer.Execution(jnp.float32)
        return transformer.hidden_states_and_load(model, tokens, execution=execution, routing=routing)[1]

    for row, segment in itertools.product(range(len(rows.tokens)), range(rows.max_segments)):
        tokens = rows.tokens[row][rows.segment_ids[row] == segment][None]
        if tokens.size:
            load = load_of(tokens)
            assert load.sum() == 2 * architecture.experts_per_token * tokens.size
            total += np.asarray(load)
    largest = (total.max(axis=1) / total.mean(axis=1)).mean()
    assert metrics.expert_load_max == pytest.approx(largest, rel=1e-6) and largest > 1.1
    assert metrics.expert_idle_share == (total == 0).mean()


def test_a_model_without_experts_has_no_load():
    _, metrics = updated(learner())
    assert metrics.expert_load_max is None and metrics.expert_idle_share is None


def test_weights_gathered_once_give_the_same_update():
    results, in_layers = [], []
    for gathers in (False, True):
        spread = learner(2, (2, 2, 2), gathers=gathers)
        arguments = fresh_state(spread), spread.put(batch()), None
        program = spread.update.programs(*arguments)["update"]().compile()
        results.append(program(*arguments, np.int32(0)))
        # The loop over layers is inside the loop over micro-batches.
        found = by_loop(program.as_text()).items()
        in_layers.append(sum(kind == "all-gather" for nesting, kinds in found if len(nesting) == 2 for kind in kinds))
    assert_eight_devices_are_one(results[0])
    assert_trees_close(*results, rtol=1e-5, atol=1e-6)
    assert in_layers[0] > 0 and in_layers[1] == 0
    on_one = learner(gathers=True)
    assert not on_one.gathers_once and not learner(mesh=(1, 8, 1), rank=4, gathers=True).gathers_once


def test_moments_live_where_their_weights_live():
    spread = learner(2, (2, 2, 2))
    # With a version, as `UpdatePrograms.programs` lowers an update: it is the program of the test above.
    state, _ = spread.update(fresh_state(spread), spread.put(batch()), None, np.int32(0))
    moments = [optax.tree_utils.tree_get(state.optimizer, name) for name in ("mu", "nu")]
    for tree in (state.params, *moments):
        same = jax.tree.map(lambda x, layout: x.sharding.is_equivalent_to(layout, x.ndim), tree, spread.param_shardings)
        assert all(jax.tree.leaves(same))
    # 2 layers of 32 x 48, the 32 split over fsdp and the 48 over tensor.
    gate = gradient(state)["layers"]["mlp"]["gate"]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 16, 24)}
    # It comes back as it went in, so a second update compiles nothing.
    compiles = CompileCounter()
    spread.update(state, spread.put(batch()), None, np.int32(0))
    assert compiles.since_last() == 0


def test_the_old_state_is_donated():
    before = fresh_state(learner())
    learner().update(before, learner().put(batch()))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, gradient(before))))


def test_old_and_behaviour_logprobs_are_two_things():
    elsewhere = batch().replace(behaviour_logprobs=batch().behaviour_logprobs - 1)
    # Ratios are taken to the learner's own log-probabilities: the sampler's play no part ...
    assert_trees_equal(updated(learner(), elsewhere), updated(learner()))
    # ... unless their importance weight is asked for.
    capped = learner(4, **EVERYTHING)
    assert updated(capped, elsewhere)[1].loss != updated(capped)[1].loss
    older = batch().replace(old_logprobs=batch().old_logprobs - 1)
    assert updated(learner(), older)[1].loss != updated(learner())[1].loss


def test_without_a_coefficient_the_reference_plays_no_part():
    state, metrics = updated(learner())
    assert metrics.kl == 0
    # It is only looked at: whatever it says, the same bits, and a figure beside them.
    rows = with_reference(batch())
    watched, figure = updated(learner(), rows)
    of_another, other = updated(learner(), rows.replace(reference_logprobs=rows.reference_logprobs - 1))
    assert figure.kl > 0 and other.kl != figure.kl
    assert_trees_equal(of_another, watched)
    assert_trees_close(gradient(watched), gradient(state), rtol=1e-5, atol=1e-6)
    # And where it isn't given, no program has a place for it.
    of = learner()
    inputs = [len(jax.make_jaxpr(of.update)(fresh_state(of), of.put(rows)).jaxpr.invars)
              for rows in (batch(), with_reference(batch()))]  # fmt: skip
    assert inputs[1] == inputs[0] + 1 == len(jax.tree.leaves(fresh_state(of))) + len(jax.tree.leaves(batch())) + 1


@pytest.mark.parametrize("kind", ["k2", pytest.param("k3", marks=pytest.mark.slow)])
def test_a_policy_that_is_its_reference_pays_nothing(kind):
    own, (micro_batches, options) = batch().replace(reference_logprobs=score(learner(), batch())), UPDATES[kind]
    state, metrics = updated(learner(micro_batches, **options), own)
    np.testing.assert_allclose(metrics.kl, 0, atol=1e-9)
    assert_trees_close(gradient(state), gradient(updated(learner())[0]), rtol=1e-5, atol=1e-5)


def test_what_stands_in_the_padding_of_the_reference_is_irrelevant():
    rows, of = with_reference(batch()), learner(4, **UPDATES["k2"][1])
    beyond = ~rows.response_mask
    for garbage in (np.nan, -np.inf):
        dirty = rows.replace(reference_logprobs=np.where(beyond, np.float32(garbage), rows.reference_logprobs))
        assert_trees_equal(updated(of, dirty), updated(of, rows))
    # Nor in rows and micro-batches that are nothing but padding: here three rows, of which two are a micro-batch.
    five = jax.tree.map(lambda x: x[:5], rows)
    dirty, clean = (updated(of, with_empty_rows(five, 8, each)) for each in (SPOILED, dict.fromkeys(SPOILED, 0.0)))
    assert_trees_equal(dirty, clean)
    assert dirty[1].finite and dirty[1].grad_norm > 0.1


def test_a_coefficient_needs_a_reference():
    with pytest.raises(ValueError, match="kl_coefficient is 0.3, but there are no reference_logprobs"):
        updated(learner(4, **UPDATES["k2"][1]))


# ---- adapters ------------------------------------------------------------------------------------------------------

ADAPTERS = random_adapters(ARCHITECTURE)


def placed_base(of: Learner):
    """The frozen weights, where the learner has them."""
    return jax.device_put(PARAMS, transformer.param_shardings(ARCHITECTURE, of.mesh))


@functools.cache
def adapted_update(*args):
    """(state, metrics) after one update of `ADAPTERS` over `PARAMS`."""
    of = learner(*args, rank=ALL.rank)
    return updated(of, None, ADAPTERS, placed_base(of))


def test_the_update_of_adapters_follows_the_chain_rule():
    # With W' = W + s A B and G the slope at W', A's slope is s G B^T and B's is s A^T G.
    rows = batch()
    whole = lora.merged(lora.adapted(PARAMS, ADAPTERS, ALL))
    (_, expected), slope = naive(whole, jnp.asarray(rows.tokens), shifted(rows))
    flat, slopes = transformer.flatten(ADAPTERS), {}
    for name, g in transformer.flatten(slope).items():
        if f"{name}.a" not in flat:
            continue
        a, b = (np.asarray(flat[f"{name}.{part}"]) for part in "ab")
        g2, a2, b2 = np.asarray(g).reshape(2, -1, b[0, 0].size), a.reshape(2, -1, 4), b.reshape(2, 4, -1)
        slopes[f"{name}.a"] = 2 * np.einsum("Lio,Lro->Lir", g2, b2).reshape(a.shape)
        slopes[f"{name}.b"] = 2 * np.einsum("Lir,Lio->Lro", a2, g2).reshape(b.shape)
    state, metrics = adapted_update()
    assert_trees_close(gradient(state), transformer.nest(slopes), rtol=1e-4, atol=1e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in slopes.values())
    np.testing.assert_allclose(metrics.loss, expected["loss"], rtol=1e-5, atol=1e-5)
    assert metrics.finite and state.updates == 1


@pytest.mark.slow  # the test below has two micro-batches, on eight devices
def test_adapters_in_eight_micro_batches_are_those_of_one():
    (one, one_metrics), (eight, eight_metrics) = adapted_update(), adapted_update(8)
    assert_trees_close(gradient(eight), gradient(one), rtol=1e-5, atol=1e-6)
    assert_trees_close(eight.params, one.params, rtol=1e-6, atol=1e-6)
    assert_trees_close(eight_metrics, one_metrics, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # test_context.py has adapters on eight devices
def test_adapters_on_eight_devices_are_those_of_one():
    (one, one_metrics), (eight, eight_metrics) = adapted_update(), adapted_update(2, (2, 2, 2))
    assert_trees_close(gradient(eight), gradient(one), rtol=1e-5, atol=1e-5)
    assert_trees_close(eight.params, one.params, rtol=1e-5, atol=1e-5)
    assert_trees_close(eight_metrics, one_metrics, rtol=1e-5, atol=1e-5)
    # The gate's A is [2, 32, 4], the 32 split over fsdp; its B is [2, 4, 48], the 48 split over tensor.
    for tree in (eight.params, gradient(eight)):
        gate = tree["layers"]["mlp"]["gate"]
        assert gate["a"].sharding.shard_shape((2, 32, 4)) == (2, 16, 4)
        assert gate["b"].sharding.shard_shape((2, 4, 48)) == (2, 4, 24)


def test_a_base_is_neither_trained_nor_donated_nor_copied():
    of = learner(rank=ALL.rank)
    base, state = placed_base(of), fresh_state(of, ADAPTERS)
    sizes = [leaf.size for leaf in jax.tree.leaves(state)]
    # Weights, two moments, and three counts: of updates, of Adam, and of the schedule.
    assert sum(sizes) == 3 * lora.num_parameters(ARCHITECTURE, ALL) + 3
    state, _ = of.update(state, of.put(batch()), base)
    assert [leaf.size for leaf in jax.tree.leaves(state)] == sizes
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(base))
    assert_trees_equal(base, PARAMS)
    pointers = [
        {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}
        for tree in (base, state.params, of.policy(state.params, base))
    ]
    assert pointers[2] == pointers[0] | pointers[1]


def products(jaxpr):
    """Shapes that matrix products have, wherever in a program."""
    shapes = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            shapes.add(tuple(sorted(equation.outvars[0].aval.shape)))
        for inner in jaxprs_in_params(equation.params):
            shapes |= products(inner)
    return shapes


def test_no_gradient_of_a_frozen_weight_is_computed():
    def computed(rank, params, base):
        of = learner(2, rank=rank)
        return products(jax.make_jaxpr(of.update)(fresh_state(of, params), of.put(batch()), base).jaxpr)

    flat = transformer.flatten(PARAMS)
    slices = {tuple(sorted(flat[weight].shape[1:])) for weight in lora.TARGETS.values()}
    assert slices == {(4, 8, 32), (2, 8, 32), (32, 48)}
    # Where the weights are trained, each has a product of its own shape; under adapters, none.
    assert slices <= computed(0, PARAMS, None)
    under_adapters = computed(ALL.rank, ADAPTERS, PARAMS)
    assert not slices & under_adapters and {(4, 32), (4, 48)} <= under_adapters


def test_a_policy_with_adapters_is_scored_as_its_merged_weights():
    policy = lora.adapted(PARAMS, ADAPTERS, ALL)
    scored = score(learner(rank=ALL.rank), batch(), policy)
    np.testing.assert_allclose(scored, score(learner(), batch(), lora.merged(policy)), rtol=1e-5, atol=1e-5)
    assert np.abs(scored - score(learner(), batch())).max() > 1e-2


def test_only_responses_of_earlier_weights_are_weighed_by_rule():
    exact = dict(learning_rate=1e-3, warmup_updates=0, prompts_per_update=2)
    settings = dict(model=ModelConfig(compute_dtype="float32"), sampling=SamplingConfig(temperature=TEMPERATURE))
    settings |= {"collection": CollectionConfig(group_size=4), "learning": LearningConfig(**exact)}
    split = Config(mesh=MeshConfig(sampler=1), **settings)
    by_rule = Learner(ARCHITECTURE, split, mesh_lib.make_mesh())
    stale = np.arange(8) % 2 == 0

    def loss(shift):
        """Loss where behaviour is old + shift, per row; stale rows have version 6, others 7, that of the weights."""
        rows = batch()
        version = np.where(stale[:, None], 6, 7) * np.ones_like(rows.policy_version)
        rows = rows.replace(behaviour_logprobs=rows.old_logprobs + shift[:, None], policy_version=version)
        return float(by_rule.update(fresh_state(by_rule), by_rule.put(rows), None, np.int32(7))[1].loss)

    none = loss(np.zeros(8, np.float32))
    # A weight other than 1 for every fresh response changes no bit.
    assert loss(np.where(stale, 0, 0.7).astype(np.float32)) == none
    # exp(old - behaviour) = 1/2 for stale responses: their part of the loss, P, is halved. exp(+5) is capped at 2.
    halved, capped = (loss(np.where(stale, shift, 0).astype(np.float32)) for shift in (np.log(2), -5.0))
    assert abs(none - halved) > 1e-3
    np.testing.assert_allclose(capped - none, 2 * (none - halved), rtol=1e-4)

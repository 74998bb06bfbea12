"""The value head: its features, its estimates, its training by hand, and its state in checkpoints."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.value_head import Head, ValueHead, head_loss, prompt_features
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict
from tests.policy import recording

ARCHITECTURE, PARAMS, _ = recording.golden("qwen2")
LENGTHS = (1, 5, 3, 7, 2, 6, 4)
WIDTH = ARCHITECTURE.hidden_size


def value_head(rows=3, mesh=(1, 1, 1), learning_rate=0.5, steps=4) -> ValueHead:
    return ValueHead(
        ARCHITECTURE, mesh_lib.make_mesh(*mesh), dtype=jnp.float32, max_prompt_tokens=8, learning_rate=learning_rate,
        steps=steps, rows=rows,
    )  # fmt: skip


@functools.cache
def prompts(count=7) -> tuple[Prompt, ...]:
    rng = np.random.default_rng(0)
    lengths = [LENGTHS[place % len(LENGTHS)] for place in range(count)]
    return tuple(
        Prompt(f"p{place}", "", "", rng.integers(3, 96, length).astype(np.int32))
        for place, length in enumerate(lengths)
    )


def pool(prompt: Prompt, correct: int, drawn: int) -> Pool:
    response = [Response(prompt.id, draw, np.array([3]), np.zeros(1), False) for draw in range(drawn)]
    verdicts = [Verdict(draw < correct, float(draw < correct)) for draw in range(drawn)]
    return Pool(prompt, tuple(response), tuple(verdicts), rounds=1, met=True)


def padded(some):
    """(tokens, lengths), with an id in the padding that means nothing."""
    tokens = np.full((len(some), 8), 95, np.int32)
    for row, prompt in enumerate(some):
        tokens[row, : len(prompt.tokens)] = prompt.tokens
    return tokens, np.array([len(prompt.tokens) for prompt in some], np.int32)


@jax.jit
def last_hidden(tokens):
    model = transformer.merge(ARCHITECTURE, PARAMS)
    return transformer.hidden_states(model, tokens[None], execution=transformer.Execution(jnp.float32))[0, -1]


def hidden(prompt: Prompt) -> np.ndarray:
    """The hidden state at the prompt's last token, of the prompt alone."""
    return np.asarray(last_hidden(prompt.tokens))


def separable(count=60, draws=8):
    """(pools, pass rates): the sign of one direction of the hidden states decides between 0.9 and 0.1."""
    tokens, lengths = padded(prompts(count))
    states = prompt_features(ARCHITECTURE, PARAMS, tokens, lengths, dtype=jnp.float32)
    side = np.asarray(states) @ np.random.default_rng(1).normal(size=WIDTH)
    rates = np.where(side > np.median(side), 0.9, 0.1)
    correct = np.random.default_rng(2).binomial(draws, rates)
    return [pool(prompt, k, draws) for prompt, k in zip(prompts(count), correct.tolist(), strict=True)], rates


def test_features_are_the_hidden_state_at_the_last_prompt_token():
    tokens, lengths = padded(prompts())
    expected = np.array([hidden(prompt) for prompt in prompts()])
    features = WIDTH * prompt_features(ARCHITECTURE, PARAMS, tokens, lengths, dtype=jnp.float32)
    np.testing.assert_allclose(features, expected, rtol=1e-5, atol=1e-5)
    # At the last place of the padded row it would be something else.
    at_the_end = WIDTH * prompt_features(ARCHITECTURE, PARAMS, tokens, np.full(7, 8, np.int32), dtype=jnp.float32)
    assert np.abs(at_the_end - expected).max(axis=1).min() > 0.1
    # A row of padding has nothing to look at, and must not be nan.
    none = np.zeros(7, np.int32)
    assert np.isfinite(prompt_features(ARCHITECTURE, PARAMS, tokens, none, dtype=jnp.float32)).all()


def test_loss_by_hand():
    # Bias log 3, so p = 3/4. One of one and one of three correct, and a row of padding:
    # -(2 log(3/4) + 2 log(1/4)) / 4 = 0.836988; the mean of the prompts' means would be
    # -(log(3/4) + (log(3/4) + 2 log(1/4)) / 3) / 2 = 0.653888.
    head = Head(jnp.zeros(2), jnp.log(3.0))
    features = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    arguments = (head, features, jnp.array([1.0, 1.0, 0.0]), jnp.array([1.0, 3.0, 0.0]))
    for function in (head_loss, jax.jit(head_loss)):
        np.testing.assert_allclose(function(*arguments), 0.836988, rtol=1e-6)
        slope = jax.grad(function)(*arguments)
        # dL / dlog odds = (N p - k) / 4 = (3/4 - 1, 9/4 - 1) / 4 = (-1/16, 5/16).
        np.testing.assert_allclose(slope.bias, 0.25, rtol=1e-5)
        np.testing.assert_allclose(slope.weights, [(-1 + 15) / 16, (-2 + 20) / 16], rtol=1e-5)


def test_a_certain_head_has_a_finite_loss():
    # Log odds of 1000: every wrong draw costs 1000, and nothing overflows.
    head = Head(jnp.array([1000.0]), jnp.float32(0))
    value, slope = jax.value_and_grad(head_loss)(head, jnp.array([[1.0]]), jnp.array([1.0]), jnp.array([2.0]))
    assert value == 500.0 and slope.weights == 0.5


def test_nothing_seen_is_one_half():
    estimates = value_head().estimate(PARAMS, prompts())
    assert estimates.dtype == np.float64
    np.testing.assert_array_equal(estimates, np.full(len(LENGTHS), 0.5))
    assert value_head().estimate(PARAMS, ()).shape == (0,)


def test_the_first_step_by_hand():
    # Adam's first step is the rate, against the sign of the slope: here all draws are correct, so towards h itself.
    prompt, head = prompts()[1], value_head(learning_rate=0.25, steps=1)
    head.estimate(PARAMS, [prompt])
    np.testing.assert_allclose(head.observe([pool(prompt, 2, 2)])["estimator/loss"], np.log(2), rtol=1e-6)
    weights, bias = head.to_json()["arrays"][:2]
    np.testing.assert_allclose(weights, 0.25 * np.sign(hidden(prompt)), rtol=1e-4)
    np.testing.assert_allclose(bias, 0.25, rtol=1e-4)
    # Log odds: rate * mean |h| + rate, whatever the width is.
    expected = 1 / (1 + np.exp(-0.25 * (np.abs(hidden(prompt)).mean() + 1)))
    np.testing.assert_allclose(head.estimate(PARAMS, [prompt]), [expected], rtol=1e-4)


def test_it_learns_what_is_linear_in_the_hidden_state():
    pools, rates = separable()
    head = value_head(rows=16)
    losses = []
    for _ in range(30):
        estimates = head.estimate(PARAMS, prompts(60))
        losses.append(head.observe(pools)["estimator/loss"])
    np.testing.assert_allclose(losses[0], np.log(2), rtol=1e-6)
    # The variance of the pass rates, 0.16, is what the best constant leaves.
    assert np.mean((estimates - rates) ** 2) < 0.04 < np.var(rates) / 3
    assert losses[-1] < 0.45


def test_the_policy_is_only_read():
    before = jax.tree.map(np.array, PARAMS)
    pools, _ = separable(12)
    head = value_head()
    head.estimate(PARAMS, prompts(12))
    head.observe(pools)
    jax.tree.map(np.testing.assert_array_equal, PARAMS, before)
    # What is trained is a linear map alone: nothing of the policy's size is in it, nor in what is saved.
    weights, bias, *optimizer = head.to_json()["arrays"]
    assert [np.size(weights), np.size(bias)] == [WIDTH, 1]
    assert {np.size(leaf) for leaf in optimizer} == {WIDTH, 1}


def test_resumed_is_unbroken():
    pools, _ = separable(12)
    unbroken, broken = value_head(), value_head()
    for head in (unbroken, broken):
        head.estimate(PARAMS, prompts(12))
        head.observe(pools)
    resumed = value_head()
    resumed.load_json(json.loads(json.dumps(broken.to_json())))
    assert resumed.to_json() == broken.to_json()
    for _ in range(2):
        np.testing.assert_array_equal(
            resumed.estimate(PARAMS, prompts(12)), unbroken.estimate(PARAMS, prompts(12)), strict=True
        )
        assert resumed.observe(pools) == unbroken.observe(pools)
    assert resumed.to_json() == unbroken.to_json()
    # Without the optimiser's moments it would go another way.
    forgetful = value_head()
    forgetful.load_json({"arrays": broken.to_json()["arrays"][:2] + value_head().to_json()["arrays"][2:]})
    forgetful.estimate(PARAMS, prompts(12))
    for _ in range(2):
        forgetful.observe(pools)
    assert forgetful.to_json() != unbroken.to_json()


def trained(**options) -> ValueHead:
    pools, _ = separable(12)
    head = value_head(**options)
    head.estimate(PARAMS, prompts(12))
    head.observe(pools)
    return head


def test_the_order_of_prompts_is_irrelevant():
    head = trained()
    estimates = head.estimate(PARAMS, prompts(12))
    assert np.ptp(estimates) > 0.05
    order = np.random.default_rng(3).permutation(12)
    shuffled = head.estimate(PARAMS, [prompts(12)[place] for place in order])
    np.testing.assert_allclose(shuffled, estimates[order], rtol=1e-6)
    # And it is the pool's own prompt that its draws count for, whatever their order.
    pools, _ = separable(12)
    straight = trained()
    head.observe([pools[place] for place in order])
    straight.estimate(PARAMS, prompts(12))
    straight.observe(pools)
    np.testing.assert_allclose(head.to_json()["arrays"][0], straight.to_json()["arrays"][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"rows": 5}, pytest.param({"rows": 64}, marks=pytest.mark.slow), {"mesh": (2, 2, 2)}], ids=str
)
def test_chunks_and_devices_are_irrelevant(options):
    params = PARAMS
    if "mesh" in options:
        shardings = transformer.param_shardings(ARCHITECTURE, mesh_lib.make_mesh(*options["mesh"]))
        params = jax.device_put(PARAMS, shardings)
    pools, _ = separable(12)
    one, other = value_head(), value_head(**options)
    for _ in range(2):
        np.testing.assert_allclose(
            other.estimate(params, prompts(12)), one.estimate(PARAMS, prompts(12)), rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(*(head.observe(pools)["estimator/loss"] for head in (one, other)), rtol=1e-5)


def test_never_0_and_never_1():
    pools = [pool(prompt, 8 * (place % 2), 8) for place, prompt in enumerate(prompts(4))]
    head = value_head(learning_rate=1e4)
    head.estimate(PARAMS, prompts(4))
    head.observe(pools)
    estimates = head.estimate(PARAMS, prompts(4))
    # Log odds in the thousands: the sigmoid alone would be 0 and 1.
    assert {estimates.min(), estimates.max()} <= {1e-3, 1 - 1e-3}


def test_pools_of_some_of_the_prompts():
    head = value_head()
    head.estimate(PARAMS, prompts(4)[:3])
    # Some of those estimated may have no pool; where there is none at all, nothing is fitted.
    before = head.to_json()
    assert head.observe([]) == {} and head.to_json() == before
    assert head.observe([pool(prompts(4)[1], 1, 2)]).keys() == {"estimator/loss"}


def test_one_program_each():
    """Any number of prompts is estimated and learned without another program."""
    head, pools = value_head(), separable(12)[0]
    for count in (12, 7, 10):  # of prompts, in chunks of three
        head.estimate(PARAMS, prompts(12)[:count])
    head.observe(pools[:9])
    compiles = CompileCounter()
    head.estimate(PARAMS, prompts(12)[:11])
    head.observe(pools[:8])  # padded to nine
    assert compiles.since_last() == 0

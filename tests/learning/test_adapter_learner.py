"""Training of adapters over one base: losses, gradients and Adam against closed formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import adapter_learner, micro_batches
from reinforce_ada_jax.learning.adapter_learner import AdapterLearner, Clip, LossRow
from reinforce_ada_jax.learning.optimizer import AdamParams
from reinforce_ada_jax.policy import lora, transformer
from tests.policy.adapting import ALL, random_adapters
from tests.sampling import tiny

ROWS = tuple(
    LossRow(*np.random.default_rng(length).integers(0, 24, (2, length), np.int32), factors, old)
    for length, factors, old in (
        (3, np.array([0, 1, -2], np.float32), np.array([-200, -2, -3], np.float32)),  # exp(200) is not finite
        (5, np.array([1, 0, 0.5, 1, 2], np.float32), np.array([-4, -3, -2, -1, -3], np.float32)),
    )
)


@pytest.fixture(scope="module")
def learner():
    mesh = mesh_lib.make_mesh()
    base = jax.device_put(tiny._weights(), transformer.param_shardings(tiny.ARCHITECTURE, mesh))
    return AdapterLearner(tiny.ARCHITECTURE, base, mesh, jnp.float32)


@pytest.fixture(scope="module")
def adapters(learner):
    return jax.device_put(random_adapters(tiny.ARCHITECTURE), lora.shardings(tiny.ARCHITECTURE, ALL, learner.mesh))


@jax.jit
def _plain_logprobs(base, adapters, tokens, targets):
    logits = transformer.logits(tiny.ARCHITECTURE, lora.adapted(base, adapters, ALL), tokens[None])[0]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]


def plain_logprobs(learner, adapters, row):
    """Log-probabilities of a row's targets by the plain forward pass."""
    return _plain_logprobs(learner.base, adapters, row.tokens, row.targets)


@functools.partial(jax.jit, static_argnums=0)
def expected(name, logprobs, factors, old_logprobs):
    """(losses of the tokens, slopes of their sum)."""

    def loss(logprobs):
        ratio = jnp.exp(jnp.where(factors == 0, 0, logprobs - old_logprobs))
        clipped = jnp.clip(ratio, 0.5, 1.1)
        losses = {
            "cross_entropy": -factors * logprobs,
            "importance_sampling": -factors * ratio,
            "ppo": -jnp.minimum(factors * ratio, factors * clipped),
            "cispo": -jax.lax.stop_gradient(clipped) * factors * logprobs,
        }[name]
        return losses.sum(), losses

    (_, losses), slopes = jax.value_and_grad(loss, has_aux=True)(logprobs)
    return losses, slopes


@jax.jit
def _pulled_back(base, adapters, tokens, targets, slopes):
    return jax.vjp(lambda adapters: _plain_logprobs(base, adapters, tokens, targets), adapters)[1](slopes)[0]


# test_token_losses.py has the formulas.
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("ppo", "cispo"))) for name in adapter_learner.LOSSES
])  # fmt: skip
def test_losses_and_gradients_are_those_of_the_formulas(learner, adapters, name):
    sums, logprobs, losses = learner.forward_backward(adapters, None, ALL, ROWS, name, Clip(0.5, 1.1))
    gradients = []
    for row, ours, loss in zip(ROWS, logprobs, losses, strict=True):
        theirs = plain_logprobs(learner, adapters, row)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        right, slopes = expected(name, theirs, row.factors, row.old_logprobs)
        np.testing.assert_allclose(loss, right, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(
            adapter_learner.token_losses(name, ours, row, Clip(0.5, 1.1)), loss, atol=1e-6, rtol=1e-6
        )
        gradients.append(_pulled_back(learner.base, adapters, row.tokens, row.targets, slopes))
    jax.tree.map(
        lambda x, *y: np.testing.assert_allclose(x, sum(map(np.asarray, y)), atol=2e-5, rtol=1e-4), sums, *gradients
    )


def test_gradients_of_several_requests_add_up(learner, adapters):
    one, *_ = learner.forward_backward(adapters, None, ALL, ROWS[:1], "cross_entropy", Clip())
    both, *_ = learner.forward_backward(adapters, one, ALL, ROWS[1:], "cross_entropy", Clip())
    whole, *_ = learner.forward_backward(adapters, None, ALL, ROWS, "cross_entropy", Clip())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), both, whole)


def test_forward_keeps_the_order_of_rows(learner, adapters):
    for row, ours in zip(ROWS, learner.forward(adapters, ALL, ROWS), strict=True):
        np.testing.assert_allclose(ours, plain_logprobs(learner, adapters, row), atol=1e-5)


def test_adam_by_hand(learner, adapters):
    """Two steps of torch.optim.AdamW, written out, the second with a bound on the gradient's norm."""
    state = learner.with_new_optimizer(adapters, ALL)
    gradient = jax.tree.map(lambda x: np.sin(1 + np.arange(x.size, dtype=np.float32)).reshape(x.shape), adapters)
    gradient = jax.device_put(gradient, lora.shardings(tiny.ARCHITECTURE, ALL, learner.mesh))
    norm = np.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(gradient)))
    adam = AdamParams(0.1, 0.9, 0.95, 1e-3, weight_decay=0.5)
    first, ours = learner.step(state, gradient, ALL, adam)
    second, _ = learner.step(first, gradient, ALL, adam._replace(clip_norm=norm / 4))
    assert ours == pytest.approx(norm, rel=1e-5)
    for before, g, after, last in zip(
        *(jax.tree.leaves(x) for x in (adapters, gradient, first.params, second.params)), strict=True
    ):
        x, slope = np.asarray(before, np.float64), np.asarray(g, np.float64)
        m, v = 0.1 * slope, 0.05 * slope**2
        x = x - 0.1 * 0.5 * x - 0.1 * (m / 0.1) / (np.sqrt(v / 0.05) + 1e-3)
        np.testing.assert_allclose(after, x, atol=1e-5)
        m, v = 0.9 * m + 0.1 * slope / 4, 0.95 * v + 0.05 * (slope / 4) ** 2
        x = x - 0.1 * 0.5 * x - 0.1 * (m / (1 - 0.9**2)) / (np.sqrt(v / (1 - 0.95**2)) + 1e-3)
        np.testing.assert_allclose(last, x, atol=1e-5)


def test_a_gradient_that_is_not_finite_is_refused(learner, adapters):
    state = learner.with_new_optimizer(adapters, ALL)
    bad = jax.tree.map(lambda x: np.full(x.shape, np.nan, np.float32), adapters)
    with pytest.raises(ValueError, match="norm of the gradient is nan: the weights stay as they were"):
        learner.step(state, bad, ALL, AdamParams(0.1, 0.9, 0.95, 1e-3))


@pytest.mark.parametrize("dtype", ["i4", "f4"])
def test_rows_are_padded_with_zeros(dtype):
    rows = micro_batches.padded([np.ones(40, dtype), np.ones(3, dtype)], (4, 64))
    assert rows.shape == (4, 64) and rows.dtype == dtype
    assert rows.sum(1).tolist() == [40, 3, 0, 0] and rows[0, :40].all() and rows[1, :3].all()

import jax.numpy as jnp
import numpy as np

from reinforce_ada_jax.policy.transformer import distribution


def test_literal_distribution():
    # Logits ln(1, 2, 1) at temperature 1: probabilities 1/4, 1/2, 1/4; at 1/2 they are squared: 1/6, 4/6, 1/6.
    logits = jnp.log(jnp.array([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(jnp.exp(distribution(logits, 1.0)), [0.25, 0.5, 0.25], rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(distribution(logits, 0.5)), [1 / 6, 4 / 6, 1 / 6], rtol=1e-6)
    assert distribution(logits.astype(jnp.bfloat16), 1.0).dtype == jnp.float32


def test_temperature_divides_logits_not_logprobs():
    # A temperature left out, or put on the log-probabilities without normalising again, would sum to something else.
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (4, 11)), jnp.float32)
    np.testing.assert_allclose(jnp.exp(distribution(logits, 0.6)).sum(axis=-1), 1.0, rtol=1e-5)
    assert (jnp.abs(distribution(logits, 0.6) - distribution(logits, 1.0)) > 1e-3).any()

"""The optimiser: warm-up, schedules, two steps by hand, and the bound of the gradient's norm."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import LearningConfig
from reinforce_ada_jax.learning.optimizer import make_optimizer, warmup_schedule


@pytest.mark.parametrize(
    ("warmup_updates", "expected"),
    [
        # The first update moves already: optax's own linear schedule would waste it on a rate of 0.
        (4, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        (1, [2.0, 2.0, 2.0]),
        (0, [2.0, 2.0, 2.0]),
    ],
)
def test_warmup(warmup_updates, expected):
    """The learning rate rises in equal steps to its value."""
    schedule = warmup_schedule(2.0, warmup_updates)
    np.testing.assert_allclose([schedule(update) for update in range(len(expected))], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("auto", [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("constant", [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]),
        ("cosine", [1.0, 2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)]),
    ],
)
def test_schedules(schedule, expected):
    """Under a constant gradient the steps of Adam are the rates: two updates of warm-up, and 0 behind the last one."""
    config = config_lib.resolve({
        "iterations": 3, "collection": {"prompts_per_iteration": 4},
        "learning": {"prompts_per_update": 2, "learning_rate": 2.0, "warmup_updates": 2, "schedule": schedule},
    })  # fmt: skip
    optimizer = make_optimizer(config.learning, config.num_updates)
    params, rates = {"w": jnp.zeros(1)}, []
    state = optimizer.init(params)
    for _ in expected:
        changes, state = optimizer.update({"w": jnp.array([0.5])}, state, params)
        rates.append(-float(changes["w"][0]))
    np.testing.assert_allclose(rates, expected, rtol=1e-4)  # moments of Adam are divided in float32


def test_two_steps_by_hand():
    # g = 0.5 twice, so after bias correction m = 0.5 and v = 0.25: each step is rate * (0.5 / 0.5 + 0.1 * weight).
    # Rates 0.05 and 0.1: 1 - 0.05 * 1.1 = 0.945, then 0.945 - 0.1 * 1.0945 = 0.83555.
    optimizer = make_optimizer(LearningConfig(learning_rate=0.1, warmup_updates=2, weight_decay=0.1), 2)
    params = {"w": jnp.array([1.0])}
    state = optimizer.init(params)
    for expected in (0.945, 0.83555):
        changes, state = optimizer.update({"w": jnp.array([0.5])}, state, params)
        params = optax.apply_updates(params, changes)
        np.testing.assert_allclose(params["w"], [expected], rtol=1e-5)


@pytest.mark.parametrize(
    ("clip_norm", "expected"),
    [
        (1.0, (0.6, 0.8)),  # one norm over all weights: sqrt(9 + 16) = 5. Clipped one by one it would be (1, 1)
        (5.0, (3.0, 4.0)),
    ],
)
def test_the_global_norm_is_bounded(clip_norm, expected):
    optimizer = make_optimizer(LearningConfig(clip_norm=clip_norm, b1=0.0), 1)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    _, state = optimizer.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, optimizer.init(params), params)
    # Without momentum the first moment is the gradient as AdamW got it.
    first_moment = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose([first_moment["a"][0], first_moment["b"][0]], expected, rtol=1e-6)

"""Adapters that change something, as after some training, for tests."""

import jax
import jax.numpy as jnp

from reinforce_ada_jax.policy import lora

ALL = lora.Lora(4, 8.0, tuple(lora.TARGETS))


def random_adapters(architecture, chosen=ALL, seed=0):
    """A as it begins, B of about the same size, where it begins as 0."""

    @jax.jit
    def make():
        flat = lora.flatten(lora.init(architecture, chosen, jax.random.key(seed)))
        for number, (name, x) in enumerate(flat.items()):
            if name.endswith(".b"):
                flat[name] = 0.1 * jax.random.normal(jax.random.key(1000 * seed + number), x.shape, jnp.float32)
        return lora.nest(flat)

    return make()

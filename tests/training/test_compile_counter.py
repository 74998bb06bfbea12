"""Compilations of this process are counted once."""

import jax
import jax.numpy as jnp

from reinforce_ada_jax.training.compile_counter import CompileCounter


def test_compilations_are_counted_once():
    counter = CompileCounter()
    double, three, four = jax.jit(lambda x: 2 * x + 1), jnp.ones(3), jnp.ones(4)
    counter.since_last()
    double(three)
    assert counter.since_last() == 1
    double(three)
    assert counter.since_last() == 0
    double(four)  # another shape, another program
    assert counter.since_last() == 1

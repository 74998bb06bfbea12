"""Fingerprints of a checkpoint's arrays, which find a flipped bit before anything is trained on it."""

import functools
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.training import records


@jax.jit
def of_arrays(state: LearnerState | Params | Array) -> list[UInt32[Array, ""]]:
    """Returns a number per array: the sum over i of (2 i + 1) word_i, modulo 2^32.

    The factors are odd, so a flipped bit always changes it. Two swapped words change it unless the product of their
    distance and their difference is a multiple of 2^31.
    """

    def one(x):
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        index = jnp.zeros(x.shape, jnp.uint32)
        for axis in range(x.ndim):
            stride = functools.reduce(lambda a, b: a * b % 2**32, x.shape[axis + 1 :], 1)
            index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
        return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32)

    return [one(x) for x in jax.tree.leaves(state)]


def numbers(arrays: LearnerState | Params) -> list[int]:
    """Returns the fingerprints of arrays, as a record holds them."""
    return [int(number) for number in jax.device_get(of_arrays(arrays))]


def recorded(workdir: pathlib.Path, iteration: int) -> str:
    """Returns a hash of a checkpoint's arrays, from its record alone; DamagedError if that can't be read."""
    numbers = records.read(buckets.checkpoints(workdir), iteration)["fingerprints"]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()

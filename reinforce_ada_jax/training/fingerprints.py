"""Fingerprints of a checkpoint's arrays, which find a flipped bit before anything is trained on it."""

import functools
import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from reinforce_ada_jax.distributed.compilation import Lower
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.training import records

# Most bytes of the arrays of one program. On CPUs its temporaries are as large as they are, 1.6 GB for all arrays of
# SmolLM2-135M.
GROUP_BYTES = 2**27


def _groups(arrays: Any) -> list[list[Any]]:
    """Returns the leaves in their order, in groups of at most `GROUP_BYTES` or of one array."""
    groups: list[list[Any]] = [[]]
    size = 0
    for leaf in jax.tree.leaves(arrays):
        num_bytes = leaf.size * leaf.dtype.itemsize
        if groups[-1] and size + num_bytes > GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(leaf)
        size += num_bytes
    return groups


@jax.jit
def of_arrays(arrays: list[Array]) -> list[UInt32[Array, ""]]:
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

    return [one(x) for x in arrays]


def numbers(arrays: LearnerState | Params) -> list[int]:
    """Returns the fingerprints of arrays, as a record holds them."""
    return [int(number) for group in _groups(arrays) for number in jax.device_get(of_arrays(group))]


def programs(arrays: LearnerState | Params) -> dict[str, Lower]:
    """Returns the programs of `numbers`, lowered on demand for abstract arrays."""
    return {
        f"checksum of a checkpoint, part {number}": functools.partial(of_arrays.lower, group)
        for number, group in enumerate(_groups(arrays), start=1)
    }


def recorded(workdir: pathlib.Path, iteration: int) -> str:
    """Returns a hash of a checkpoint's arrays, from its record alone; DamagedError if that can't be read."""
    numbers = records.read(buckets.checkpoints(workdir), iteration)["fingerprints"]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()

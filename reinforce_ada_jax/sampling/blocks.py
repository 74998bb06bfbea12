"""Sampling of a large vocabulary in two levels: a block by its mass, then a token within the block.

Noise for each of 151,936 tokens takes longer than all else that follows the logits. Two levels need a random number for
each block and for each token of a single block, 4,134 together. The distribution is the same. A block is drawn with the
probability of all its tokens, a token with its share of the block, and the product is the token's own probability. Both
draws use the Gumbel-max trick: the argmax of log p + Gumbel noise is a sample of p, also where p is not normalised.
Their noise is independent. Only the masses are rounded, in float32.

Blocks depend on the vocabulary alone, and so does the noise of a token. Along `tensor` each device draws a token of its
own blocks. The one with the largest score of its block is the sample.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from reinforce_ada_jax.distributed.mesh import on_own_part

# Up to this vocabulary, twice the number of blocks, noise for each token is as fast.
LARGEST_IN_ONE_LEVEL = 8192
# Each device along `tensor` has whole groups, if this is a multiple of the number of devices.
GROUPS = 8
# Blocks of a group. With more, more noise is needed. With fewer, more tokens are gathered one by one.
STRIDE = 512

Logprobs = Float[Array, "S V"]
Keys = UInt32[Array, "S 2"]  # from `token.draw_keys`
Places = Int[Array, " S"]  # of the new tokens within their responses, from 0
DrawnTokens = tuple[Int[Array, " S"], Float[Array, " S"]]  # tokens, and their log-probabilities


class Blocks(NamedTuple):
    """Partition of a vocabulary: into groups of equal size, and of each group into `stride` blocks.

    Tokens of a block are `stride` apart. So the masses of blocks are sums of slices, which need no transposition: on
    TPUs the vocabulary is along the lanes, and 151,936 is not a power of two times whole registers.
    """

    groups: int
    group_size: int
    stride: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks; where a group is smaller than the stride, some are empty."""
        return self.groups * self.stride

    @property
    def size(self) -> int:
        """Tokens of the largest block."""
        return -(-self.group_size // self.stride)


def split(vocabulary: int, groups: int = GROUPS, stride: int = STRIDE) -> Blocks:
    """Returns the blocks of a vocabulary, with fewer groups where they do not divide it."""
    groups = math.gcd(vocabulary, groups)
    return Blocks(groups, vocabulary // groups, stride)


def first_largest(scores: Float[Array, "S V"]) -> Int[Array, " S"]:
    """Returns the first index of each row's maximum; XLA's argmax takes 10 times as long on a CPU."""
    place = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None]
    is_largest = scores == jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, place, scores.shape[-1] - 1), axis=-1)


def gumbel(keys: Keys, positions: Places, size: int) -> Float[Array, "S size"]:
    """Returns independent noise of each draw and position."""

    def of_row(key_data, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), position)
        return jax.random.gumbel(key, (size,), jnp.float32)

    return jax.vmap(of_row)(keys, positions)


def masses(logprobs: Logprobs, blocks: Blocks) -> Float[Array, "S blocks"]:
    """Returns the probability of each block of some whole groups, added in the order of tokens."""
    groups = []
    for start in range(0, logprobs.shape[1], blocks.group_size):
        end = start + blocks.group_size
        slices = [jnp.exp(logprobs[:, at : min(at + blocks.stride, end)]) for at in range(start, end, blocks.stride)]
        slices[-1] = jnp.pad(slices[-1], ((0, 0), (0, blocks.stride - slices[-1].shape[1])))
        groups.append(functools.reduce(jnp.add, slices))
    return jnp.concatenate(groups, axis=1)


def sample(logprobs: Logprobs, keys: Keys, positions: Places, blocks: Blocks, mesh: Mesh | None = None) -> DrawnTokens:
    """Samples a token of each row; also returns its log-probability.

    Log-probabilities are normalised; those below log 1e-38 count as -inf. With `mesh` the vocabulary is split over
    `tensor`.
    """
    num_devices = 1 if mesh is None else mesh.shape["tensor"]
    if blocks.groups % num_devices:  # left to the compiler
        mesh, num_devices = None, 1

    def of_own_groups(logprobs, keys, positions):
        first = jax.lax.axis_index("tensor") * (blocks.groups // num_devices) if num_devices > 1 else 0
        noise = gumbel(keys, positions, blocks.num_blocks + blocks.size)
        mass = masses(logprobs, blocks)
        own_noise = jax.lax.dynamic_slice_in_dim(noise, first * blocks.stride, mass.shape[1], axis=1)
        scores = jnp.log(mass) + own_noise
        block = first_largest(scores)
        group, place = block // blocks.stride, block % blocks.stride

        places = place[:, None] + blocks.stride * jnp.arange(blocks.size, dtype=jnp.int32)[None]
        tokens = group[:, None] * blocks.group_size + places
        values = jnp.take_along_axis(logprobs, tokens, axis=1, mode="clip")
        in_block = jnp.where(places < blocks.group_size, values, -jnp.inf)
        chosen = first_largest(in_block + noise[:, blocks.num_blocks :])
        token = (first + group) * blocks.group_size + place + blocks.stride * chosen
        here = jnp.arange(blocks.size)[None] == chosen[:, None]
        candidate = token, jnp.sum(jnp.where(here, values, 0), axis=1)
        return candidate if num_devices == 1 else _best_of_devices(jnp.max(scores, axis=1), *candidate)

    columns, whole = PartitionSpec(None, "tensor"), PartitionSpec()
    draw = on_own_part(of_own_groups, mesh, in_specs=(columns, whole, whole), out_specs=whole)
    tokens, chosen = draw(logprobs, keys, positions)
    # A token is beyond the vocabulary only if no log-probability is a number.
    return jnp.minimum(tokens, logprobs.shape[1] - 1), chosen


def _best_of_devices(score: Float[Array, " S"], token: Int[Array, " S"], logprob: Float[Array, " S"]) -> DrawnTokens:
    """Returns token and log-probability of the largest score along `tensor`, after one transfer."""
    # A token is less than 2**24, so that float32 holds it.
    candidate = jnp.stack([score, token.astype(jnp.float32), logprob])
    scores, tokens, logprobs = jax.lax.all_gather(candidate, "tensor", axis=2)
    here = jnp.arange(scores.shape[1])[None] == first_largest(scores)[:, None]
    token = jnp.sum(jnp.where(here, tokens, 0), axis=1).astype(jnp.int32)
    return token, jnp.sum(jnp.where(here, logprobs, 0), axis=1)

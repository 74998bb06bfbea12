"""Writes of keys and values where heads are split: the same numbers, and nothing passes between devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.sampling.page_writes import copy_pages, fill_pages, write_tokens
from reinforce_ada_jax.sampling.paged_attention import empty_pages
from reinforce_ada_jax.sampling.state import Prefix

LAYERS, HEADS, PAGES, PAGE_SIZE, HEAD_DIM, SLOTS = 2, 4, 5, 2, 3, 3
BETWEEN_DEVICES = re.compile(r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute")


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tokens_written(pools, mesh):
    new = [numbers(seed, SLOTS, HEADS, HEAD_DIM) for seed in (0, 1)]
    page, offset = jnp.array([6, 1, 6]), jnp.array([1, 0, 0])
    return (lambda pools, keys, values: write_tokens(pools, keys, values, page, offset, mesh)), (pools, *new)


def prompts_filled(pools, mesh):
    new = [numbers(seed, LAYERS, 1, 4, HEADS, HEAD_DIM) for seed in (0, 1)]

    def fill(pools, keys, values):
        prefix = Prefix(keys=keys, values=values, length=jnp.array([4]), last_token=jnp.array([0]))
        return fill_pages(pools, prefix, jnp.array([[3, 1]]), mesh)

    return fill, (pools, *new)


def pages_copied(pools, mesh):
    source, target = (PAGES * jnp.arange(LAYERS)[:, None] + jnp.array([pages]) for pages in ([1, 3, 1], [4, 2, 3]))
    return (lambda pools: copy_pages(pools, source, target, jnp.int32(2), mesh)), (pools,)


# Each way to write once; the other dtypes are slow.
@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        pytest.param(write, dtype, id=f"{write.__name__}-{dtype or 'int8'}", marks=[pytest.mark.slow] * (dtype != fast))
        for write, fast in ((tokens_written, None), (prompts_filled, "float32"), (pages_copied, None))
        for dtype in ("float32", None)
    ],
)
def test_every_device_writes_its_own_heads(write, dtype):
    shape = HEADS, LAYERS * PAGES, PAGE_SIZE, HEAD_DIM
    empty = empty_pages(shape, dtype)
    pools = tuple(
        jax.tree.map(lambda x, seed=seed: (9 * numbers(seed, *x.shape)).astype(x.dtype), empty) for seed in (2, 3)
    )
    mesh = make_mesh(tensor=2)
    by_head = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("tensor")), pools)
    whole, (_, *new) = write(pools, None)
    split, _ = write(pools, mesh)
    heads_split = [NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 2), "tensor")) for x in new]
    arguments = jax.device_put((pools, *new), (by_head, *heads_split))
    compiled = jax.jit(split, out_shardings=by_head).lower(*arguments).compile()
    assert not BETWEEN_DEVICES.findall(compiled.as_text())
    expected = jax.jit(whole)(pools, *new)
    jax.tree.map(np.testing.assert_array_equal, compiled(*arguments), expected)
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(pools), strict=True))

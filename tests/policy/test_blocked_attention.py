"""Attention in blocks of queries against plain attention: values, gradients, and what is kept for the backward pass."""

import functools

import jax
import jax.numpy as jnp
import pytest

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.policy import blocked_attention
from reinforce_ada_jax.policy.transformer import REMAT, LayerPlace
from tests.policy.plain_attention import check_attention, in_parts, make_case


# One block, a last block of 12 queries, four blocks of 75.
@pytest.mark.parametrize(
    ("length", "heads", "segmented"),
    [(40, (4, 2), True), pytest.param(140, (2, 2), False, marks=pytest.mark.slow), (300, (4, 1), True)],
)
def test_equals_plain_attention(length, heads, segmented):
    arrays, segment_ids = make_case(length, *heads, 16)
    check_attention(blocked_attention.attend, arrays, segment_ids if segmented else None)


@pytest.mark.parametrize("slides", [True, False])
def test_a_window_is_that_of_plain_attention(slides):
    arrays, segment_ids = make_case(300, 4, 2, 16)
    check_attention(blocked_attention.attend, arrays, segment_ids, 50, jnp.asarray(slides))


@pytest.mark.parametrize(("length", "window", "slides"), [(40, 0, None), (300, 50, True)])
def test_sinks_are_those_of_plain_attention(length, window, slides):
    arrays, segment_ids = make_case(length, 4, 2, 16, sinks=True)
    check_attention(blocked_attention.attend, arrays, segment_ids, window, None if slides is None else jnp.bool(slides))


def test_parts_of_rows_have_the_sinks_of_their_heads():
    arrays, segment_ids = make_case(300, 4, 2, 16, sinks=True)
    attend = functools.partial(blocked_attention.attend_parts, mesh=make_mesh(data=2, context=2, tensor=2))
    check_attention(in_parts(attend, 2), arrays, segment_ids)


# Parts of 75 tokens, in two blocks, and of 150.
@pytest.mark.parametrize(
    ("axes", "segmented", "slides"),
    [
        (dict(context=4), True, None),
        (dict(data=2, context=2, tensor=2), True, True),
        pytest.param(dict(context=2), False, False, marks=pytest.mark.slow),
    ],
)
def test_parts_of_rows_see_all_of_the_row(axes, segmented, slides):
    arrays, segment_ids = make_case(300, 4, 2, 16)
    attend = functools.partial(blocked_attention.attend_parts, mesh=make_mesh(**axes))
    window, slides = (0, None) if slides is None else (100, jnp.asarray(slides))
    check_attention(in_parts(attend, axes["context"]), arrays, segment_ids if segmented else None, window, slides)


def test_the_backward_pass_keeps_no_scores():
    arrays, _ = make_case(240, 4, 2, 16)

    def loss(query, key, value):
        return blocked_attention.attend(query, key, value, LayerPlace(0)).sum()

    # Beside the arguments: the result [2, 2, 2, 240, 16], and a number for each query of a head.
    kept = jax.eval_shape(lambda *x: jax.vjp(jax.checkpoint(loss, policy=REMAT["dots"]), *x)[1], *arrays)
    assert sum(x.size for x in jax.tree.leaves(kept)) == sum(x.size for x in arrays) + 2 * 4 * 240 * (16 + 1)


def test_keeps_the_dtype():
    def with_slopes(*arrays):
        mixed, vjp = jax.vjp(lambda *x: blocked_attention.attend(*x, LayerPlace(0)), *arrays)
        return mixed, *vjp(mixed)

    arrays = [x.astype(jnp.bfloat16) for x in make_case(140, 4, 2, 16)[0]]
    shapes = jax.eval_shape(with_slopes, *arrays)
    assert len(shapes) == 1 + len(arrays) and {x.dtype for x in shapes} == {jnp.dtype(jnp.bfloat16)}

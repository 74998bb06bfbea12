"""The kernels against plain attention, interpreted: values and gradients."""

import functools

import jax.numpy as jnp
import pytest

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.policy import splash_attention
from tests.policy.plain_attention import check_attention, in_parts, make_case


# 240 positions are padded to one block of 256.
@pytest.mark.parametrize(
    ("length", "heads", "head_dim", "segmented", "axes"),
    [
        # test_blocked_attention.py has rows without segments; parts of rows have several blocks.
        pytest.param(240, (2, 1), 64, True, {}, marks=pytest.mark.slow),
        pytest.param(240, (2, 2), 64, False, {}, marks=pytest.mark.slow),
        pytest.param(640, (2, 1), 128, True, {}, marks=pytest.mark.slow),  # five blocks of 128
        (240, (4, 2), 16, True, dict(data=1, fsdp=2, tensor=2)),
    ],
)
def test_equals_plain_attention(length, heads, head_dim, segmented, axes):
    arrays, segment_ids = make_case(length, *heads, head_dim)
    attend = functools.partial(splash_attention.attend, mesh=make_mesh(**axes), interpret=True)
    check_attention(attend, arrays, segment_ids if segmented else None)


@pytest.mark.slow  # the test below has sinks with a window
@pytest.mark.parametrize("slides", [True, False])
def test_a_window_is_that_of_plain_attention(slides):
    arrays, segment_ids = make_case(240, 2, 1, 64)
    attend = functools.partial(splash_attention.attend, mesh=make_mesh(), interpret=True)
    check_attention(attend, arrays, segment_ids, 50, jnp.asarray(slides))


@pytest.mark.parametrize(
    ("slides", "axes"), [pytest.param(None, {}, marks=pytest.mark.slow), (True, dict(data=2, tensor=2))]
)
def test_sinks_are_those_of_plain_attention(slides, axes):
    arrays, segment_ids = make_case(240, 4, 2, 64, sinks=True)
    attend = functools.partial(splash_attention.attend, mesh=make_mesh(**axes), interpret=True)
    window, slides = (0, None) if slides is None else (50, jnp.asarray(slides))
    check_attention(attend, arrays, segment_ids, window, slides)


# Parts of 128 tokens and of 256, each a block.
@pytest.mark.parametrize(
    ("axes", "segmented", "slides"),
    [
        (dict(data=2, context=2, tensor=2), True, True),
        # test_blocked_attention.py has these axes.
        pytest.param(dict(context=4), True, None, marks=pytest.mark.slow),
        pytest.param(dict(context=2), False, False, marks=pytest.mark.slow),
    ],
)
def test_parts_of_rows_see_all_of_the_row(axes, segmented, slides):
    arrays, segment_ids = make_case(512, 4, 2, 64)
    attend = functools.partial(splash_attention.attend, mesh=make_mesh(**axes), interpret=True)
    window, slides = (0, None) if slides is None else (150, jnp.asarray(slides))
    check_attention(in_parts(attend, axes["context"]), arrays, segment_ids if segmented else None, window, slides)


@pytest.mark.parametrize("length, size, block", [(16, 128, 128), (240, 256, 256), (384, 384, 384), (3072, 3072, 512)])
def test_rows_are_cut_into_blocks(length, size, block):
    assert (splash_attention.padded_length(length), splash_attention.block_size(length)) == (size, block)

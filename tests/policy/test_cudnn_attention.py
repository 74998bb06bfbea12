"""Attention by cuDNN without a GPU: its sequences against plain attention, and its kernels in lowered programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.policy import cudnn_attention
from reinforce_ada_jax.policy.cudnn_attention import attend, cudnn, refusal, sequences
from reinforce_ada_jax.policy.transformer import LayerPlace
from tests.policy.plain_attention import check_attention, make_case


def test_sequences_of_packed_rows():
    # Two sequences and padding, a full row, a row of padding alone; at most 2 sequences.
    segment_ids = jnp.array([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1], [2] * 6])
    lengths, first = sequences(segment_ids, 2)
    np.testing.assert_array_equal(lengths, [[3, 1, 2], [1, 5, -1], [-1, -1, 6]])
    np.testing.assert_array_equal(first, [[0, 3, 4, -1], [0, 1, -1, -1], [-1, -1, 0, -1]])


def as_cudnn_reads(  # noqa: PLR0913 (as the function that it replaces)
    query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type
):
    """Attention of the sequences that JAX gives cuDNN, as flat lists of lengths and offsets, counted in numbers."""
    assert mask_type == cudnn.MaskType.PADDING_CAUSAL
    rows, length, heads, head_dim = query.shape
    lists = cudnn._fix_seqlen_offsets(q_seqlen, kv_seqlen, q_offsets, kv_offsets, query, key)
    lengths, key_lengths, offsets, key_offsets = (x.reshape(-1) for x in lists)

    def member(lengths, offsets, heads):
        position, first = jnp.arange(rows * length)[:, None], offsets[None, : lengths.size] // (heads * head_dim)
        return (position >= first) & (position < first + lengths[None])

    own = member(lengths, offsets, heads)[:, None] & member(key_lengths, key_offsets, key.shape[2])[None]
    flat = (x.reshape(1, rows * length, *x.shape[2:]) for x in (query, key, value))
    mixed = jax.nn.dot_product_attention(*flat, mask=own.any(-1)[None, None], scale=scale, is_causal=True)
    return mixed.reshape(query.shape)


@pytest.fixture
def without_a_gpu(monkeypatch):
    """JAX asks the devices at hand, and finds none, before it lowers for those of another machine."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: float(capability) <= 9.0)


@pytest.mark.parametrize("axes", [{}, dict(data=1, fsdp=2, tensor=2)])
def test_packed_rows_equal_plain_attention(axes, monkeypatch):
    monkeypatch.setattr(cudnn, "dot_product_attention", as_cudnn_reads)
    arrays, segment_ids = make_case(240, 4, 2, 16)  # the second row ends with 39 positions of padding
    check_attention(functools.partial(attend, mesh=make_mesh(**axes), max_segments=5), arrays, segment_ids)


def test_rows_of_one_sequence_equal_plain_attention(monkeypatch):
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention",
        lambda *x, implementation="xla", **options: plain(*x, **options, implementation="xla"),
    )  # fmt: skip
    arrays, _ = make_case(40, 4, 2, 16)
    check_attention(functools.partial(attend, mesh=make_mesh(), max_segments=1), arrays, None)


@pytest.mark.parametrize("axes", [{}, dict(data=2, fsdp=2, tensor=2)])
@pytest.mark.parametrize("packed", [False, True])
def test_lowers_to_kernels_of_cudnn(packed, axes, without_a_gpu):
    arrays = [jax.ShapeDtypeStruct((8, 1024, heads, 128), jnp.bfloat16) for heads in (12, 2, 2)]
    segment_ids = jax.ShapeDtypeStruct((8, 1024), jnp.int32) if packed else None

    def loss(arrays, segment_ids):
        mixed = attend(*arrays, LayerPlace(0), segment_ids, mesh=make_mesh(**axes), max_segments=16)
        return jnp.sum(mixed, dtype=jnp.float32)

    program = jax.jit(jax.value_and_grad(loss)).trace(arrays, segment_ids)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax(" in text and "__cudnn$fmhaSoftmaxBackward(" in text
    assert "Bias" not in text and "1024x1024" not in text  # no mask, and no scores


def test_offsets_beyond_32_bits_are_refused(without_a_gpu):
    rows = 342  # 342 * 4096 * 12 * 128 = 2,151,677,952
    arrays = [jax.ShapeDtypeStruct((rows, 4096, 12, 128), jnp.bfloat16)] * 3
    segment_ids = jax.ShapeDtypeStruct((rows, 4096), jnp.int32)
    with pytest.raises(ValueError, match="2,151,677,952 numbers.*raise learning.micro_batches"):
        jax.eval_shape(
            lambda x, ids: attend(*x, LayerPlace(0), ids, mesh=make_mesh(), max_segments=16),
            arrays, segment_ids,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "packed", "reason"),
    [
        ("9.0", "bfloat16", 128, True, ""), ("10.0", "float16", 256, True, ""), ("8.0", "bfloat16", 64, False, ""),
        ("8.9", "bfloat16", 64, True, "packed rows need compute capability 9.0, not 8.9"),
        ("8.0", "bfloat16", 192, False, "head dimension 192 is not a multiple of 8 up to 128"),
        ("9.0", "bfloat16", 84, False, "head dimension 84 is not a multiple of 8 up to 256"),
        ("9.0", "float32", 128, False, "cuDNN takes no float32"),
        ("7.5", "float16", 64, False, "compute capability 7.5 is below 8.0"),
        ("gfx90a", "bfloat16", 64, False, "the device has no cuDNN"),
        ("", "bfloat16", 64, False, "the device has no cuDNN"),
    ],
)  # fmt: skip
def test_refusals(capability, dtype, head_dim, packed, reason):
    """A refusal names what the kernel can not compute."""
    assert refusal(capability, dtype, head_dim, packed=packed) == reason


def test_the_rule_is_that_of_jax(without_a_gpu):
    """JAX's own check lets pass and refuses the same head sizes on an H100."""
    for head_dim in (8, 64, 84, 128, 256, 264):
        arrays = [jax.ShapeDtypeStruct((1, 16, 2, head_dim), jnp.bfloat16)] * 3
        trace = functools.partial(jax.eval_shape, lambda *x: cudnn_attention._local(*x, None, 1), *arrays)
        if refusal("9.0", "bfloat16", head_dim, packed=False):
            with pytest.raises(NotImplementedError):
                trace()
        else:
            trace()

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.policy.quantization import quantize
from reinforce_ada_jax.policy.transformer import LayerPlace
from reinforce_ada_jax.sampling import pallas_attention
from reinforce_ada_jax.sampling.paged_attention import Softmax, empty_pages, paged_attention, seen_pages
from reinforce_ada_jax.sampling.pallas_attention import padded_head_dim, pallas_gpu, pallas_tpu, tpu_blocks
from tests import standins

WIDTH = 4
by_jnp = jax.jit(functools.partial(paged_attention, backend="jnp"))
FUNCTIONS = {"pallas_tpu": pallas_tpu, "pallas_gpu": pallas_gpu}
# page size, head dim, query heads, kv heads, mesh: groups of 1, 2, 6 and 8 (from 8 on JAX's kernel goes another way).
SIZES = [
    (16, 128, 12, 2, dict(tensor=2)),
    (64, 64, 4, 2, dict(tensor=1)),
    (64, 128, 8, 1, dict(tensor=1)),
    (16, 64, 2, 2, dict(data=2, tensor=2)),
    (4, 8, 4, 2, dict(tensor=1)),  # the tests' tiny model
]


def ragged(page_size):
    """Nothing, one token, a page and one less and one more, and the whole table."""
    return np.array([0, 1, page_size - 1, page_size, page_size + 1, WIDTH * page_size], np.int32)


def make_case(page_size, head_dim, heads, kv_heads, rubbish, lengths=None):
    """(query, key pages, value pages, lengths, table): float32 of bfloat16 values, `rubbish` where no slot looks."""
    rng = np.random.default_rng(0)
    lengths = ragged(page_size) if lengths is None else lengths
    slots = len(lengths)
    num_pages = 1 + slots * WIDTH
    query = rng.normal(size=(slots, heads, head_dim)).astype(jnp.bfloat16).astype(np.float32)
    pools = np.full((2, kv_heads, num_pages, page_size, head_dim), rubbish, np.float32)
    unused = iter(1 + rng.permutation(num_pages - 1))
    table = rng.integers(num_pages, size=(slots, WIDTH)).astype(np.int32)  # any valid pages beyond the lengths
    for slot, length in enumerate(lengths):
        for column in range(-(-length // page_size)):
            table[slot, column] = next(unused)
            filled = min(page_size, length - column * page_size)
            new = rng.normal(size=(2, kv_heads, filled, head_dim)).astype(jnp.bfloat16)
            pools[:, :, table[slot, column], :filled] = new
    return query, *pools, lengths, table


def wider(pages, backend):
    """The pool as the engine allocates it: the padding is zeros."""
    head_dim = pages.shape[-1]
    return np.pad(pages, ((0, 0), (0, 0), (0, 0), (0, padded_head_dim(head_dim, backend) - head_dim)))


@functools.cache
def interpreted(backend, axes, *settings):
    """The kernel under jit on a mesh; equal shapes have one program under equal `settings` of the module."""
    return jax.jit(functools.partial(FUNCTIONS[backend], mesh=make_mesh(**dict(axes)), interpret=True))


def run(backend, case, dtype=jnp.float32, reach=None, sinks=None, **axes):
    query, key_pages, value_pages, lengths, table = case
    start = None
    if reach is not None:
        lengths, table, start = seen_pages(lengths, table, key_pages.shape[2], reach)
    module = pallas_attention
    settings = module.TPU_BLOCK_TOKENS, module.GPU_PROGRAMS, module.megacore_mode  # which tests change
    attend = interpreted(backend, tuple(axes.items()), *settings)
    pools = (jnp.asarray(wider(pages, backend), dtype) for pages in (key_pages, value_pages))
    mixed = attend(jnp.asarray(query, dtype), *pools, lengths, table, Softmax(start, sinks))
    assert mixed.dtype == dtype and mixed.shape == query.shape
    return np.asarray(mixed, np.float32)


def expected(case, dtype=jnp.float32, reach=None, sinks=None):
    """By the jnp backend, with zeros where no slot looks (it doesn't take NaN there)."""
    query, key_pages, value_pages, lengths, table = case
    clean = (jnp.asarray(np.nan_to_num(pages), dtype) for pages in (key_pages, value_pages))
    layer = LayerPlace(0, *(() if reach is None else (reach, jnp.bool(True))))._replace(sinks=sinks)
    return np.asarray(by_jnp(jnp.asarray(query, dtype), *clean, lengths, table, layer=layer), np.float32)


def windowed(case, reach, sinks=None):
    """Softmax of each slot over its last `reach` tokens alone, and the sink of a head, in numpy."""
    query, key_pages, value_pages, lengths, table = (np.nan_to_num(part) for part in case)
    kv_heads, _, page_size, head_dim = key_pages.shape
    mixed = np.zeros_like(query)
    for slot, length in enumerate(lengths):
        tokens = np.arange(max(0, length - reach), length)
        if not len(tokens):
            continue
        page, offset = table[slot, tokens // page_size], tokens % page_size
        for head, vector in enumerate(query[slot]):
            own = head * kv_heads // query.shape[1]
            scores = key_pages[own, page, offset] @ vector / head_dim**0.5
            sink = -np.inf if sinks is None else sinks[head]
            largest = max(scores.max(), sink)
            weights = np.exp(scores - largest)
            mixed[slot, head] = weights @ value_pages[own, page, offset] / (weights.sum() + np.exp(sink - largest))
    return mixed


# Keys and values are bfloat16 numbers, so JAX's kernel, which rounds them to that, rounds nothing here.
# The TPU's kernel, which pads heads of 64 as it does those of 8, has groups of two in the last one.
@pytest.mark.parametrize(
    "backend, rubbish, sizes",
    [
        pytest.param(
            backend,
            rubbish,
            sizes,
            marks=[pytest.mark.slow] * (sizes in (SIZES[1:3] if backend == "pallas_tpu" else SIZES[3:4])),
        )
        for backend, rubbish in (("pallas_tpu", 1e4), ("pallas_gpu", np.nan))
        for sizes in SIZES
    ],
    ids=str,
)
def test_equals_the_jnp_backend(backend, rubbish, sizes):
    *sizes, axes = sizes
    case = make_case(*sizes, rubbish)
    mixed = run(backend, case, **axes)
    np.testing.assert_allclose(mixed, expected(case), atol=1e-5, rtol=0)
    np.testing.assert_array_equal(mixed[case[3] == 0], 0.0)


@pytest.mark.parametrize("backend", FUNCTIONS)
def test_in_bfloat16(backend):
    """Kernels in bfloat16 agree with the jnp backend, to rounding."""
    case = make_case(16, 128, 12, 2, 1e4)
    np.testing.assert_allclose(run(backend, case, jnp.bfloat16), expected(case, jnp.bfloat16), atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    "sizes", [SIZES[0], *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in SIZES[1:3])], ids=str
)
@pytest.mark.parametrize("backend", FUNCTIONS)
def test_pages_in_int8(backend, sizes, monkeypatch):
    """Kernels read pages in int8 with their scales."""
    *sizes, axes = sizes
    standins.constants(monkeypatch, pallas_attention, TPU_BLOCK_TOKENS=2 * sizes[0])  # two blocks of two pages
    query, *pools, lengths, table = make_case(*sizes, 1e4)

    @jax.jit
    def int8(pages):
        rounded = quantize(pages, (-1,))
        return rounded.replace(scale=rounded.scale[:, :, None])

    attend = jax.jit(functools.partial(FUNCTIONS[backend], mesh=make_mesh(**axes), interpret=True))
    mixed = attend(query, *(int8(wider(pages, backend)) for pages in pools), lengths, table)
    plain = by_jnp(query, *map(int8, pools), lengths, table)
    np.testing.assert_allclose(mixed, plain, atol=1e-5, rtol=0)


# Inside a page, a page exactly, past the middle of a block of 64 tokens, more than any slot has.
@pytest.mark.parametrize("reach", [1, 9, 16, 33, 100, 10**6])
@pytest.mark.parametrize("sizes", [SIZES[0], pytest.param(SIZES[2], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("backend", ["jnp", *FUNCTIONS])
def test_a_window_hides_what_lies_before_it(backend, sizes, reach):
    page_size, head_dim, heads, kv_heads, axes = sizes
    lengths = np.array([0, 1, page_size, 2 * page_size + 3, WIDTH * page_size - 1, WIDTH * page_size], np.int32)
    case = make_case(page_size, head_dim, heads, kv_heads, 1e4, lengths)
    reach = jnp.int32(reach)
    mixed = expected(case, reach=reach) if backend == "jnp" else run(backend, case, reach=reach, **axes)
    np.testing.assert_allclose(mixed, windowed(case, int(reach)), atol=1e-5, rtol=0)


# Scores are within some 4: sinks that change nothing, decide with them, and take nearly all.
@pytest.mark.parametrize("reach", [None, 33])
@pytest.mark.parametrize("sizes", [SIZES[0], pytest.param(SIZES[4], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("backend", ["jnp", *FUNCTIONS])
def test_sinks_are_in_the_denominator(backend, sizes, reach):
    *sizes, axes = sizes
    case = make_case(*sizes, 1e4)
    sinks = np.linspace(-20.0, 20.0, sizes[2]).astype(np.float32)
    limit = None if reach is None else jnp.int32(reach)
    if backend == "jnp":
        mixed = expected(case, reach=limit, sinks=sinks)
    else:
        mixed = run(backend, case, reach=limit, sinks=sinks, **axes)
    np.testing.assert_allclose(mixed, windowed(case, reach or 10**6, sinks), atol=1e-5, rtol=0)
    assert not mixed[0].any()


@pytest.mark.parametrize("backend", FUNCTIONS)
def test_pages_before_a_window_are_not_read(backend):
    query, key_pages, value_pages, lengths, table = make_case(16, 128, 4, 2, 1e4, np.array([64, 50], np.int32))
    for slot, column in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):  # windows begin in pages 3 and 2
        for pages in (key_pages, value_pages):
            pages[:, table[slot, column]] = np.nan
    case = query, key_pages, value_pages, lengths, table
    mixed = run(backend, case, reach=jnp.int32(5))
    np.testing.assert_allclose(mixed, windowed(case, 5), atol=1e-5, rtol=0)


def test_in_float32_the_tpu_kernel_rounds_keys_and_values_to_bfloat16():
    query, key_pages, value_pages, lengths, table = make_case(16, 128, 4, 2, 1e4)
    case = query, key_pages * np.float32(1.001), value_pages * np.float32(1.001), lengths, table
    error = np.abs(run("pallas_tpu", case) - expected(case)).max()
    assert 1e-4 < error < 2e-2


@pytest.mark.parametrize("num_cores, slots, kv_heads, mode", [
    (1, 64, 2, None), (2, 64, 1, "batch"), (2, 1, 2, "kv_head"), (2, 1, 1, None),
])  # fmt: skip
def test_how_two_cores_share_a_step(num_cores, slots, kv_heads, mode):
    assert pallas_attention.megacore_mode(num_cores, slots, kv_heads) == mode


@pytest.mark.parametrize("mode", ["batch", "kv_head"])
def test_two_cores_compute_what_one_does(mode, monkeypatch):
    monkeypatch.setattr(pallas_attention, "megacore_mode", lambda *_: mode)
    case = make_case(16, 128, 4, 2, 1e4)
    np.testing.assert_allclose(run("pallas_tpu", case), expected(case), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", FUNCTIONS)
def test_no_token_at_all_gives_zeros(backend):
    case = make_case(16, 128, 4, 2, 1e4, np.zeros(6, np.int32))
    np.testing.assert_array_equal(run(backend, case), 0.0)


def test_however_many_gpu_programs_share_a_slot(monkeypatch):
    case = make_case(64, 64, 4, 2, np.nan, np.array([0, 1, 256, 65, 200], np.int32))
    alone = np.asarray(expected(case))
    for programs in (1, 20, 30, 10_000):  # 1, 2, 3 and 4 (a program for each block of 64 tokens) for a slot and head
        standins.constants(monkeypatch, pallas_attention, GPU_PROGRAMS=programs)
        np.testing.assert_allclose(run("pallas_gpu", case), alone, atol=1e-5, rtol=0)


def test_large_scores_stay_finite():
    query, *rest = make_case(16, 128, 4, 2, 1e4)
    case = (query * 1e4, *rest)  # scores of some 1e5: exp of one is inf in float32
    for backend in FUNCTIONS:
        np.testing.assert_allclose(run(backend, case), expected(case), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "backend, sizes",
    [
        ("pallas_tpu", {8: 128, 64: 128, 80: 128, 128: 128, 192: 256}),
        ("pallas_gpu", {8: 16, 64: 64, 80: 128, 128: 128, 192: 256}),
        ("jnp", {8: 8, 80: 80}),
    ],
)
def test_padded_head_dim(backend, sizes):
    """Head dims are padded to what the kernel reads."""
    assert {size: padded_head_dim(size, backend) for size in sizes} == sizes


@pytest.mark.parametrize(
    "width, page_size, blocks, pages",
    [
        (80, 64, 10, 8),  # 8 pages of 64 are 512 tokens
        (81, 64, 11, 8),
        (9, 64, 2, 5),  # two blocks of 5 with one page added, not of 8 with seven
        (3, 16, 1, 3),
        (4, 1024, 4, 1),  # a page larger than a block
    ],
)
def test_tpu_blocks(width, page_size, blocks, pages):
    """Blocks cover all pages of a table."""
    assert tpu_blocks(width, page_size) == (blocks, pages)


@pytest.mark.parametrize("backend, padded_dim", [("pallas_tpu", 128), ("pallas_gpu", 16)])
def test_a_pool_that_is_too_narrow_is_refused(backend, padded_dim):
    case = make_case(16, 8, 4, 2, 0.0)
    with pytest.raises(
        ValueError, match=f"pages hold 8 numbers for a head of dimension 8, and {backend} reads {padded_dim}"
    ):
        FUNCTIONS[backend](*case, mesh=make_mesh(), interpret=True)


def test_a_page_table_beyond_a_tpus_scalar_memory_is_refused():
    slots, width = 512, 512
    shapes = [(slots, 4, 128), (2, 9, 16, 128), (2, 9, 16, 128), (slots,), (slots, width)]
    dtypes = [jnp.bfloat16] * 3 + [jnp.int32] * 2
    arrays = map(jax.ShapeDtypeStruct, shapes, dtypes)
    with pytest.raises(ValueError, match=r"512 slots and 512 pages each takes 1,0\d\d,\d\d\d bytes.*1,048,576: raise"):
        jax.eval_shape(functools.partial(pallas_tpu, mesh=make_mesh()), *arrays)


def on_a_gpu(mesh):
    """A context with the mesh on GPUs that are not there: jax 0.11 asks for their kind."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    own = mesh.abstract_mesh
    abstract = jax.sharding.AbstractMesh(own.axis_sizes, own.axis_names, own.axis_types, abstract_device=device)
    return jax.sharding.use_abstract_mesh(abstract)


# jax 0.11 still compiles for Triton, and says that it will end.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    "tensor, int8, sinks", [(1, False, False), (2, False, False), (2, True, False), (2, False, True)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backend, platform, target", [
    ("pallas_tpu", "tpu", "tpu_custom_call"), ("pallas_gpu", "cuda", "__gpu$xla.gpu.triton"),
])  # fmt: skip
def test_lowers_for_the_real_device_without_one(backend, platform, target, head_dim, tensor, int8, sinks):
    query = jax.ShapeDtypeStruct((64, 12, head_dim), jnp.bfloat16)
    shape = (2, 5000, 64, padded_head_dim(head_dim, backend))
    pages = jax.eval_shape(lambda: empty_pages(shape, None if int8 else jnp.bfloat16))
    integers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64,), (64, 81)))
    softmax = Softmax(sinks=jax.ShapeDtypeStruct((12,), jnp.float32) if sinks else None)
    mesh = make_mesh(tensor=tensor)
    attend = jax.jit(functools.partial(FUNCTIONS[backend], mesh=mesh))
    with on_a_gpu(mesh) if platform == "cuda" else contextlib.nullcontext():
        traced = attend.trace(query, pages, pages, *integers, softmax)
        assert target in traced.lower(lowering_platforms=(platform,)).as_text()

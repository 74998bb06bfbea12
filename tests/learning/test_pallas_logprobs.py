"""The kernels against the scan, interpreted; and, where libtpu is installed, through the TPU's compiler."""

import functools
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from tests.running import ROOT, environment


def make_case(rows, columns, num_words, *, tied=True, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    head = rng.normal(size=(num_words, columns) if tied else (columns, num_words)) * 3 / columns**0.5
    hidden, slopes = rng.normal(size=(rows, columns)), rng.normal(size=(2, rows))
    targets = rng.integers(num_words, size=rows).astype(np.int32)
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), targets, slopes.astype(np.float32)


def settings(*, backend, **others):
    return HeadConfig(temperature=0.7, backend=backend, interpret=backend != "scan", **others)


@functools.partial(jax.jit, static_argnames="config")
def both(hidden, head, targets, slopes, *, config):
    """((logprob, entropy), (d_hidden, d_head)) of a sum of all outputs, each with a weight of its own."""

    def weighted(hidden, head):
        outputs = token_logprobs(config, hidden, head, targets)
        return sum(jnp.vdot(slope, output) for slope, output in zip(slopes, outputs, strict=True)), outputs

    (_, outputs), gradients = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(hidden, head)
    return outputs, gradients


def assert_near(ours, wanted, tolerance=1e-5):
    """Within `tolerance` of the largest value of each array."""

    def compare(ours, wanted):
        assert ours.shape == wanted.shape and ours.dtype == wanted.dtype
        ours, wanted = (np.asarray(x, np.float32) for x in (ours, wanted))
        np.testing.assert_allclose(ours, wanted, atol=tolerance * np.abs(wanted).max(), rtol=0)

    jax.tree.map(compare, ours, wanted)


# Rows and words: whole tiles; a rest of both; less than one tile. What a tile reads beyond an array is nan here.
@pytest.mark.parametrize(
    "rows, num_words, tied",
    [
        (19, 300, True),
        (5, 40, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((32, 256, True), (32, 256, False), (19, 300, False), (5, 40, True))
        ),
    ],
)
def test_equals_the_scan(rows, num_words, tied):
    """The kernel's loss and gradients are those of the scan."""
    case = make_case(rows, 24, num_words, tied=tied)
    ours = both(*case, config=settings(tied=tied, backend="pallas_tpu", tile=(16, 128)))
    assert_near(ours, both(*case, config=settings(tied=tied, backend="scan", tile=(1024, 1024))))


@pytest.mark.parametrize(
    "backend, tile, axes",
    [
        ("scan", (8, 100), dict(fsdp=2, tensor=2)),
        ("pallas_tpu", (16, 128), dict(fsdp=2, tensor=2)),
        pytest.param("scan", (8, 100), {}, marks=pytest.mark.slow),
        pytest.param("pallas_tpu", (16, 128), {}, marks=pytest.mark.slow),
    ],
)
def test_a_frozen_head_has_no_gradient(backend, tile, axes):
    case, mesh = make_case(32, 24, 300), make_mesh(**axes) if axes else None
    outputs, (d_hidden, d_head) = both(*case, config=settings(tied=True, backend=backend, tile=tile, mesh=mesh))
    frozen, (d_same, d_none) = both(
        *case, config=settings(tied=True, backend=backend, tile=tile, mesh=mesh, frozen_head=True)
    )
    assert_near((frozen, d_same), (outputs, d_hidden), 1e-6)
    assert np.abs(d_head).max() > 0.1 and not d_none.any()


@pytest.mark.parametrize(
    "dtype, tolerance",
    [(jnp.float32, 1e-5), pytest.param(jnp.bfloat16, 2e-2, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_the_whole_vocabulary_of_a_published_model_has_the_plain_gradients(dtype, tolerance):
    hidden, head, *rest = make_case(9, 8, 151_936, dtype=dtype)
    ours = both(hidden, head, *rest, config=settings(tied=True, backend="pallas_tpu", tile=(8, 16_384)))
    outputs, gradients = both(
        hidden.astype(jnp.float32),
        head.astype(jnp.float32),
        *rest,
        config=settings(tied=True, backend="scan", tile=(16, 50_000)),
    )
    assert_near(ours, (outputs, jax.tree.map(lambda x: x.astype(dtype), gradients)), tolerance)


def test_a_float32_head_beside_bfloat16_states_keeps_its_dtype():
    hidden, head, *rest = make_case(19, 24, 300)
    case = hidden.astype(jnp.bfloat16), head, *rest
    outputs, (d_hidden, d_head) = both(*case, config=settings(tied=True, backend="pallas_tpu", tile=(16, 128)))
    assert d_hidden.dtype == jnp.bfloat16 and d_head.dtype == jnp.float32
    assert_near(
        (outputs, (d_hidden, d_head)), both(*case, config=settings(tied=True, backend="scan", tile=(16, 128))), 5e-3
    )


def test_large_logits_stay_finite():
    hidden, head, *rest = make_case(19, 24, 300)
    case = hidden * 1e4, head, *rest  # exp of one is inf in float32
    ours = both(*case, config=settings(tied=True, backend="pallas_tpu", tile=(16, 128)))
    assert_near(ours, both(*case, config=settings(tied=True, backend="scan", tile=(16, 128))), 1e-4)


@pytest.mark.parametrize(
    "axes", [pytest.param(dict(tensor=8), marks=pytest.mark.slow), dict(data=2, fsdp=2, tensor=2)], ids=str
)
def test_one_device_equals_eight(axes):
    case = make_case(20, 24, 600)
    ours = both(*case, config=settings(tied=True, backend="pallas_tpu", tile=(8, 128), mesh=make_mesh(**axes)))
    assert_near(ours, both(*case, config=settings(tied=True, backend="scan", tile=(1024, 1024))))


# ---- with the compiler -------------------------------------------------------------------------------------------

# Value and gradients of 4,096 tokens at the head of a 1.5B model, over a whole slice; prints what a chip's memory must
# hold beside arguments and results.
PROGRAM = """
import os, sys
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
import jax, jax.numpy as jnp
from jax.experimental import topologies
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.platform import head_tile
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
topology, tensor, tied, head_dtype = sys.argv[1:]
columns, words, tied = 1536, 151_936, tied == "tied"
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
mesh = mesh_lib.make_mesh(fsdp=len(devices) // int(tensor), tensor=int(tensor), devices=devices)
def shape(sizes, dtype, *names):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=mesh_lib.sharding(mesh, names))
hidden = shape((4096, columns), jnp.bfloat16, "rows", None)
axes = ("vocab", "embed") if tied else ("embed", "vocab")
head = shape((words, columns) if tied else (columns, words), head_dtype, *axes)
targets = shape((4096,), jnp.int32, "rows")
def total(hidden, head, targets):
    tile = head_tile("tpu", columns, jnp.bfloat16)
    outputs = token_logprobs(HeadConfig(1.0, tied, mesh, "pallas_tpu", tile), hidden, head, targets)
    return sum(x.sum() for x in outputs)
program = jax.jit(jax.value_and_grad(total, argnums=(0, 1)), out_shardings=(None, (hidden.sharding, head.sharding)))
print(program.lower(hidden, head, targets).compile().memory_analysis().temp_size_in_bytes)
"""
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed")


@needs_libtpu
@pytest.mark.parametrize("topology, tensor, tied, head_dtype, most", [
    # 12 MB of bfloat16 d_hidden are a result; no array of [4096, 151936] is anywhere: 1,187 MiB in bfloat16.
    ("v5e:1x1", 1, "tied", "bfloat16", 2**20),
    ("v6e:1x1", 1, "untied", "bfloat16", 2**20),
    # Half the words for each chip, 446 MiB in float32: gathered in bfloat16 over fsdp, and their gradient before it is
    # scattered.
    ("v5p:2x2x1", 2, "tied", "float32", 2 * 446 * 2**20),
])  # fmt: skip
def test_compiles_for(topology, tensor, tied, head_dtype, most):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, topology, str(tensor), tied, head_dtype],
        cwd=ROOT, env=environment(""), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) < most

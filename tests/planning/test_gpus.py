"""GPUs that are not there: their description, messages, and, where the CUDA plugin is installed, the real compiler."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.planning import gpus
from reinforce_ada_jax.planning.compilation import topology_devices
from reinforce_ada_jax.planning.roofline import CHIPS, GIB, chip_of
from reinforce_ada_jax.policy import cudnn_attention
from reinforce_ada_jax.policy.transformer import LayerPlace
from reinforce_ada_jax.sampling.pallas_attention import pallas_gpu
from tests import standins


def test_three_quarters_of_the_memory_are_a_programs():
    # 79.11 GiB of an H100, of which JAX takes 59.33.
    assert chip_of("h100:8").hbm_bytes / GIB == pytest.approx(59.33, abs=0.01)
    assert (CHIPS["h200"].bandwidth, CHIPS["a100"].flops, CHIPS["v5e"].platform) == (4.8e12, 312e12, "tpu")


@pytest.mark.parametrize(
    ("topology", "message"),
    [("h100:2x4", "write the GPUs of one host, such as h100:8"), ("a100:0", "'a100:0'"), ("h100:8", "needs its comp")],
)
def test_bad_topologies(topology, message, monkeypatch):
    """A wrong topology, or a compiler that is missing, is named."""
    standins.without_packages(monkeypatch, *gpus.PLUGINS)
    with pytest.raises(ValueError, match=message):
        topology_devices(topology)


class Device:
    def __init__(self, capability):
        self.compute_capability = capability


def test_jax_is_answered_for_the_topologys_device_alone():
    asked = gpus.cudnn.check_compute_capability
    for capability, answers in (("8.0", [True, False, False]), ("9.0", [True, True, False])):
        with gpus.answering_for(Device(capability)):
            assert [gpus.cudnn.check_compute_capability(needed) for needed in ("8.0", "9.0", "10.3")] == answers
    with gpus.answering_for(jax.devices()[0]):
        assert gpus.cudnn.check_compute_capability is asked
    assert gpus.cudnn.check_compute_capability is asked


needs_plugin = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, gpus.PLUGINS)), reason="the CUDA plugin isn't installed"
)


@pytest.fixture
def cache_for_others():
    """Has the cache of programs keep those of other tests again, as `gpu_devices` does not."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


@needs_plugin
@pytest.mark.usefixtures("cache_for_others")
@pytest.mark.parametrize(("topology", "packed"), [("h100:2", True), ("h100:1", False), ("a100:1", False)])
def test_attention_of_the_learner_compiles(topology, packed):
    devices = topology_devices(topology)
    mesh = make_mesh(1, 1, len(devices), devices)
    arrays = [jax.ShapeDtypeStruct((2, 256, heads, 128), jnp.bfloat16) for heads in (12, 2, 2)]
    segment_ids = jax.ShapeDtypeStruct((2, 256), jnp.int32) if packed else None

    def loss(arrays, segment_ids):
        mixed = cudnn_attention.attend(*arrays, LayerPlace(0), segment_ids, mesh=mesh, max_segments=4)
        return jnp.sum(mixed, dtype=jnp.float32)

    with gpus.answering_for(devices[0]):
        text = jax.jit(jax.value_and_grad(loss)).lower(arrays, segment_ids).compile().as_text()
    assert '"__cudnn$fmhaSoftmax"' in text and '"__cudnn$fmhaSoftmaxBackward"' in text


@needs_plugin
@pytest.mark.usefixtures("cache_for_others")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("topology", ["h100:1", "h200:1", "a100:1"])
def test_attention_of_the_engine_compiles(topology):
    mesh = make_mesh(1, 1, 1, topology_devices(topology))
    query, pages = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((64, 12, 128), (2, 500, 64, 128)))
    integers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64,), (64, 48)))
    compiled = jax.jit(functools.partial(pallas_gpu, mesh=mesh)).lower(query, pages, pages, *integers).compile()
    assert "xla.gpu.triton" in compiled.as_text()

"""NVIDIA GPUs that need not exist, as XLA's CUDA compiler describes them; no driver is needed either."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # see `answering_for`
from jax.experimental import topologies

from reinforce_ada_jax.policy.cudnn_attention import version_of

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


class Gpu(NamedTuple):
    """A GPU as the compiler sees it: the numbers of XLA's `xla/backends/gpu/target_config/specs`."""

    name: str  # as CUDA has it
    capability: tuple[int, int]  # compute capability
    features: str  # of the instruction set, beyond those of the capability
    cores: int  # multiprocessors
    lanes: int  # float32 operations that one of them begins in a cycle
    shared_bytes: int  # shared memory of one of them; a block of threads gets 1,024 less
    l2_bytes: int  # of the level-2 cache
    memory_bytes: int  # of the device
    bandwidth: int  # of the memory, bytes per second
    clock_ghz: float  # of the multiprocessors


_H100 = Gpu(
    "NVIDIA H100 80GB HBM3", (9, 0), "ACCELERATED_FEATURES", 132, 128, 233_472, 52_428_800, 84_942_979_072,
    3_352_320_000_000, 1.98,
)  # fmt: skip
GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), "NONE", 108, 64, 167_936, 41_943_040, 85_100_068_864, 2_039_040_000_000, 1.41
    ),
    "h100": _H100,
    "h200": _H100._replace(name="NVIDIA H200 141GB HBM3e", memory_bytes=151_397_597_184, bandwidth=4_800_000_000_000),
}
# JAX's allocator takes three quarters of a GPU's memory (XLA_PYTHON_CLIENT_MEM_FRACTION).
MEMORY_SHARE = 0.75


def _description(gpu: Gpu) -> str:
    """Returns the text of XLA's `GpuTargetConfigProto`; versions are those of the packages of jax 0.10 and 0.11."""
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  name: "{gpu.name}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {gpu.features} }}
  core_count: {gpu.cores} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock_ghz}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: {gpu.shared_bytes} shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_bytes - 1024}
  l2_cache_size: {gpu.l2_bytes} device_memory_size: {gpu.memory_bytes} memory_bandwidth: {gpu.bandwidth}
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""


def gpu_devices(topology: str) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]  # a class at run time
    """Returns the devices of a host with GPUs, named as h100:8, which need not exist.

    Raises ValueError where the CUDA compiler is not installed, or the topology names no number of GPUs.
    """
    name, _, count = topology.partition(":")
    if not count.isdecimal() or not int(count):
        raise ValueError(f"--topology is {topology!r}; write the GPUs of one host, such as {name}:8.")
    if not any(map(importlib.util.find_spec, PLUGINS)):
        raise ValueError(
            "compiling for a GPU needs its compiler, which any machine can run: pip install 'jax[cuda12]'."
        )
    jax.config.update("jax_platforms", "cpu")  # leave a GPU of this machine to its users
    # Without a GPU its programs cannot be loaded again, so none is kept in a persistent cache.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    # partitions x hosts x devices of a host.
    options: dict[str, Any] = dict(target_config=_description(GPUS[name]), topology=f"1x1x{count}")
    return list(topologies.get_topology_desc(platform="cuda", **options).devices)


@contextlib.contextmanager
def answering_for(device: Any) -> Iterator[None]:
    """Makes JAX check this device, instead of those of this machine, when it lowers attention by cuDNN."""
    capability = getattr(device, "compute_capability", None)
    asked = cudnn.check_compute_capability
    if capability is not None:
        cudnn.check_compute_capability = lambda needed: version_of(needed) <= version_of(capability)
    try:
        yield
    finally:
        cudnn.check_compute_capability = asked

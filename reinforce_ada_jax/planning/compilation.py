"""Compiling a run's programs for TPUs or GPUs that need not exist."""

import dataclasses
import importlib.util
import os
import re
import time

import jax
from jax.experimental import topologies

from reinforce_ada_jax.planning import roofline
from reinforce_ada_jax.planning.gpus import GPUS, gpu_devices
from reinforce_ada_jax.planning.programs import AbstractRun, Program
from reinforce_ada_jax.planning.roofline import Chip

# Slices of eight chips that are one host; the compiler's default is four chips to a host.
ONE_HOST = {"v5e:2x4": (2, 4, 1), "v6e:2x4": (2, 4, 1)}


@dataclasses.dataclass(frozen=True)
class ProgramResult:
    """Memory and least time of a compiled program; sizes and work per device.

    `hbm_peak_bytes` is the peak of the program alone, with its arguments; a run keeps `hbm_beside_bytes` at the same
    time. If a program needs too much memory, it has a `reason` but no arguments and temporaries, and a peak only if the
    memory was HBM. `least_seconds` is the time for the bytes or for the FLOPs, whichever is larger.
    """

    program: str
    hbm_peak_bytes: int | None
    hbm_beside_bytes: int
    hbm_limit_bytes: int
    flops: float | int
    bytes: float | int
    fits: bool
    over_bytes: int
    unit: str = "call"
    compile_seconds: float = 0.0
    hbm_argument_bytes: int | None = None
    hbm_temporary_bytes: int | None = None
    reason: str | None = None
    least_seconds: float = 0.0
    bound: str = ""


def topology_devices(topology: str, slices: int = 1) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]  # a class at run time
    """Returns the devices of one or more equal slices, or of a host with GPUs, which need not exist.

    Raises ValueError where no compiler for them is installed, or there is no such slice.
    """
    if topology.partition(":")[0] in GPUS:
        if slices > 1:
            raise ValueError(f"--slices={slices} counts slices of TPUs, and --topology={topology} is a host with GPUs.")
        return gpu_devices(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for a TPU needs its compiler, which any machine can run: pip install libtpu.")
    # The compiler asks where it runs: first a metadata server, which hangs outside Google's cloud, and then these
    # variables, with a warning if they are missing. Their values change nothing: the topology is named.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # No chip is touched, so several processes may compile at a time, also during a run that has the chips.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")  # leave a TPU of this machine to its users
    shape = {"chips_per_host_bounds": ONE_HOST[topology]} if topology in ONE_HOST else {}
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology, num_slices=slices, **shape)
        return list(described.devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology={topology}: {error}") from error


def compile_program(program: Program, chip: Chip) -> ProgramResult:
    """Compiles a program; a lack of memory is a result, any other error of the compiler is raised."""
    begin = time.monotonic()
    arguments = temporaries = peak = reason = None
    cost = program.cost
    try:
        compiled = program.lower().compile()
        memory = compiled.memory_analysis()
        if memory is not None:
            arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
            peak = memory.peak_memory_in_bytes
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        peak = _needed_bytes(reason)
    seconds, bound = roofline.roofline(cost, chip)
    over = 0 if peak is None else max(0, peak + program.beside_bytes - chip.hbm_bytes)
    return ProgramResult(
        program=program.name,
        hbm_peak_bytes=peak,
        hbm_beside_bytes=program.beside_bytes,
        hbm_limit_bytes=chip.hbm_bytes,
        flops=cost.flops,
        bytes=cost.bytes,
        fits=reason is None and not over,
        over_bytes=over,
        unit=program.unit,
        compile_seconds=round(time.monotonic() - begin, 1),
        hbm_argument_bytes=arguments,
        hbm_temporary_bytes=temporaries,
        reason=reason,
        least_seconds=seconds,
        bound=bound,
    )


def resident_result(run: AbstractRun, chip: Chip) -> ProgramResult:
    """Returns a result for the memory of a collection: if it doesn't fit, nothing can be drawn."""
    size = run.resident_bytes
    over = max(0, size - chip.hbm_bytes)
    return ProgramResult("learner state and cache", size, 0, chip.hbm_bytes, 0.0, 0.0, fits=not over, over_bytes=over)


def _needed_bytes(message: str) -> int | None:
    """Returns the HBM that a CompileTimeHbmOom message names: "... (27.14G) exceeds available HBM (15.75G)"."""
    found = re.search(r"\(([\d.]+)([KMG])\) exceeds available HBM", message)
    return int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[found[2]]) if found else None

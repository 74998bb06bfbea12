"""Measuring of benchmarks: calls that take turns, medians, memory, and the machine."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from bench.baselines.json_worker import resident_bytes
from bench.options import log

T = TypeVar("T")


def in_turns(runs: Mapping[str, Callable[[int], T]], repeat: int, described: Callable[[T], str]) -> dict[str, list[T]]:
    """Calls functions alternately, so that other programs disturb all alike, and logs a line on each result.

    They get the number of the turn, 0 to `repeat`. Turn 0 compiles: its results are the first of each list.
    """
    found: dict[str, list[T]] = {name: [] for name in runs}
    for turn in range(1 + repeat):
        for name, run in runs.items():
            found[name].append(run(turn))
            log(f"{turn}/{repeat} {name}: {described(found[name][-1])}")
    return found


def processor_seconds(runs: Mapping[str, Callable[[int], object]], repeat: int) -> dict[str, list[float]]:
    """Returns the processor seconds of this process, all its threads, in turns 1 to `repeat` of `in_turns`."""

    def measured(run: Callable[[int], object], turn: int) -> float:
        begin = time.process_time()
        run(turn)
        return time.process_time() - begin

    measuring = {name: functools.partial(measured, run) for name, run in runs.items()}
    found = in_turns(measuring, repeat, "{:.2f} processor seconds".format)
    return {name: seconds[1:] for name, seconds in found.items()}


def median_ratio(seconds: list[float], others: list[float]) -> float:
    """Returns the median over turns of the ratio of two measurements."""
    return float(np.median(np.divide(seconds, others)))


def median_seconds(call: Callable[[], Any], repeat: int) -> float:
    """Returns the median time of a call until its result is there; the first one, which compiles, is left out."""
    seconds = []
    for _ in range(1 + repeat):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def machine() -> dict[str, str]:
    """Returns the device and the version of JAX, for a report."""
    device = jax.devices()[0]
    return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}


def memory_bytes(*, peak: bool) -> int:
    """Returns the memory in use: the first device's where it keeps a count, else this process's."""
    counts = jax.devices()[0].memory_stats() or {}
    found = counts.get("peak_bytes_in_use" if peak else "bytes_in_use")
    return resident_bytes("VmHWM" if peak else "VmRSS") if found is None else found

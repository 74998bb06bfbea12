"""Checks that weights and cache fit the memory of a CPU's machine, which kills a process that needs more."""

import os
import pathlib

from reinforce_ada_jax.sampling.engine import Engine

_GROUP = pathlib.Path("/sys/fs/cgroup/memory.max")  # of a container, or of a service


def of_machine() -> int:
    """Returns the bytes of memory that this process may take at most."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _GROUP.read_text().strip() if _GROUP.is_file() else "max"
    return physical if limit == "max" else min(physical, int(limit))


def check(engine: Engine, weight_bytes: int) -> None:
    """Raises ValueError where the cache and `weight_bytes` (moments included) are more than a CPU's machine has."""
    if engine.mesh.devices.flat[0].platform != "cpu" or engine.spans_processes:
        return
    options, cache = engine.options, engine.cache_bytes * engine.replicas
    needed, there = cache + weight_bytes, of_machine()
    if needed > there:
        raise ValueError(
            f"the cache ({cache / 2**30:,.1f} GiB) and the weights ({weight_bytes / 2**30:,.1f} GiB) need "
            f"{needed / 2**30:,.1f} GiB, and this machine has {there / 2**30:,.1f}. The cache is that of "
            f"{options.slots} slots with prompts of up to {options.max_prompt_tokens:,} and responses of up to "
            f"{options.max_response_tokens:,} tokens: lower one of them, or the pages (sampling.pages)."
        )

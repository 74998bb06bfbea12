"""Programs that are compiled in threads before they are called, and what the progress line says meanwhile."""

import pathlib
import resource
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from reinforce_ada_jax.distributed.compilation import EarlyCompilation, abstract, return_freed_memory
from reinforce_ada_jax.training.compile_counter import CompileCounter


def test_calls_find_programs_compiled():
    cube, whole = jax.jit(lambda x: x * x * x), NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec())
    x = jax.device_put(jnp.full((3,), 2.0), whole)
    with EarlyCompilation() as compilation:
        ready = compilation.add({"cube": lambda: cube.lower(abstract(x))})
        ready(print)
        compiles = CompileCounter()
        assert cube(x).tolist() == [8.0, 8.0, 8.0] and compiles.total == 0


def test_waiting_names_the_program_and_later_ones_begin_after_it():
    release, said, order = threading.Event(), [], []

    def lower(name, blocked=False):
        def lowered():
            if blocked:
                assert release.wait(10)
            order.append(name)
            return jax.jit(lambda x: x + 1).lower(jnp.ones(()))

        return lowered

    def report(text):
        said.append(text)
        release.set()

    with EarlyCompilation() as compilation:
        window = compilation.add({"decode window": lower("window", blocked=True)})
        update = compilation.add({"update": lower("update"), "scores": lower("scores")})
        window(report)
        update(report)
    assert said[0] == "compiling decode window (1 of 3)"
    assert {*said[1:]} <= {"compiling decode window (1 of 3)", "compiling update (2 of 3)", "compiling scores (3 of 3)"}
    assert order[0] == "window" and {*order} == {"window", "update", "scores"}


def test_errors_of_a_program_and_of_the_report_end_the_waiting():
    release = threading.Event()

    def fails():
        assert release.wait(10)
        raise ValueError("no such layout")

    def interrupted(_):
        raise KeyboardInterrupt

    with EarlyCompilation() as compilation:
        ready = compilation.add({"window": fails})
        with pytest.raises(KeyboardInterrupt):
            ready(interrupted)
        release.set()
        with pytest.raises(ValueError, match="no such layout"):
            ready(print)


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries keep or return memory by rules of their own")
def test_memory_that_is_free_between_used_blocks_goes_back_to_the_system():
    blocks = [b"x" * 100_000 for _ in range(1000)]  # too small for mappings of their own
    used = blocks[::50]
    full = resident_bytes()
    del blocks
    return_freed_memory()
    assert full - resident_bytes() > 50e6 and len(used) == 20

"""Programs compiled in threads while the host prepares a start: XLA needs no Python while it compiles.

A later call finds the program in JAX's own caches, if it was compiled here for the call's shapes and shardings.
"""

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax

THREADS = 2  # with more threads the first program, which is needed first, would compile more slowly
LOOK_EVERY_S = 0.5

Lower = Callable[[], jax.stages.Lowered]
# Returns when programs are compiled; its argument is called with text for the progress line, and may raise.
Ready = Callable[[Callable[[str], None]], None]


def always_ready(_: Callable[[str], None]) -> None:
    """Returns at once: each program is compiled when it is called."""


def abstract(arrays: Any) -> Any:
    """Returns shapes, dtypes and shardings of arrays, to lower a program for them without keeping them."""

    def shape(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)

    return jax.tree.map(shape, arrays)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Returns shapes and dtypes with their shardings; one sharding may be that of a whole subtree."""

    def sharded(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(sharded, shapes, jax.tree.broadcast(shardings, shapes))


def return_freed_memory() -> None:
    """Returns freed memory of the C library to the system; does nothing where the C library can't.

    The compiler of the programs of SmolLM2-135M left 0.5 GB in the heap, which nothing used afterwards.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


class EarlyCompilation(contextlib.AbstractContextManager["EarlyCompilation"]):
    """Programs that are compiled, in the order in which they are added, before they are called.

    Only a single process with CPUs or TPUs compiles early. On GPUs XLA measures kernels while it compiles, so nothing
    else may run at that time. Several processes compile each program when they call it, all in the same order.
    """

    def __init__(self):
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="compiling")
        self._programs: dict[str, Future[None]] = {}

    def add(self, programs: Mapping[str, Lower]) -> Ready:
        """Compiles programs after those that were added before, and returns a function that waits for them.

        Their names are for the progress line. They must be lowered for the arguments of the later calls.
        """
        if jax.process_count() > 1 or jax.default_backend() == "gpu":
            return always_ready
        earlier = list(self._programs.values())

        def compile_program(lower: Lower) -> None:
            wait(earlier)
            lower().compile()
            return_freed_memory()

        for name, lower in programs.items():
            self._programs[name] = self._pool.submit(compile_program, lower)

        def ready(report: Callable[[str], None]) -> None:
            for number, (name, compiled) in enumerate(self._programs.items(), start=1):
                if name not in programs:
                    continue
                while not compiled.done():
                    report(f"compiling {name} ({number} of {len(self._programs)})")
                    wait([compiled], LOOK_EVERY_S)
                compiled.result()

        return ready

    def __exit__(self, *_: object) -> None:
        """Starts no further program; those in progress are compiled before the interpreter ends."""
        self._pool.shutdown(wait=False, cancel_futures=True)

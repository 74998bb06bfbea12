"""Stand-ins that several tests share, each made by one function: limits, clocks, packages, processes."""

import contextlib
import importlib.util
import resource
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.learning import platform
from reinforce_ada_jax.policy import rounded


def constants(patch: pytest.MonkeyPatch, module: types.ModuleType, **values: Any) -> None:
    """Limits and waits of a module that a test could reach with gigabytes and minutes only get other values."""
    for name, value in values.items():
        assert name.isupper(), f"{name} is no constant"
        patch.setattr(module, name, value)


def clock(patch: pytest.MonkeyPatch, module: types.ModuleType) -> types.SimpleNamespace:
    """A clock of which `seconds` is what the module's `time.monotonic` returns."""
    now = types.SimpleNamespace(seconds=0.0)
    patch.setattr(module.time, "monotonic", lambda: now.seconds)
    return now


@contextlib.contextmanager
def full_disk(room: int = 50_000) -> Iterator[None]:
    """A write beyond the first `room` bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def without_packages(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Packages are not installed, as far as `importlib.util.find_spec` says."""
    found = importlib.util.find_spec
    patch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else found(name, *rest))


def of_processes(patch: pytest.MonkeyPatch, **functions: Callable) -> None:
    """Functions of `distributed.processes` answer as in a run of several."""
    for name, function in functions.items():
        patch.setattr(processes, name, function)


def processor(patch: pytest.MonkeyPatch, *, fast_in_bfloat16: bool) -> None:
    """The processor multiplies in bfloat16 faster, or not; else that is measured."""
    patch.setattr(rounded, "is_faster", lambda: fast_in_bfloat16)


def accelerator(patch: pytest.MonkeyPatch, *, in_program: int = 0, gathers: bool = False) -> None:
    """Learners are those of a TPU: with `in_program` micro-batches in a program, and with room for gathered weights."""
    if in_program:
        patch.setattr(platform, "micro_batches_per_program", lambda *_: in_program)
    if gathers:
        patch.setattr(platform, "gathers_once", lambda *_: True)


def not_called(patch: pytest.MonkeyPatch, owner: Any, *names: str) -> None:
    """A call of these functions fails the test."""
    for name in names:
        patch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[..., None]) -> None:
    """Calls `action` before each call of a function or method, with the same arguments."""
    original = getattr(owner, name)

    def both(*arguments: Any, **keywords: Any) -> Any:
        action(*arguments, **keywords)
        return original(*arguments, **keywords)

    patch.setattr(owner, name, both)


def failing(patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    """Each call of a function or method raises this error."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    patch.setattr(owner, name, fail)


def import_paths(patch: pytest.MonkeyPatch) -> None:
    """Paths that a test adds to `sys.path` are gone after it."""
    patch.setattr(sys, "path", list(sys.path))

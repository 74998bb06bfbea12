"""Commands as several processes of this machine, which make a pod of hosts with CPU devices."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from reinforce_ada_jax.distributed import processes as processes_lib
from tests import compiling
from tests.forked import Forked
from tests.running import environment, free_port


def start(
    arguments: Sequence[str],
    count: int,
    *,
    devices: int,
    env: Mapping[str, str] = MappingProxyType({}),
    own: Callable[[], Sequence[str]] = tuple,
) -> list[Forked]:
    """Starts a command as `count` processes.

    Args:
      arguments: of all.
      count: of processes.
      devices: that they have together.
      env: is added to their environment.
      own: returns more arguments of each.
    """
    port = free_port()
    xla = f"{compiling.DEVICES}{devices // count} {compiling.QUICKLY}"
    started = []
    for index in range(count):
        variables = environment(xla) | env
        if count > 1:
            variables |= {processes_lib.ADDRESS: f"127.0.0.1:{port}", processes_lib.COUNT: str(count)}
            variables |= {processes_lib.INDEX: str(index)}
        started.append(Forked([*arguments, *own()], variables))
    return started


def finished(processes: Sequence[Forked]) -> list[str]:
    """Waits for processes that end without errors; returns their output."""
    try:
        said = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return [out for out, _ in said]

"""Several processes as one run: one a host, each with devices of its own, all with the same program.

Every process decodes its share of the prompts for itself; they meet in `exchange` and in programs over the whole mesh.
So each of them must take the same steps in the same order: what one alone knows, it tells the others first
(`exchange`, `any_of`). Only process 0 writes files other than checkpoints.

With one process everything here is free: nothing is sent and nothing is compiled.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from reinforce_ada_jax.distributed.watchdog import TIMEOUT_S, Watchdog

# Bytes that `exchange` sends at a time. One size, so that one program serves every exchange of a run.
CHUNK = 2**20
# Seconds for which a host may not see in a shared folder what another one wrote: NFS and gcsfuse keep old answers.
SHARED_AFTER_S = 60
NEWS_S = 5  # between a collective that fails and the news that a process is gone
# The variables that name the processes where no cluster does; the first is JAX's own.
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's own, HOST:PORT: where process 0 listens, if not on all its addresses

_watchdog: Watchdog | None = None


def initialize(*, cluster: bool) -> None:
    """Joins the other processes of the run, before any device is touched; returns when all are there.

    Args:
      cluster: the surroundings (a TPU pod, Slurm, MPI) know the processes. Else they are known from the environment,
        JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID; without these there is one process.

    Raises:
      ValueError: some of the variables are set and others are not, or they name no process; or `cluster`, and there is
        none; or the processes can't connect with each other.
    """
    given = {name: os.environ[name] for name in (ADDRESS, COUNT, INDEX) if os.environ.get(name)}
    if not cluster and not given:
        return
    # JAX would take SIGTERM for itself; the run saves and ends on it.
    jax.config.update("jax_enable_preemption_service", False)
    if cluster:
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(given.get(ADDRESS), *_numbers(given))
    if count() > 1:
        _join_watchdog()


def _numbers(given: dict[str, str]) -> tuple[int, int]:
    missing = [name for name in (ADDRESS, COUNT, INDEX) if name not in given]
    numbers = [given.get(name, "") for name in (COUNT, INDEX)]
    if missing or not all(number.isdecimal() for number in numbers) or not int(numbers[1]) < int(numbers[0]):
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(
            f"a run of several processes needs {ADDRESS}=HOST:PORT, {COUNT}=N and {INDEX}=0..N-1 in the environment of "
            f"each; here it has {said}. Set all three, or none."
        )
    return int(numbers[0]), int(numbers[1])


def _host(address: str) -> str:
    """The host of HOST:PORT; an IPv6 address may stand in brackets."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def _join_watchdog() -> None:
    from jax._src import distributed as jax_distributed  # noqa: PLC0415  (its key-value store has no public name)

    global _watchdog  # noqa: PLW0603  (as the processes' connection in JAX itself: one for a process, from start to end)
    store, address = jax_distributed.global_state.client, jax_distributed.global_state.coordinator_address
    key = "reinforce_ada_jax/watchdog"
    _watchdog = Watchdog(index(), count())
    if index() == 0:
        store.key_value_set(key, _watchdog.listen(_host(os.environ.get(BIND, ""))))
    else:
        try:
            said = store.blocking_key_value_get(key, 1000 * TIMEOUT_S)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"process 0 at {address} did not say within {TIMEOUT_S} s where it listens ({error}): see what its "
                "log says."
            ) from error
        _watchdog.connect(_host(address), said)
    _watchdog.start()


def index() -> int:
    """This process, from 0."""
    return jax.process_index()


def count() -> int:
    """Processes of the run."""
    return jax.process_count()


def is_writer() -> bool:
    """Whether this process writes the run's files and speaks for it at the terminal."""
    return index() == 0


def exchange(payload: bytes) -> list[bytes]:
    """Everybody's payload, by process; each must call it, and gets the same."""
    if count() == 1:
        return [payload]
    sizes = multihost_utils.process_allgather(np.int64([len(payload)]).view(np.int32)).view(np.int64)[:, 0].tolist()
    received = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), CHUNK):
        chunk = np.zeros(CHUNK, np.uint8)
        part = np.frombuffer(payload[start : start + CHUNK], np.uint8)
        chunk[: len(part)] = part
        for process, theirs in enumerate(multihost_utils.process_allgather(chunk)):
            received[process] += theirs.tobytes()
    return [bytes(theirs[:size]) for theirs, size in zip(received, sizes, strict=True)]


def any_of(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    return flag if count() == 1 else any(map(bool, exchange(b"1" if flag else b"")))


def check_same(what: str, text: str) -> None:
    """Raises ValueError where a process has another text; also a point that none passes before all are there."""
    texts = exchange(text.encode())
    others = [process for process, theirs in enumerate(texts) if theirs != texts[0]]
    if others:
        raise ValueError(
            f"{what} differ between process 0 and process {', '.join(map(str, others))} of {len(texts)}: start all "
            "with the same command, the same code and the same files."
        )


def fetch(array: jax.Array | np.ndarray) -> np.ndarray:
    """The whole of an array on the host, in each process, wherever its parts are."""
    if isinstance(array, np.ndarray) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def ask_to_stop() -> None:
    """Tells the others that this process was asked to stop; they hear of it in `asked_to_stop`."""
    if _watchdog is not None:
        _watchdog.ask_to_stop()


def asked_to_stop() -> bool:
    """Whether another process said so."""
    return _watchdog is not None and _watchdog.asked_to_stop


def leave() -> None:
    """Says that this process ends as all do: the others are not to take it for lost."""
    if _watchdog is not None:
        _watchdog.leave()


@contextlib.contextmanager
def member() -> Iterator[None]:
    """Around `initialize` and a run: leaves the others at its end; a failure in it ends this process at once.

    The others notice by the end of its connection. JAX's own way out waits until all processes come there, which those
    that wait in a program never do.
    """
    try:
        yield
    except BaseException as error:
        if _watchdog is None or _watchdog.leaving:
            raise
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
            _wait_for_news(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    leave()


def _wait_for_news(error: BaseException) -> None:
    """Where a collective failed, somebody else is probably gone: the watchdog says who, and ends this process."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(NEWS_S)

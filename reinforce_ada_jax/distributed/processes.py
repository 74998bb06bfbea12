"""Several processes as one run: one per host, each with its own devices, all with the same program.

Every process draws for its shard of the prompts (training/sharded_collection.py). Processes meet in `exchange` and in
programs over the whole mesh, such as each decode window. So all processes run the same programs in the same order. If
only one process knows something that decides about this, it tells the others first (`exchange`, `any_of`). Process 0
writes the files of the run; the others write only checkpoints, their own logs and parts of stores of responses.

With one process nothing is sent and nothing is compiled.

With `mesh.sampler` and several processes, the last ones only draw, and the others learn. `count`, `exchange` and the
functions that use them then cover only the processes that learn. The two groups send messages (`send`, `receive`), and
share one program, which transfers the weights (sampling/hand_over.py).
"""

import collections
import contextlib
import functools
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed.mesh import devices_of_processes
from reinforce_ada_jax.distributed.watchdog import NEWS_S, RESTART, TIMEOUT_S, UnreachableError, Watchdog

# Bytes that `exchange` sends at a time. One size, so that one program serves every exchange of a run.
CHUNK = 2**20
# Seconds until a host sees in a shared folder what another one wrote: NFS and gcsfuse cache answers.
SHARED_AFTER_S = 60
# The variables that name the processes where no cluster does; the first is JAX's own.
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# Seconds until all processes must have started; JAX waits longer and then aborts with a stack trace.
JOIN_S, JOIN = 120.0, "REINFORCE_ADA_JOIN_S"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's own, HOST:PORT: where process 0 listens, if not on all its addresses

MESSAGES, POLL_MS = "reinforce_ada_jax/messages", 1_000  # `receive` notices a signal within this time
_MORE, _LAST = b"+", b"."  # first byte of a part of a message, of at most CHUNK bytes

_watchdog: Watchdog | None = None
_num_learning = 0  # number of processes that learn, the first ones, while the others only draw; 0: all do both
_num_messages: collections.Counter[str] = collections.Counter()  # parts sent or received, by sender and receiver


def initialize(*, cluster: bool) -> None:
    """Joins the other processes of the run, before any device is touched; returns when all are there.

    With `cluster` the cluster (a TPU pod, Slurm, MPI) knows the processes. Otherwise the environment names them:
    JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID; without these there is one process. If
    another process does not start within REINFORCE_ADA_JOIN_S seconds (120), or can't be reached, this process ends
    with exit code RESTART: the other process may have been lost.

    Raises ValueError if only some of the variables are set, or they name no process; or if there is no cluster.
    """
    given = {name: os.environ[name] for name in (ADDRESS, COUNT, INDEX) if os.environ.get(name)}
    if not cluster and not given:
        return
    # JAX would take SIGTERM for itself; the run saves and ends on it.
    jax.config.update("jax_enable_preemption_service", False)
    address, (number, own) = (None, (None, None)) if cluster else (given.get(ADDRESS), _numbers(given))
    seconds = _join_seconds()
    with _ending_after(seconds):
        jax.distributed.initialize(address, number, own, initialization_timeout=math.ceil(seconds) + 60)
    number, own = _members()
    if number > 1:
        try:
            _join_watchdog(number, own)
        except UnreachableError as error:
            cli.fail(error, RESTART)


def _join_seconds() -> float:
    text = os.environ.get(JOIN, "")
    try:
        seconds = float(text or JOIN_S)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"{JOIN} is {text!r}; it must be a number of seconds above 0. Set it, or leave it out.")
    return seconds


@contextlib.contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    """Ends this process if the block takes longer; the block waits until the other processes have started."""

    def end() -> None:
        cli.fail(
            f"not all processes of the run started within {seconds:g} s. See the logs of the others, and start all "
            f"with the same command; {JOIN}=SECONDS waits longer.",
            RESTART,
            at_once=True,
        )

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _numbers(given: dict[str, str]) -> tuple[int, int]:
    missing = [name for name in (ADDRESS, COUNT, INDEX) if name not in given]
    numbers = [given.get(name, "") for name in (COUNT, INDEX)]
    if missing or not all(number.isdecimal() for number in numbers) or not int(numbers[1]) < int(numbers[0]):
        found = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(
            f"a run of several processes needs {ADDRESS}=HOST:PORT, {COUNT}=N and {INDEX}=0..N-1 in the environment of "
            f"each; here it has {found}. Set all three, or none."
        )
    return int(numbers[0]), int(numbers[1])


def _host(address: str) -> str:
    """Returns the host of HOST:PORT; an IPv6 address may be in brackets."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def _known_to_jax() -> Any:
    """Returns what JAX's coordinator has told this process: addresses, numbers and the key-value store."""
    from jax._src import distributed as jax_distributed  # noqa: PLC0415  (it has no public name)

    return jax_distributed.global_state


def _coordination() -> tuple[Any, str]:
    """Returns JAX's key-value store of the processes, and the address of process 0."""
    store, address = _known_to_jax().client, _known_to_jax().coordinator_address
    assert store is not None and address is not None  # `initialize` has joined the run
    return store, address


def _members() -> tuple[int, int]:
    """Returns the number of all processes, and this one's, as JAX's coordinator has them.

    `total` and `index` ask the devices. They wait until all processes have named theirs, and if one of them dies, JAX
    ends the others with a stack trace.
    """
    return _known_to_jax().num_processes or 1, _known_to_jax().process_id or 0


def _join_watchdog(number: int, own: int) -> None:
    global _watchdog  # noqa: PLW0603  (as the processes' connection in JAX itself: one for a process, from start to end)
    store, address = _coordination()
    key = "reinforce_ada_jax/watchdog"
    _watchdog = Watchdog(own, number)
    if own == 0:
        store.key_value_set(key, _watchdog.listen(_host(os.environ.get(BIND, ""))))
    else:
        try:
            greeting = store.blocking_key_value_get(key, 1000 * TIMEOUT_S)
        except jax.errors.JaxRuntimeError as error:
            raise UnreachableError(
                f"process 0 at {address} published no port within {TIMEOUT_S} s ({error}). See its log."
            ) from error
        _watchdog.connect(_host(address), greeting)
    _watchdog.start()


def index() -> int:
    """Returns the number of this process, from 0."""
    return jax.process_index()


def count() -> int:
    """Returns the number of processes, without those that only draw."""
    return _num_learning or total()


def total() -> int:
    """Returns the number of all processes."""
    return jax.process_count()


def drawing() -> range:
    """Returns the numbers of the processes that only draw."""
    return range(count(), total())


def is_writer() -> bool:
    """Returns True in the process that writes the files of the run and prints its messages."""
    return index() == 0


def split_hosts(num_learning: int) -> None:
    """Lets the first `num_learning` processes learn, and the others only draw; every process must call it."""
    global _num_learning  # noqa: PLW0603  (as `_watchdog`)
    _num_learning = num_learning


def exchange(payload: bytes) -> list[bytes]:
    """Returns the payloads of all processes (that learn), in order; each of them must call it."""
    if count() == 1:
        return [payload]
    gather = _gatherer(count())
    sizes = gather(np.array([len(payload)], np.int64).view(np.int32)).view(np.int64)[:, 0].tolist()
    received = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), CHUNK):
        chunk = np.zeros(CHUNK, np.uint8)
        part = np.frombuffer(payload[start : start + CHUNK], np.uint8)
        chunk[: len(part)] = part
        for process, theirs in enumerate(gather(chunk)):
            received[process] += theirs.tobytes()
    return [bytes(theirs[:size]) for theirs, size in zip(received, sizes, strict=True)]


@functools.cache
def _gatherer(num_processes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that gathers arrays [N], one of each process, as [processes, N]."""
    mesh = Mesh(np.array(devices_of_processes(jax.devices())[:num_processes]), ("processes", "local"))
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def gathered(own: np.ndarray) -> np.ndarray:
        return np.asarray(gather(jax.make_array_from_process_local_data(rows, own[None])).addressable_data(0))

    return gathered


def send(process: int, message: bytes) -> None:
    """Sends a message to another process, which gets it with `receive`; no program runs, and no process waits."""
    key, store = f"{MESSAGES}/{index()} {process}", _coordination()[0]
    parts = [message[start : start + CHUNK] for start in range(0, len(message), CHUNK)] or [b""]
    for part, more in zip(parts, [_MORE] * (len(parts) - 1) + [_LAST], strict=True):
        store.key_value_set_bytes(f"{key}/{_number_of(key)}", more + part)


def receive(process: int, waiting: Callable[[], None] = lambda: None) -> bytes:
    """Waits for the next message of another process; messages arrive in the order in which they were sent.

    `waiting` is called at most every second until then; it may raise.
    """
    store, key = _coordination()[0], f"{MESSAGES}/{process} {index()}"
    parts: list[bytes] = []
    while True:
        name = f"{key}/{_num_messages[key] + 1}"
        try:
            part = store.blocking_key_value_get_bytes(name, POLL_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            waiting()
            continue
        store.key_value_delete(name)
        _number_of(key)
        parts.append(part[1:])
        if part[:1] == _LAST:
            return b"".join(parts)


def has_sent(process: int) -> bool:
    """Returns True if a message of another process can be received now."""
    key = f"{MESSAGES}/{process} {index()}"
    try:
        _coordination()[0].key_value_try_get_bytes(f"{key}/{_num_messages[key] + 1}")
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return False
    return True


def _number_of(key: str) -> int:
    _num_messages[key] += 1
    return _num_messages[key]


def of_writer(text: str) -> str:
    """Returns the text of process 0 in every process; every process must call it."""
    return exchange(text.encode() if is_writer() else b"")[0].decode()


def any_of(flag: bool) -> bool:
    """Returns True in every process if the flag is set in any; every process must call it."""
    return flag if count() == 1 else any(map(bool, exchange(b"1" if flag else b"")))


def check_same(what: str, text: str) -> None:
    """Raises ValueError if a process has another text; no process returns before all have called it."""
    texts = exchange(text.encode())
    others = [process for process, theirs in enumerate(texts) if theirs != texts[0]]
    if others:
        raise ValueError(
            f"{what} differ between process 0 and process {', '.join(map(str, others))} of {len(texts)}: start all "
            "with the same command, the same code and the same files."
        )


def fetch(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the whole array on the host, in every process, wherever its shards are."""
    if isinstance(array, np.ndarray) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def ask_to_stop(*, preempted: bool = False) -> None:
    """Tells the others that this process was asked to stop, or that its machine is taken away."""
    if _watchdog is not None:
        _watchdog.ask_to_stop(preempted=preempted)


def asked_to_stop(*, preempted: bool = False) -> bool:
    """Returns True if another process called `ask_to_stop`; with `preempted`, if its machine is taken away."""
    return _watchdog is not None and (_watchdog.preempted if preempted else _watchdog.asked_to_stop)


def leave() -> None:
    """Announces that this process ends, so that the others don't report it as lost."""
    if _watchdog is not None:
        _watchdog.leave()


@contextlib.contextmanager
def joined(*, cluster: bool) -> Iterator[None]:
    """Joins the run as one of its processes, and leaves it after the block; `cluster` as for `initialize`.

    An error in the block, or while joining, ends this process at once. The others notice that the connection ends.
    JAX's own exit waits for all processes, but those that wait in a program never get there.
    """
    try:
        with cli.user_input():
            initialize(cluster=cluster)
        yield
    except BaseException as error:
        if _watchdog is None or _watchdog.leaving:
            raise
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if code == cli.BAD_INPUT:
            _watchdog.refuse()
        if not isinstance(error, SystemExit) or not code:  # sys.exit(0) of a user's function
            code = code or cli.STOPPED
            if isinstance(error, jax.errors.JaxRuntimeError):  # a collective may have lost a process
                wait_for_news()
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    leave()


def wait_for_news() -> None:
    """Waits after an error that a lost process may have caused, so that the watchdog can say so and end this process.

    Without other processes it returns at once.
    """
    if _watchdog is not None and not _watchdog.leaving:
        time.sleep(NEWS_S)

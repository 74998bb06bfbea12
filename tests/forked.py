"""Commands of the package as forks of one process that has imported it: each start of Python costs 1.5 s and more.

A command runs as `python -m reinforce_ada_jax.NAME` does, with arguments, environment and outputs of its own, and ends
as the interpreter does, unless `at_once` is asked for. It shares only the seed of Python's hashes with the other
commands; test_train.py resumes a run in an interpreter of its own, which has another seed.
"""

import contextlib
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile

from tests import compiling

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "reinforce_ada_jax"
COMMANDS = ("train", "prepare", "evaluate", "export", "serve", "compile_check")
# Modules that the commands import once their flags are parsed.
IMPORTED = (
    "evaluation.preparation", "evaluation.results_table", "evaluation.stored_evaluation", "planning.report",
    "training.checkpoint", "training.startup", "training.trained",
)  # fmt: skip
WRITER = "tensorboardX"  # which imports the clients of Google's storage
MAX_REQUEST_BYTES = 2**17
READ_AT_IMPORT = ("JAX_PLATFORMS", *compiling.keeping())  # what jax reads of the environment when it is imported

# By what they read of the environment.
_PARENTS: dict[frozenset[tuple[str, str]], tuple[subprocess.Popen, socket.socket]] = {}


class Forked:
    """A running command, with what tests use of subprocess.Popen."""

    def __init__(self, arguments: list[str], env: dict[str, str], *, at_once: bool = False):
        """Starts a command.

        Args:
          arguments: begin with "-m" and a module, with "-c" and a program, or with the file of a program.
          env: the whole environment.
          at_once: of a command that only refuses its input: without the end of the interpreter, which takes 0.12 s.
        """
        self.arguments, self.returncode = arguments, None
        self._outputs = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2)]
        self._status, theirs = socket.socketpair()
        with theirs:
            request = json.dumps([arguments, env, at_once]).encode()
            read = frozenset((name, env[name]) for name in READ_AT_IMPORT if name in env)
            assert len(request) < MAX_REQUEST_BYTES
            socket.send_fds(_parent(read), [request], [theirs.fileno(), *(file.fileno() for file in self._outputs)])
        self.pid = int(self._status.recv(64))
        self._status.send(b"go")

    def poll(self) -> int | None:
        """Returns the exit code, minus the signal's number where a signal ended it, or None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code; raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.arguments, timeout)
            self.returncode = int(self._status.recv(64))
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end, and returns what it wrote to stdout and stderr."""
        self.wait(timeout)
        texts = []
        for file in self._outputs:
            if not file.closed:
                file.seek(0)
                texts.append(file.read())
                file.close()
        return tuple(texts) or ("", "")

    def said(self) -> str:
        """Returns what it wrote to stdout until now."""
        descriptor = self._outputs[0].fileno()  # it shares its position with the command
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def run(arguments: list[str], env: dict[str, str], *, at_once: bool = False) -> subprocess.CompletedProcess:
    """Returns what a command said, and its exit code."""
    process = Forked(arguments, env, at_once=at_once)
    out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def finished(process: Forked | subprocess.Popen, code: int = 0, timeout: float = 500.0) -> tuple[str, str]:
    """Waits for the end of a command, which must be with this exit code; returns what it wrote to stdout and stderr."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, err
    return out, err


def _parent(read: frozenset[tuple[str, str]]) -> socket.socket:
    """The socket of the process that forks, which ends when this process does; `read`: its READ_AT_IMPORT."""
    if read not in _PARENTS:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", "from tests import forked; forked.serve()"],
                cwd=ROOT, env=os.environ | dict(read), stdin=theirs.fileno(),
            )  # fmt: skip
        _PARENTS[read] = process, ours
    return _PARENTS[read][1]


def parents() -> set[int]:
    """Returns the process ids of the processes that fork."""
    return {process.pid for process, _ in _PARENTS.values()}


def children() -> list[str]:
    """Returns the process ids of this process's other children, zombies included.

    They are found by their parent's id: the lists of each thread's children lack those whose thread has just ended.
    """
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "X":
                found.append(path.parent.name)
    return sorted(child for child in found if int(child) not in parents())


def close() -> None:
    """Ends the processes that fork."""
    while _PARENTS:
        _, (process, requests) = _PARENTS.popitem()
        requests.close()
        process.wait()


def serve() -> None:
    """Forks a process for each request at standard input, which is a socket."""
    for name in (*COMMANDS, *IMPORTED):
        importlib.import_module(f"{PACKAGE}.{name}")
    importlib.import_module(WRITER)
    compiling.share_programs()
    compiling.share_contexts()
    gc.collect()
    gc.freeze()  # else each command visits what was imported, at its end as well
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the commands get it too
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    children = []
    while True:
        request, descriptors, *_ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
        children = [child for child in children if not os.waitpid(child, os.WNOHANG)[0]]
        if not request:
            return
        children.append(os.fork())
        if not children[-1]:
            requests.close()
            _watch(*json.loads(request), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(arguments: list[str], env: dict[str, str], at_once: bool, status: int, out: int, err: int) -> None:
    """Runs a command in a child, and says its process id and its exit code; returns in the child only."""
    child = os.fork()
    if child:
        connection = socket.socket(fileno=status)
        connection.send(str(child).encode())
        _, result = os.waitpid(child, 0)
        connection.recv(64)
        connection.send(str(os.waitstatus_to_exitcode(result)).encode())
        os._exit(0)
    os.close(status)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    for name in COMMANDS:
        sys.modules.pop(f"{PACKAGE}.{name}")
    try:
        _run(*arguments)
    except SystemExit as end:
        if not at_once or not isinstance(end.code, int):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)


def _run(how: str, *rest: str) -> None:
    sys.argv = [how, *rest[how in ("-m", "-c") :]]
    if how == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(pathlib.Path(how).resolve().parent))
        runpy.run_path(how, run_name="__main__")

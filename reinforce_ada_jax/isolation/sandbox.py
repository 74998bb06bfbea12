"""Programs that nobody trusts: each in namespaces, under limits, and gone without a trace when `run` returns.

`run` forks, so it is for a process with one thread that may have no other children, such as a verifier worker.

    this process -> keeper -> first process of the namespaces -> program
                    (outside)  (inside: its end ends all others)

Where the system allows no namespaces, the program is this process's child. It still has the limits and the filter of
system calls, and all its processes are killed at the end. Where this process is root, the program also has its own user
id. `weakness` says why there are no namespaces.
"""

import contextlib
import dataclasses
import functools
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from reinforce_ada_jax.isolation import namespaces, process_tree, seccomp

_TICK_S = 0.02  # between looks at the memory of all processes
_PIPE_BYTES = 2**16
_FIRST_UID, _UIDS = 20_000, 40_000  # user ids of programs, where this process is root
_STACK_BYTES = 8 * 2**20
_OPEN_FILES = 64
_MOST_FILES = 2**20  # of this process; the limit of macOS can be infinite
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
CHANNEL_CLOSED = 3  # exit code of a program whose channel is closed at the other end; the other program's code says why


class SandboxFailed(RuntimeError):
    """Failure to start a program; not the program's fault."""


@dataclasses.dataclass(frozen=True)
class Limits:
    processor_s: int  # of each process
    wall_s: float  # until the program must have ended
    memory_bytes: int  # of all processes together, and address space of each
    files_bytes: int  # of each file, and of all files together where there are namespaces
    processes: int  # and threads, at a time
    output_bytes: int = 2**22


@dataclasses.dataclass(frozen=True)
class Program:
    arguments: Sequence[str]  # of the interpreter
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # by name, in the folder where it starts
    stdin: bytes = b""
    channel: int | None = None  # descriptor that it gets as number 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    output: bytes
    limit: str  # the limit that ended it ("time", "memory", "output"), or ""
    code: int  # its exit code, or 128 plus the number of the signal that ended it
    other_code: int = 0  # exit code of the program that closed the channel by its end, if the code is an error


# ---- in the child ----------------------------------------------------------------------------------------------------


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _close_from(first: int) -> None:
    os.closerange(first, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_FILES))


def _fork_and_keep() -> None:
    """Returns in a new child; this process waits for it, and ends with its exit code."""
    child = os.fork()
    if child == 0:
        return
    _close_from(0)  # else the outputs would never be seen to end
    os._exit(_code(process_tree.wait_for(child)))


def _set_limits(limits: Limits, other_processes: int) -> None:
    chosen = {
        resource.RLIMIT_CPU: limits.processor_s,
        **({resource.RLIMIT_AS: limits.memory_bytes} if process_tree.SUPPORTED else {}),  # macOS refuses it
        resource.RLIMIT_FSIZE: limits.files_bytes,
        resource.RLIMIT_NPROC: other_processes + limits.processes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: _STACK_BYTES,
    }
    for number, wanted in chosen.items():
        _, hard = resource.getrlimit(number)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(number, (value, value))


def _own_processes() -> int:
    """Returns the number of processes and threads of this user, which a limit on processes counts."""
    total, user = 0, os.getuid()
    for name in os.listdir("/proc") if process_tree.SUPPORTED else ():
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def _take_descriptors(stdin: int, stdout: int, channel: int | None, report: int) -> int:
    """Makes the pipes standard input and output, and closes all but them, the channel and the returned report."""
    null = os.open(os.devnull, os.O_RDWR)
    copies = [os.dup(each) for each in (stdin, stdout, null, null if channel is None else channel, report)]
    first = 100  # above all that are in use at the start of a worker
    high = [os.dup2(each, first + index) for index, each in enumerate(copies)]
    for target, each in enumerate(high):
        os.dup2(each, target, inheritable=target < 3 or (target == 3 and channel is not None))
    _close_from(5)
    return 4


def _become_program(program: Program, limits: Limits, owner: int | None, folder: str | None) -> None:
    """Replaces this process by the program; `folder` is where it starts if it has no namespaces."""
    others = 0
    if folder is None:
        namespaces.enter(owner)
        _fork_and_keep()
        namespaces.protect()
        namespaces.new_root(owner, limits.files_bytes)
    else:
        os.chdir(folder)
        others = _own_processes() if owner is None else 0
    for name, content in program.files.items():
        with open(name, "xb") as file:
            file.write(content)
        os.chmod(name, 0o644)
    if folder is None:
        _fork_and_keep()
    os.setsid()
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    _set_limits(limits, others)
    if owner is not None:
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
    seccomp.install(signals=folder is None)
    environment = _ENVIRONMENT | {"HOME": os.getcwd(), "TMPDIR": os.getcwd()}
    os.execve(sys.executable, [sys.executable, "-I", *program.arguments], environment)


# ---- in the parent ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Running:
    """Program that runs, as its parent sees it."""

    pid: int
    stdin: int | None
    stdout: int | None
    report: int
    to_send: memoryview
    output: bytearray = dataclasses.field(default_factory=bytearray)
    code: int | None = None

    def write(self) -> None:
        """Sends more of the input; closes it after the last byte, or if nobody reads it."""
        assert self.stdin is not None
        try:
            self.to_send = self.to_send[os.write(self.stdin, self.to_send[:_PIPE_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:
            self.to_send = memoryview(b"")
        if not self.to_send:
            os.close(self.stdin)
            self.stdin = None

    def read(self) -> None:
        """Reads more of the output; closes it at its end."""
        assert self.stdout is not None
        data = os.read(self.stdout, _PIPE_BYTES)
        self.output += data
        if not data:
            os.close(self.stdout)
            self.stdout = None

    def close(self) -> None:
        for descriptor in (self.stdin, self.stdout, self.report):
            if descriptor is not None:
                os.close(descriptor)


def _start(program: Program, limits: Limits, owner: int | None, folder: str | None) -> _Running:
    (stdin, ours_in), (ours_out, stdout), (ours_report, report) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            report = _take_descriptors(stdin, stdout, program.channel, report)
            _become_program(program, limits, owner, folder)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(report, f"{error or type(error).__name__}".encode()[:1000])
        finally:
            os._exit(1)
    for descriptor in (stdin, stdout, report):
        os.close(descriptor)
    os.set_blocking(ours_in, False)
    return _Running(pid, ours_in, ours_out, ours_report, memoryview(program.stdin))


def _memory_bytes(running: Sequence[_Running], *, with_namespaces: bool) -> int:
    """Returns the memory of all processes below this one, without those that keep a namespace."""
    keepers = {pid for each in running for pid in (each.pid, *process_tree.descendants(each.pid)[:1])}
    total = 0
    for pid in set(process_tree.descendants(os.getpid())) - (keepers if with_namespaces else set()):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as file:
            total += int(file.read().split()[1])
    return total * resource.getpagesize()


def _poll(running: Sequence[_Running], limit_s: float) -> None:
    """Writes and reads what the pipes take and have; waits for them at most `limit_s` seconds."""
    calls: dict[int, Callable[[], None]] = {}
    poll = select.poll()
    for each in running:
        if each.stdin is not None:
            poll.register(each.stdin, select.POLLOUT)
            calls[each.stdin] = each.write
        if each.stdout is not None:
            poll.register(each.stdout, select.POLLIN)
            calls[each.stdout] = each.read
    for descriptor, _ in poll.poll(1000 * limit_s):
        calls[descriptor]()


def _watch(running: Sequence[_Running], limits: Limits, *, with_namespaces: bool) -> str:
    """Waits for the end of the first program; returns the limit that it met before, or ""."""
    main, deadline = running[0], time.monotonic() + limits.wall_s
    next_look = 0.0
    while True:
        _poll(running, _TICK_S if main.stdout is not None else 0.001)
        if main.stdout is None or time.monotonic() >= next_look:
            ended, status = os.waitpid(main.pid, os.WNOHANG)
            if ended:
                main.code = _code(status)
                return ""
        if any(len(each.output) > limits.output_bytes for each in running):
            return "output"
        if (now := time.monotonic()) >= deadline:
            return "time"
        if now >= next_look:
            next_look = now + _TICK_S
            memory_bytes = _memory_bytes(running, with_namespaces=with_namespaces)
            if memory_bytes > limits.memory_bytes:
                return "memory"


def _wait_for_others(running: Sequence[_Running]) -> None:
    """Waits a moment for the programs other than the first one, and notes how they end."""
    deadline = time.monotonic() + 1.0
    while (left := [each for each in running if each.code is None]) and time.monotonic() < deadline:
        for each in left:
            ended, status = os.waitpid(each.pid, os.WNOHANG)
            each.code = _code(status) if ended else None
        time.sleep(0.001)


def _end_all(running: Sequence[_Running]) -> None:
    """Kills and collects all processes below this one."""
    process_tree.kill_descendants(os.getpid())
    for each in running:
        if each.code is None and not process_tree.SUPPORTED:
            with contextlib.suppress(OSError):
                os.killpg(each.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass


def _run(
    programs: Sequence[Program], limits: Limits, on_start: Sequence[Callable[[], None]] = (), *, with_namespaces: bool
) -> Outcome:
    owner = _FIRST_UID + os.getpid() % _UIDS if os.getuid() == 0 else None
    process_tree.adopt()
    running: list[_Running] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end_all, running)
        for program in programs:
            folder = None
            if not with_namespaces:
                folder = tempfile.mkdtemp(prefix="sandbox-")
                stack.callback(subprocess.run, ["rm", "-rf", "--", folder], check=False)  # of any depth
                if owner is not None:
                    os.chown(folder, owner, owner)
            running.append(_start(program, limits, owner, folder))
            stack.callback(running[-1].close)
        for call in on_start:
            call()
        stack.callback(_end_all, running)  # before the pipes are closed and the folders removed
        limit = _watch(running, limits, with_namespaces=with_namespaces)
        if running[0].code == CHANNEL_CLOSED:
            _wait_for_others(running)
        _end_all(running)
        main = running[0]
        while main.stdout is not None and len(main.output) <= limits.output_bytes:
            main.read()  # what the pipe still holds
        for each in running:
            os.set_blocking(each.report, False)
            if failure := os.read(each.report, 1000):
                raise SandboxFailed(failure.decode(errors="replace"))
    output = bytes(main.output[: limits.output_bytes])
    if not limit and len(main.output) > limits.output_bytes:
        limit = "output"
    if any(each.code in (128 + signal.SIGXCPU, 128 + signal.SIGKILL) for each in running):
        limit = limit or "time"
    codes = [each.code for each in running[1:] if main.code == CHANNEL_CLOSED]
    other_code = next((code for code in codes if code not in (None, 0, CHANNEL_CLOSED)), 0)
    return Outcome(output, limit, 128 + signal.SIGKILL if main.code is None else main.code, other_code)


_TRIAL = Limits(processor_s=5, wall_s=10.0, memory_bytes=2**29, files_bytes=2**20, processes=8)


@functools.cache
def weakness() -> str:
    """Returns why programs have no namespaces, or "" where they have some. A process tries it once."""
    if not process_tree.SUPPORTED:
        return f"{sys.platform} has none"
    try:
        outcome = _run([Program(["-S", "-c", "print('ready')"])], _TRIAL, with_namespaces=True)
    except SandboxFailed as error:
        return str(error)
    return "" if outcome.output == b"ready\n" else f"Python does not start there (exit code {outcome.code})"


def run(programs: Sequence[Program], limits: Limits, on_start: Sequence[Callable[[], None]] = ()) -> Outcome:
    """Runs programs at the same time until the first one ends or meets a limit, ends all, and returns its outcome.

    The programs are one, or several with channels between them; each has the limits. `on_start` is called when all have
    been started, such as to close our ends of the channels.
    """
    return _run(programs, limits, on_start, with_namespaces=not weakness())


if __name__ == "__main__":
    print(weakness())

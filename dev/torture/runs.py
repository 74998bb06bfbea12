"""Training runs that are killed, damaged or out of disk space, against the bits of runs that nothing disturbed."""

import contextlib
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from dev.torture.bench import Bench
from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed import processes as processes_lib
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.reporting import writers
from tests import compiling
from tests.environments import try_again
from tests.forked import Forked
from tests.running import OF_THE_ENGINE, cipher_file, environment, reproducible, restored

ITERATIONS, LIMIT_S, JOIN_S = 6, 300, 20
SMALL = {
    "iterations": ITERATIONS, "checkpoint.every": 1, "evaluation.every": 3, "evaluation.samples": 1,
    "sampling.slots": 12, "collection.prompts_per_iteration": 12, "learning.prompts_per_update": 12,
    "logging.sampled_prompts": 8,
}  # fmt: skip


class Kind(NamedTuple):
    """A kind of run."""

    processes: int
    devices: int = 1  # of each process
    changes: tuple[tuple[str, object], ...] = ()  # of the settings
    loses_draws: bool = False  # an interruption does
    before: str = ""  # code that each process runs first

    def __repr__(self) -> str:
        changes = "".join(f", {name}={value}" for name, value in self.changes)
        return f"{self.processes} processes of {self.devices} devices{changes}"

    def settings(self) -> dict[str, object]:
        """Returns the settings of its runs."""
        return SMALL | {"mesh.data": self.processes} | dict(self.changes)


# A program takes two seconds, and all updates of the built-in model take less. An update that is no chain is an error.
CHAIN = """
import pytest
from reinforce_ada_jax.learning import platform, update
from tests import standins
def check(programs, state, batch, *_):
    assert programs.is_chain(batch), "the update is one program"
patch = pytest.MonkeyPatch()
standins.constants(patch, platform, PROGRAM_S=0.0)
standins.before(patch, update.UpdatePrograms, "__call__", check)
"""
ONE = Kind(1)
# Each update has 4 of 12 prompts, in parts of one response, and each part is a program.
CHAINED = Kind(1, changes=(("learning.prompts_per_update", 4), ("learning.micro_batches", 16)), before=CHAIN)
KINDS = (
    ONE, Kind(2), Kind(3), Kind(4), CHAINED,
    Kind(2, changes=(("mesh.data", 1), ("mesh.fsdp", 2), ("collection.strategy", "ngu"))),
    Kind(1, devices=2, changes=(("mesh.sampler", 1), ("collection.max_staleness", 0))),
    Kind(2, changes=(("mesh.data", 1), ("mesh.sampler", 1))),  # the second process only draws
)  # fmt: skip

# Where nothing can be mounted, a limit on the size of files: a write beyond it fails as on a full disk.
LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (KILOBYTES * 1024, resource.RLIM_INFINITY))
"""
TRAIN = 'import runpy; runpy.run_module("reinforce_ada_jax.train", run_name="__main__")'


class Runs:
    """Runs of the built-in model: each a number of processes on loopback."""

    def __init__(self, bench: Bench):
        self._bench, self._unbroken, self._numbers = bench, {}, 0
        self._benchmark = cipher_file(bench.scratch / "heldout.jsonl", 16)

    def new_folder(self) -> pathlib.Path:
        """Returns a work directory that does not exist yet."""
        self._numbers += 1
        return self._bench.scratch / f"run-{self._numbers}"

    def in_turns(self) -> Kind:
        """Returns a kind of run whose environment gives the model three tries."""
        folder = self.new_folder()
        folder.mkdir()
        return Kind(1, changes=tuple(try_again.settings(try_again.write(folder)).items()), loses_draws=True)

    def start(self, workdir: pathlib.Path, kind: Kind, *more: str, before: str = "") -> list[Forked]:
        """Starts the processes of a run; `before`: code that each of them runs first."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        count = kind.processes
        settings = {"evaluation.benchmarks": (self._benchmark,)} | kind.settings()
        flags = ["--config=configs/tiny.py", *(f"--config.{key}={value}" for key, value in settings.items())]
        before += kind.before
        how = ("-c", before + TRAIN) if before else ("-m", "reinforce_ada_jax.train")
        arguments = [*how, *flags, f"--workdir={workdir}", *more]
        started = []
        for index in range(count):
            env = environment(f"{compiling.DEVICES}{kind.devices} {compiling.QUICKLY}")
            # The program's own folder of compiled programs, which kills must not damage, in place of JAX's.
            env = {name: value for name, value in env.items() if not name.startswith(("JAX_COMPILATION", "JAX_PERS"))}
            env["XDG_CACHE_HOME"] = os.environ[compiling.CHOSEN]
            if count > 1:
                env |= {processes_lib.ADDRESS: f"127.0.0.1:{port}", processes_lib.COUNT: str(count)}
                env |= {processes_lib.INDEX: str(index), processes_lib.JOIN: str(JOIN_S)}
            started.append(Forked(arguments, env))
        return started

    def unbroken(self, kind: Kind) -> tuple[pathlib.Path, float]:
        """Returns the work directory of an undisturbed run, and its seconds."""
        if kind not in self._unbroken:
            workdir, began = self.new_folder(), time.monotonic()
            codes, said = ended(self.start(workdir, kind))
            assert codes == [0] * kind.processes, said
            self._unbroken[kind] = workdir, time.monotonic() - began
        return self._unbroken[kind]


def ended(processes: list[Forked]) -> tuple[list[int], list[str]]:
    """Returns exit codes and stderr of processes, which end within LIMIT_S or are lost."""
    try:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"a process did not end within {LIMIT_S} s") from error
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [process.returncode for process in processes], said


def texts(folder: pathlib.Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(folder.iterdir())} if folder.exists() else {}


def assert_same_bits(workdir: pathlib.Path, unbroken: pathlib.Path, kind: Kind = ONE) -> None:
    """Weights, moments, records, metrics, samples and evaluations are those of the undisturbed run.

    Where an interruption loses draws, metrics of the engine's work, which makes them again, may differ.
    """
    (state, record), (expected, expected_record) = restored(workdir), restored(unbroken)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert record == expected_record, "the records differ"
    for line, expected_line in zip(reproducible(workdir), reproducible(unbroken), strict=True):
        differ = {key for key in line.keys() | expected_line.keys() if line.get(key) != expected_line.get(key)}
        differ -= set(filter(OF_THE_ENGINE.fullmatch, differ)) if kind.loses_draws else set()
        assert not differ, f"metrics of iteration {line['iteration']} differ: {sorted(differ)}"
    for folder in ("samples", "evaluations"):
        assert texts(workdir / folder) == texts(unbroken / folder), f"{folder} differ"
    partial = [str(file) for file in workdir.rglob("*") if "partial" in file.name or "-tmp" in file.name]
    assert not partial, f"left in the work directory: {partial}"


def one_line(text: str) -> bool:
    """Returns True if a command said one error in one line, and no stack trace."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return len(errors) <= 1 and "Traceback" not in text


def kill_once(
    runs: Runs,
    workdir: pathlib.Path,
    kind: Kind,
    rng: random.Random,
    wait: Callable[[list[Forked]], None] | None = None,
) -> tuple[str, float]:
    """Starts a run, ends one of its processes at a random moment, and checks how all of them end.

    Waits with `wait`, or for a random part of the time of an undisturbed run. Returns what it did, and when
    (`time.time`).
    """
    how, victim = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)), rng.randrange(kind.processes)
    delay = rng.uniform(0.0, runs.unbroken(kind)[1])
    began, processes = time.time(), runs.start(workdir, kind)
    if wait is None:
        time.sleep(delay)
    else:
        wait(processes)
    processes[victim].send_signal(how)
    at = time.time()
    what = f"{how.name} of process {victim} of {kind} after {at - began:.2f} s"
    codes, said = ended(processes)
    complete = len(writers.read_metrics(workdir)) == kind.settings()["iterations"]
    # A run that ended before; a process that had no handler yet; all others start again.
    of_victim = {-how, RESTART} if how == signal.SIGTERM else {-how}
    for index, code in enumerate(codes):
        allowed = {RESTART} | (of_victim if index == victim else set()) | ({0} if complete else set())
        assert code in allowed, f"{what}: exit codes {codes}: {said}"
        assert one_line(said[index]), f"{what}: {said[index]}"
    return what, at


def kills(bench: Bench) -> None:
    """SIGKILL and SIGTERM of one process of a run of each kind, up to three times in a run, and a resume to its end."""
    runs, number = Runs(bench), 0
    while bench.goes_on():
        kind = KINDS[number % len(KINDS)]
        with bench.case(f"kills, run {number}, {kind}"):
            unbroken, _ = runs.unbroken(kind)
            workdir = runs.new_folder()
            whats = [kill_once(runs, workdir, kind, bench.rng)[0] for _ in range(bench.rng.randrange(1, 4))]
            codes, said = ended(runs.start(workdir, kind))
            assert codes == [0] * kind.processes, f"the resume after {whats}: {codes} {said}"
            try:
                assert_same_bits(workdir, unbroken)
            except AssertionError as error:
                raise AssertionError(f"after {whats}: {error!s:.800}") from error
            shutil.rmtree(workdir)
        number += 1


def _files(folder: pathlib.Path, rng: random.Random) -> pathlib.Path:
    return rng.choice(sorted(file for file in folder.rglob("*") if file.is_file()))


def _flip(file: pathlib.Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)


def _damage(checkpoints: pathlib.Path, foreign: pathlib.Path, rng: random.Random) -> str:
    """Damages the newest checkpoint, or puts one there that belongs to another run."""
    newest = max(
        (entry for entry in checkpoints.iterdir() if entry.name.isdecimal()), key=lambda entry: int(entry.name)
    )
    kind = rng.choice(("cut", "bits", "gone", "empty", "noise", "renamed", "foreign", "folder"))
    if kind in ("renamed", "foreign"):
        number = rng.choice((int(newest.name) + 1, 10**6, 10**30))
        source = newest if kind == "renamed" else foreign / "checkpoints" / newest.name
        shutil.copytree(source, checkpoints / str(number))
        return f"{kind} to {number}"
    file = _files(newest, rng)
    if kind == "cut":
        os.truncate(file, rng.randrange(max(1, file.stat().st_size)))
    elif kind == "bits":
        for _ in range(rng.randrange(1, 5)):
            _flip(file, rng)
    elif kind == "noise":
        file.write_bytes(rng.randbytes(rng.randrange(1, 10_000)))
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
        elif kind == "empty":
            file.touch()
    return f"{kind} {file.relative_to(checkpoints)}"


def checkpoints(bench: Bench) -> None:
    """Damaged, renamed and foreign checkpoints: a resume makes the bits of the undisturbed run."""
    runs = Runs(bench)
    unbroken, _ = runs.unbroken(ONE)
    foreign = runs.new_folder()
    codes, said = ended(runs.start(foreign, ONE, "--config.seed=5"))
    assert codes == [0], said
    while bench.goes_on():
        workdir = shutil.copytree(unbroken, runs.new_folder())
        what = _damage(workdir / "checkpoints", foreign, bench.rng)
        with bench.case(what):
            codes, said = ended(runs.start(workdir, ONE))
            assert codes == [0] and one_line(said[0]), (codes, said)
            for stray in (workdir / "checkpoints").iterdir():  # what does not belong is left alone
                if stray.name.isdecimal() and int(stray.name) > ITERATIONS:
                    shutil.rmtree(stray)
            assert_same_bits(workdir, unbroken)
        shutil.rmtree(workdir)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, kilobytes: int) -> Iterator[bool]:
    """Mounts a small file system, or returns False where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def disk(bench: Bench) -> None:
    """Disks that are full at a random moment: one line and exit code 1, and with more space the bits of the run."""
    runs, number = Runs(bench), 0
    kinds = ONE, CHAINED, runs.in_turns()
    while bench.goes_on():
        kind = kinds[number % len(kinds)]
        unbroken, _ = runs.unbroken(kind)
        whole = sum(file.stat().st_size for file in unbroken.rglob("*") if file.is_file()) // 1024
        number += 1
        kilobytes = bench.rng.randrange(8, whole)
        place = bench.scratch / f"disk-{number}"
        with bench.case(f"a disk of {kilobytes} KB, {kind}"), small_disk(place, kilobytes) as mounted:
            workdir = place / "run"
            if not mounted:
                kilobytes = bench.rng.randrange(1, 100)
            limit = "" if mounted else LIMIT.replace("KILOBYTES", str(kilobytes))
            codes, said = ended(runs.start(workdir, kind, before=limit))
            assert codes in ([0], [cli.STOPPED]) and one_line(said[0]), (kilobytes, mounted, codes, said)
            if mounted:
                subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
            codes, said = ended(runs.start(workdir, kind))
            assert codes == [0], (kilobytes, codes, said)
            assert_same_bits(workdir, unbroken, kind)

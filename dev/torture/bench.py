"""One part of the torture: its cases, its time, its scratch folder, and what it leaves behind."""

import contextlib
import ctypes
import gc
import os
import pathlib
import random
import shutil
import tempfile
import time
from collections.abc import Iterator

from reinforce_ada_jax.isolation import process_tree
from tests import forked

_PR_SET_CHILD_SUBREAPER = 36
# Time for processes to end that nobody waits for: a child that tries a tokenizer has 6 s of a processor.
_LEFT_S = 20.0


def _running() -> list[int]:
    """Returns the processes below this one, which adopts those whose parents have ended."""
    return [pid for pid in process_tree.descendants(os.getpid()) if process_tree.is_running(pid)]


def _descriptors() -> set[str]:
    """Returns the files that this process has open; pipes and sockets by their numbers."""
    found = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{entry.name} {entry.readlink()}")
    return {each for each in found if "/proc/" not in each}


class Bench:
    """Cases of a part: `tried`, and the `lost` ones with what was wrong."""

    def __init__(self, name: str, seed: int, seconds: float):
        self.name, self.rng, self.deadline = name, random.Random(f"{name} {seed}"), time.monotonic() + seconds
        self.seed, self.tried, self.lost, self.seconds = seed, 0, [], 0.0

    def __enter__(self) -> "Bench":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._began, self._descriptors_before = time.monotonic(), _descriptors()
        self._shared_before = set(os.listdir("/dev/shm"))
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="torture-"))
        self.temporary = self.scratch / "tmp"
        self.temporary.mkdir()
        self._tempdir_before, tempfile.tempdir = tempfile.tempdir, None
        self._environment_before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self.temporary)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self.case("what is left"):
                self._check_left()
        finally:
            os.environ.pop("TMPDIR")
            if self._environment_before is not None:
                os.environ["TMPDIR"] = self._environment_before
            tempfile.tempdir = self._tempdir_before
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.seconds = time.monotonic() - self._began

    def _check_left(self) -> None:
        forked.close()  # its processes fork the commands
        gc.collect()
        deadline = time.monotonic() + _LEFT_S
        while _running() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200] for pid in _running()]
        assert not left, f"processes are left: {left}"
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        opened = _descriptors() - self._descriptors_before
        assert not opened, f"file descriptors are left: {sorted(opened)[:5]}"
        files = [str(file) for file in self.temporary.rglob("*")]
        assert not files, f"temporary files are left: {files[:5]}"
        shared = set(os.listdir("/dev/shm")) - self._shared_before
        assert not shared, f"shared memory is left: {sorted(shared)[:5]}"

    def goes_on(self) -> bool:
        """Returns True while there is time for a further case, and before the first one."""
        return self.tried == 0 or time.monotonic() < self.deadline

    @contextlib.contextmanager
    def case(self, what: str) -> Iterator[None]:
        """Counts a case, which is lost where its body raises."""
        self.tried += 1
        try:
            yield
        except Exception as error:
            self.lost.append(f"{what}: {type(error).__name__}: {str(error)[:1500]}")

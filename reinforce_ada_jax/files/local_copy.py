"""A folder of a bucket as a folder of this machine, whose changes are uploaded to the bucket.

Programs append to their files (metrics.jsonl, TensorBoard's events, stored responses), and objects can't be appended
to. So a changed file is uploaded as a whole, at the latest after UPLOAD_S seconds, and a reader of the bucket sees the
run while it goes on. Slow uploads are made less often, so that they take at most a tenth of the time.
"""

import contextlib
import pathlib
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from reinforce_ada_jax.files import buckets

UPLOAD_S = 30.0
SHARE = 0.1  # largest share of the time that uploads in the background may take
_NOT_COPIED = (f"{buckets.CHECKPOINTS}/", "damaged_checkpoints/", "foreign_checkpoints/", "tensorboard/")
_DATABASE = ".sqlite3"
_LOCAL = (buckets.ORIGIN, ".partial", f"{_DATABASE}-journal")  # ends of names that are never uploaded


def _is_wanted(name: str) -> bool:
    return bool(name) and not name.startswith(_NOT_COPIED) and not name.endswith(_LOCAL)


def _freeze(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file that may grow or be replaced meanwhile; a database as it is between two transactions."""
    if source.suffix == _DATABASE and source.exists():  # SQLite would create a missing file
        with contextlib.suppress(sqlite3.Error):  # the file has the name of a database, but is none
            with (
                contextlib.closing(sqlite3.connect(source)) as live,
                contextlib.closing(sqlite3.connect(target)) as copy,
            ):
                live.backup(copy)
            return
    shutil.copyfile(source, target)


class LocalCopy:
    """Files of a folder in a bucket, and a thread that uploads those that change."""

    def __init__(self, url: str, *, wanted: Callable[[str], bool] = _is_wanted, every_s: float = UPLOAD_S):
        """Downloads the files whose names, relative to the folder, are `wanted`; the folder need not exist."""
        self.url = buckets.url(url)
        self._home = pathlib.Path(tempfile.mkdtemp(prefix="reinforce_ada_jax-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        self.folder = self._home / self.url.rpartition("/")[2]
        self.folder.mkdir()
        (self.folder / buckets.ORIGIN).write_text(self.url, encoding="utf-8")
        try:
            names = [name for name in buckets.objects(self.url) if wanted(name)]
            buckets.download(self.url, names, self.folder)
        except BaseException:
            self._remove()
            raise
        self._uploaded = self._states()
        self._lock, self._end = threading.Lock(), threading.Event()
        self._every_s = every_s
        # Called before each upload; raises BucketError if another process owns the folder.
        self.may_upload: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._upload_while_open, name="upload", daemon=True)
        self._thread.start()

    def _states(self) -> dict[str, tuple[int, int]]:
        """Returns (time of the last change, size) of each file that belongs to the bucket."""
        states = {}
        for file in self.folder.rglob("*"):
            name = str(file.relative_to(self.folder))
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                if file.is_file() and not file.is_symlink() and not name.endswith(_LOCAL):
                    status = file.stat()
                    states[name] = (status.st_mtime_ns, status.st_size)
        return states

    def upload(self) -> None:
        """Brings the bucket up to date: it has every change made before this call.

        Raises BucketError, or another OSError where this machine's disk has no room for copies of the changed files.
        """
        with self._lock:
            self.may_upload()
            states = self._states()
            changed = [name for name, state in states.items() if self._uploaded.get(name) != state]
            with tempfile.TemporaryDirectory(dir=self._home) as frozen:
                files = {}
                for number, name in enumerate(changed):
                    copy = pathlib.Path(frozen) / str(number)
                    with contextlib.suppress(FileNotFoundError):
                        _freeze(self.folder / name, copy)
                        files[copy] = f"{self.url}/{name}"
                buckets.upload(files)
            for name in self._uploaded.keys() - states.keys():
                # An object may be missing: its file was removed before it was uploaded.
                with buckets.reachable(self.url), contextlib.suppress(FileNotFoundError):
                    buckets.file_system().rm_file(f"{self.url}/{name}")  # `rm` would take a[1] for a pattern
            self._uploaded = states

    def _upload_while_open(self) -> None:
        pause = self._every_s
        while not self._end.wait(pause):
            begin = time.monotonic()
            with contextlib.suppress(OSError):  # the next upload tries again; `upload` and `close` raise it
                self.upload()
            pause = max(self._every_s, (time.monotonic() - begin) / SHARE)

    def close(self) -> None:
        """Uploads the last changes, then removes the folder, which stays after an error; a second call does nothing."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join()
        try:
            self.upload()
        except OSError as error:  # also a full disk, where the files could not be moved
            self._remove.detach()
            raise buckets.BucketError(
                f"{error}. The newest files are in {self.folder}: copy them to {self.url}"
            ) from error
        self._remove()


@contextlib.contextmanager
def opened(
    folder: str | pathlib.Path, name: str = "--workdir", wanted: Callable[[str], bool] = _is_wanted
) -> Iterator[tuple[pathlib.Path, LocalCopy | None]]:
    """Yields (folder of this machine, its copy); a folder that is already on this machine has no copy.

    `name` is the flag, for messages. Raises ValueError if the bucket can't be read, BucketError if it can't be written.
    """
    if not buckets.is_bucket(folder):
        yield pathlib.Path(folder), None
        return
    buckets.check(name, folder)
    try:
        copy = LocalCopy(str(folder), wanted=wanted)
    except buckets.BucketError as error:
        raise ValueError(f"{name}: {error}. Check the name, and the rights of this machine on the bucket.") from error
    with contextlib.closing(copy):
        yield copy.folder, copy

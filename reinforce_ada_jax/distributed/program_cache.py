"""A folder that keeps compiled programs between starts, behind JAX's persistent compilation cache.

JAX's own cache writes entries in place. A killed process leaves half an entry; every later start reports it, no start
repairs it, and a folder with a size limit then refuses new entries. Here an entry appears whole or not at all. If it
does not match its hash, it is removed, and the program is compiled again. Processes need no lock.

The folder may cache a folder in a bucket, so that a node that replaces a preempted node compiles nothing again.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import sys
import tempfile
import time

import jax
from jax._src import compilation_cache  # a cache of one's own has no public hook
from jax._src.compilation_cache_interface import CacheInterface

from reinforce_ada_jax.files import buckets

MAX_BYTES = 2 * 2**30
AUTO = "auto"
ABANDONED_AFTER_S = 3600.0  # no process takes as long to write one file
_HASH_BYTES, _PARTIAL = 32, ".partial"


def keep_programs(chosen: str) -> None:
    """Makes this process read compiled programs from a folder, and write new ones there.

    The folder may be in a bucket; "auto" means `buckets.cache_folder`, "" no folder. If JAX already has a folder
    (JAX_COMPILATION_CACHE_DIR), nothing changes.
    """
    if not chosen or jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return
    in_bucket = buckets.is_bucket(chosen)
    try:
        local = buckets.cache_folder("programs") if chosen == AUTO or in_bucket else pathlib.Path(chosen).expanduser()
        folder = local / _machine()
        # Everyone who can write here runs code in the processes that read it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        programs = ProgramFolder(folder)
        if in_bucket:
            programs = ProgramBucket(f"{buckets.url(chosen)}/{_machine()}", programs)
    except (OSError, ValueError, RuntimeError) as error:  # a user without a home: ValueError, or, for ~/x, RuntimeError
        _say_not_stored(error)
        return
    compilation_cache.get_file_cache = lambda path: (programs, path)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _machine() -> str:
    """Returns a name for the kind of processor: a shared home folder may hold machine code for another kind."""
    features = platform.processor()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), features)
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _say_not_stored(error: Exception) -> None:
    reason = str(error).removesuffix(".")
    print(
        f"warning: compiled programs are not kept, so the next start compiles again ({reason}). Free disk space, or "
        "name another folder as compilation_cache (empty: none).",
        file=sys.stderr,
    )


def _with_hash(value: bytes) -> bytes:
    return hashlib.sha256(value).digest() + value


def _checked(entry: bytes) -> bytes | None:
    """Returns the value of an entry, or None if it does not match its hash."""
    matches = entry[:_HASH_BYTES] == hashlib.sha256(entry[_HASH_BYTES:]).digest()
    return entry[_HASH_BYTES:] if matches else None


class ProgramFolder(CacheInterface):
    """The entries, one file each: a hash of the content, and the content."""

    def __init__(self, folder: pathlib.Path, max_bytes: int = MAX_BYTES):
        """Opens an existing folder; above `max_bytes` the least recently used entries are removed."""
        self._path, self._max_bytes, self._writes = folder, max_bytes, True
        for file in folder.glob(f"*{_PARTIAL}"):  # of killed processes
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > ABANDONED_AFTER_S:
                    file.unlink()

    def get(self, key: str) -> bytes | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns an entry; None if there is none, or none that matches its hash."""
        file = self._path / key
        try:
            entry = file.read_bytes()
        except OSError:  # another process may remove it at any time; what can't be read is compiled
            return None
        value = _checked(entry)
        with contextlib.suppress(OSError):  # a folder that may only be read
            file.unlink() if value is None else os.utime(file)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Adds an entry, and removes old ones if all together are too large."""
        if not self._writes or len(value) > self._max_bytes:
            return
        try:
            with tempfile.NamedTemporaryFile(dir=self._path, suffix=_PARTIAL, delete=False) as partial:
                try:
                    partial.write(_with_hash(value))
                    partial.close()
                    os.replace(partial.name, self._path / key)
                except OSError:
                    os.unlink(partial.name)
                    raise
        except OSError as error:
            self._writes = False
            _say_not_stored(error)
            return
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        entries = []
        for file in self._path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                entries.append((status.st_mtime_ns, status.st_size, file))
        total = sum(size for _, size, _ in entries)
        for _, size, file in sorted(entries):
            if total <= self._max_bytes:
                break
            file.unlink(missing_ok=True)
            total -= size


class ProgramBucket(CacheInterface):
    """The entries in a folder of a bucket, one object each; the folder of this machine caches them.

    Objects appear whole. This class removes none; the lifecycle rules of the bucket may delete old ones.
    """

    def __init__(self, url: str, folder: ProgramFolder):
        """Lists the entries once, so that a missing one costs no request later. May raise BucketError."""
        self._url, self._folder, self._is_reachable = url, folder, True
        self._names = set(buckets.objects(url))

    def get(self, key: str) -> bytes | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns an entry of this machine or of the bucket; None if there is none, or none that matches its hash."""
        value = self._folder.get(key)
        if value is not None or key not in self._names or not self._is_reachable:
            return value
        try:
            value = _checked(buckets.read_bytes(buckets.path(f"{self._url}/{key}")))
        except FileNotFoundError:  # deleted meanwhile
            return None
        except OSError as error:
            self._give_up(error)
            return None
        if value is not None:
            self._folder.put(key, value)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Adds an entry on this machine and in the bucket."""
        self._folder.put(key, value)
        if not self._is_reachable:
            return
        try:
            with buckets.reachable(self._url):
                buckets.file_system().pipe_file(f"{self._url}/{key}", _with_hash(value))
            self._names.add(key)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_reachable = False
        _say_not_stored(error)

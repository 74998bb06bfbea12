"""Files that survive a kill: written as a whole, or by lines and read up to the last finished one."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.buckets import AnyPath

T = TypeVar("T")
HEADER = ".header.json"  # NAME.header.json says how the stored responses NAME.jsonl were drawn and graded


def write_atomically(file: AnyPath, content: str | bytes) -> None:
    """Writes `content`; a kill, an error, or the loss of the machine leaves the old content or all of the new one.

    A link stays, and its target is replaced. What is no regular file, such as a pipe or /dev/null, gets the content.
    """
    content = content.encode() if isinstance(content, str) else content
    if buckets.is_bucket(file):  # an object appears as a whole
        file.write_bytes(content)
        return
    if file.exists() and not file.is_file():
        file.write_bytes(content)
        return
    file = pathlib.Path(os.path.realpath(file))
    partial = file.with_name(f"{file.name}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync(file.parent)


def sync(path: pathlib.Path) -> None:
    """Makes a file's content, or the names in a folder, survive the loss of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some mounted buckets can't
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(folder: pathlib.Path) -> Iterator[None]:
    """Waits for a lock on a folder and holds it, so that one process at a time reads, changes and writes a file in it.

    The lock is the kernel's, on the folder itself, so nothing is left of it after a kill. It does not reach another
    machine's copy of a bucket, and file systems without such locks (some mounted buckets) have none.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # ENOSYS, ENOTSUP, ENOLCK, EBADF
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def finished_lines(file: pathlib.Path) -> Iterator[bytes]:
    r"""Yields the lines that end with "\n"; text after the last one was cut off by a kill, or is being written."""
    if file.exists():
        with file.open("rb") as stream:
            yield from (line for line in stream if line.endswith(b"\n"))


def read_object(file: pathlib.Path, remedy: str) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ValueError for other content, with `remedy` in its message."""
    return json_object(file.read_bytes(), buckets.origin(file), remedy)


def json_object(content: str | bytes, name: object = "it", remedy: str = "") -> dict[str, Any]:
    """Returns the object in JSON; raises ValueError for other content, with `name` and `remedy` in its message."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply. {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{name} is not JSON ({error}). {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds a {type(value).__name__}, not an object. {remedy}")
    return value


def read_records(file: pathlib.Path, parse: Callable[[Any], T], kind: str, remedy: str) -> Iterator[T]:
    """Yields `parse` of the JSON value of each finished line; nothing if there is no file.

    Raises ValueError for a line that is not JSON, or that `parse` rejects; the message has `kind` and `remedy`.
    """
    for number, line in enumerate(finished_lines(file), start=1):
        try:
            yield parse(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            named = buckets.origin(file)
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{named}, line {number} is not {kind} ({why}). {remedy}") from error

"""JSON records of checkpoints: everything but the arrays, with a checksum, and the run that a record belongs to."""

import errno
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.buckets import AnyPath, BucketError

# File of a work directory that holds the run's random id.
RUN_ID = "run_id"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)
# Errors of a machine, as the system, and as TensorStore and XLA name them: they say nothing about the files.
_ERRNOS = {
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT,
    errno.EIO, errno.ENOTCONN,  # of folders of a network that is away
}  # fmt: skip
_STATUSES = (
    "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Too many open files",
    "Input/output error",
)  # fmt: skip


class DamagedError(ValueError):
    """A checkpoint is not what was saved."""


def first_line(error: BaseException) -> str:
    """Returns the beginning of an error's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def fault_of_machine(error: BaseException | None) -> BaseException | None:
    """Returns the first error of the machine among an error and its causes, or None. It says nothing about the file.

    Orbax raises some errors of TensorStore as its own, which say only where it read.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error if error.errno in _ERRNOS else None
        if isinstance(error, MemoryError) or any(status in str(error) for status in _STATUSES):
            return error
        error = error.__cause__
    return None


def unread(folder: AnyPath, iteration: int, reason: str) -> ValueError:
    return ValueError(
        f"the checkpoint of iteration {iteration} in {folder} could not be read: {reason}. It may be whole, and stays "
        "where it is: give the machine what it lacks, and run the command again."
    )


def damaged(folder: AnyPath, iteration: int, what: str) -> DamagedError:
    return DamagedError(f"the checkpoint of iteration {iteration} in {folder} is damaged: {what}.")


def holds_checkpoint(workdir: pathlib.Path) -> bool:
    """Returns True if there may be a checkpoint to resume from, without opening anything."""
    return any(buckets.checkpoints(workdir).glob("[0-9]*"))


def record_file(folder: AnyPath, iteration: int) -> AnyPath:
    """Returns the file that Orbax writes for `JsonSave`."""
    return folder / str(iteration) / "run" / "metadata"


def checksum(record: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=16).hexdigest()


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a record's file."""
    return {"record": record, "checksum": checksum(record)}


def read(folder: AnyPath, iteration: int) -> dict[str, Any]:
    """Returns the record of an iteration; raises DamagedError if it can't be read or is not what was saved.

    Raises ValueError where the machine could not read it, and it may be whole.
    """
    try:
        saved = json.loads(buckets.read_bytes(record_file(folder, iteration)))
        record, expected = saved["record"], saved["checksum"]
        if not isinstance(record, dict):
            raise TypeError("it is no object")
    except BucketError:  # the checkpoint may be whole
        raise
    except _UNREADABLE as error:
        if fault_of_machine(error) is not None:
            raise unread(folder, iteration, first_line(error)) from error
        raise damaged(folder, iteration, f"its record can't be read ({first_line(error)})") from error
    if checksum(record) != expected:
        raise damaged(folder, iteration, "its record is not what was saved")
    return record


def foreign(record: Mapping[str, Any], iteration: int, run_id: str | None) -> str:
    """Returns why the record in the folder of an iteration does not belong to a run; "" if it does.

    With `run_id` None only the iteration is compared.
    """
    if record.get("iteration") != iteration:
        return f"its record is that of iteration {record.get('iteration')}"
    if run_id is not None and record.get("run_id") != run_id:
        return f"its run has the id {record.get('run_id')}, this one {run_id}"
    return ""


def read_run_id(workdir: pathlib.Path) -> str | None:
    """Returns the id in a work directory; if its file was lost, that of the newest readable record, or None."""
    file = workdir / RUN_ID
    text = file.read_text(errors="replace").strip() if file.is_file() else ""
    if re.fullmatch("[0-9a-f]{32}", text):
        return text
    newest = newest_record(workdir)
    return None if newest is None else newest.get("run_id")


def newest_record(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Returns the newest readable record of a run's checkpoints; None without one."""
    folder = buckets.checkpoints(workdir)
    numbers = (int(entry.name) for entry in folder.glob("[0-9]*") if entry.name.isdecimal())
    for iteration in sorted(numbers, reverse=True):
        try:
            return read(folder, iteration)
        except DamagedError:
            continue
    return None

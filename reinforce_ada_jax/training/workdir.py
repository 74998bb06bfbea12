"""A run's folder: one training at a time in it, and the configuration that all its processes find there.

A second training would cut the first one's metrics back and write over its checkpoints.
"""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import secrets
import socket
import subprocess
import time

import jax

import reinforce_ada_jax
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import HEADER, write_atomically
from reinforce_ada_jax.files.lease import Lease
from reinforce_ada_jax.reporting.history import STARTED
from reinforce_ada_jax.training import records

FILE = "training.lock"
# What a run appends to or makes during its work. An error there would come after the first update.
FOLDERS = ("checkpoints", "evaluations", "logs", "samples", "tensorboard", "unfinished")
FILES = ("metrics.jsonl", "saves.jsonl")


class WorkdirLock:
    """Lock of a work directory: the kernel's `flock`, held by process 0 until `close` or until the process ends.

    The file stays, and says who had it last. On file systems without `flock` (some mounted buckets) nothing is held.
    For the local copy of a folder in a bucket, a lease in the bucket is held (files/lease.py).
    """

    def __init__(self, workdir: pathlib.Path):
        """Makes the work directory if needed; ValueError, in every process, if another training holds it."""
        self._descriptor: int | None = None
        self._lease: Lease | None = None
        refused = self._take(workdir.absolute()) if processes.is_writer() else ""
        if refused := processes.of_writer(refused):
            raise ValueError(refused)

    def _take(self, workdir: pathlib.Path) -> str:
        """Takes the lock; returns why it can't be taken, or ""."""
        named = buckets.origin(workdir)
        if buckets.is_bucket(named):
            self._lease = Lease(f"{named}/{FILE}")
            holder = self._lease.take()
            return holder and (
                f"another training runs in {named} ({holder}), and two would write over each other's files: wait for "
                "it, end it, or name another --workdir."
            )
        workdir.mkdir(parents=True, exist_ok=True)
        file = workdir / FILE
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)  # no child process inherits it (PEP 446)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            self.close()
            return (
                f"another training runs in {workdir} ({holder or 'it has not said which'}), and two would write over "
                f"each other's files: wait for it, end it, or name another --workdir. Where its machine is gone, and "
                f"the file server still holds its lock, remove {file}."
            )
        except OSError:  # ENOSYS, ENOTSUP, ENOLCK: this file system has no locks
            self.close()
            return ""
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return ""

    def check(self) -> None:
        """Raises BucketError if another training has taken the bucket over; in process 0 alone."""
        if self._lease is not None:
            self._lease.check()

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def check_contents(workdir: pathlib.Path) -> None:
    """Raises ValueError for a folder of stored responses, and for a file in place of a folder, or vice versa."""
    stored = next(workdir.glob(f"*{HEADER}"), None)
    if stored is not None and not (workdir / "config.json").exists():
        raise ValueError(
            f"{buckets.origin(workdir)} holds the responses of an evaluation ({stored.name}), and no run: name another "
            "--workdir."
        )
    for name in (*FOLDERS, *FILES):
        path = workdir / name
        if path.exists() and path.is_dir() != (name in FOLDERS):
            found, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
            raise ValueError(
                f"{path} is a {found}, and a run keeps a {wanted} there: move it, or name another --workdir."
            )


def run_id(workdir: pathlib.Path) -> str:
    """Returns the id of the run in a work directory, the same in all processes; a new run gets a random one."""
    found = ""
    if processes.is_writer():
        found = records.read_run_id(workdir) or secrets.token_hex(16)
        write_atomically(workdir / records.RUN_ID, found + "\n")
    return processes.of_writer(found)


def write_started(workdir: pathlib.Path) -> None:
    """Writes started.json: when this start of the run was, on what devices, from what commit of the program."""
    if processes.is_writer():
        device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        started = {"date": date, "commit": _commit(), "device": device}
        write_atomically(workdir / STARTED, json.dumps(started, indent=2) + "\n")


def _commit() -> str:
    """Returns the commit of the program's checkout; its version if it is no checkout, as in a wheel."""
    root = pathlib.Path(reinforce_ada_jax.__file__).parents[1]
    if not (root / ".git").exists():
        return reinforce_ada_jax.__version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of another user
        return reinforce_ada_jax.__version__


def write_config(config: config_lib.Config, workdir: pathlib.Path) -> None:
    """Writes config.json; raises ValueError if not all processes of the run see it."""
    file, named = workdir / "config.json", buckets.origin(workdir)
    if processes.is_writer():
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomically(file, config_lib.to_json(config))
    if buckets.is_bucket(named):
        processes.check_same("the work directories", named)
        return
    processes.any_of(False)  # until it is written
    for _ in range(processes.SHARED_AFTER_S):
        if not processes.any_of(not file.exists()):
            return
        time.sleep(1.0)
    raise ValueError(
        f"{workdir} is a folder of process 0 alone: checkpoints need one that all processes share (a mounted bucket, "
        "NFS)."
    )

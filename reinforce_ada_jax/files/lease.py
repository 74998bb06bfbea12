"""A lease: an object of a bucket that one process at a time holds. Locks of files don't guard two machines.

The holder writes the object again every ten seconds, on the condition that the object is still its own. Buckets check
such a condition with the write, so of two processes one fails. No clocks are compared: a lease is stale if its object
does not change while another process watches it.
"""

import contextlib
import json
import os
import pathlib
import secrets
import socket
import threading
import time
from typing import Any

from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import json_object

RENEW_S, STALE_S = 10.0, 40.0
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


class LostError(buckets.BucketError):
    """Another process has taken the lease over, so this one must write nothing more."""


def _machine() -> str:
    """Returns an identifier of the process table that this process sees: the boot of the machine, and the container."""
    try:
        return f"{_BOOT.read_text(encoding='utf-8').strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_gone(holder: dict[str, Any]) -> bool:
    """Returns True if the holder was a process of this machine and has ended; False if that can't be known."""
    if not _machine() or holder.get("machine") != _machine():
        return False
    try:
        os.kill(int(holder["process"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, KeyError, ValueError, TypeError, OverflowError):  # any writer of the bucket chooses the content
        pass
    return False


class Lease:
    """The object of a lease, and, while it is held, a thread that renews it."""

    def __init__(self, url: str, *, renew_s: float = RENEW_S, stale_s: float = STALE_S):
        """Opens the bucket of the object; one that does not change for `stale_s` has no holder any more."""
        import tensorstore  # noqa: PLC0415

        folder, self._name = buckets.url(url).rsplit("/", 1)
        self._store: Any = tensorstore.KvStore.open(f"{folder}/").result()
        self.url, self._renew_s, self._stale_s = buckets.url(url), renew_s, stale_s
        self._generation, self._renewed_at = b"", 0.0
        self._lock, self._end = threading.Lock(), threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._renew_while_held, name="lease", daemon=True)
        holder = {"process": os.getpid(), "host": socket.gethostname(), "machine": _machine()}
        self._content = holder | {"token": secrets.token_hex(8)}

    def take(self) -> str:
        """Takes the lease; returns "" or, if another process holds it, which one.

        Waits for `stale_s` where the object of another process is found, to see whether it is renewed.
        """
        found = self._read()
        begin = time.monotonic()
        while found.state == "value":
            holder = self._parsed(found.value)
            if _is_gone(holder) or time.monotonic() - begin >= self._stale_s:
                break
            time.sleep(min(self._renew_s / 2, self._stale_s))
            again = self._read()
            if again.state == "value" and again.stamp.generation != found.stamp.generation:
                return f"process {holder.get('process')} on {holder.get('host')}"
            found = again
        if not self._write(found.stamp.generation):
            holder = self._parsed(self._read().value)
            return f"process {holder.get('process')} on {holder.get('host')}"
        self._thread.start()
        return ""

    def _read(self) -> Any:
        with buckets.reachable(self.url):
            return self._store.read(self._name).result()

    @staticmethod
    def _parsed(content: bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            return json_object(content)
        return {}

    def _write(self, expected: bytes) -> bool:
        """Writes the object if it has the `expected` generation; returns False if it has another one."""
        content = json.dumps(self._content).encode()
        with buckets.reachable(self.url):
            generation = self._store.write(self._name, content, if_equal=expected).result().generation
        if not generation:
            # A write whose answer was lost is repeated, and then finds its own object.
            found = self._read()
            if found.state != "value" or found.value != content:
                return False
            generation = found.stamp.generation
        self._generation, self._renewed_at = generation, time.monotonic()
        return True

    def _renew(self) -> None:
        with self._lock:
            self._lost = self._lost or not self._write(self._generation)

    def _renew_while_held(self) -> None:
        while not self._end.wait(self._renew_s) and not self._lost:
            with contextlib.suppress(buckets.BucketError):  # `check` raises the error if the time runs out
                self._renew()

    def check(self) -> None:
        """Raises LostError if another process has the lease, BucketError if that can't be found out."""
        if not self._lost and time.monotonic() - self._renewed_at > self._stale_s / 2:
            self._renew()
        if self._lost:
            raise LostError(
                f"another training has taken over {self.url.rpartition('/')[0]}, so this one writes no more"
            )

    def close(self) -> None:
        """Removes the object, so that the next process need not wait."""
        self._end.set()
        if not self._thread.is_alive():
            return
        self._thread.join()
        if not self._lost:
            with contextlib.suppress(buckets.BucketError), buckets.reachable(self.url):  # otherwise it becomes stale
                self._store.write(self._name, None, if_equal=self._generation).result()

"""Sessions, models, samplers, checkpoints and requests in one SQLite file, which survives a kill.

A request of a model is stored before its future is answered, and removed from the queue in the same transaction that
stores its result and names the model's new state. So every request counts once, whenever the process dies.
"""

import dataclasses
import errno
import json
import pathlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from reinforce_ada_jax.serving.tinker.protocol import Result

FILE = "service.sqlite"
FULL_DISK = "The disk of --workdir is full: free some space."
MOST_SEQ = 2**63 - 1  # the largest integer of SQLite
# A result that the client has fetched may be asked for again, if the answer was lost on its way.
FORGOTTEN_AFTER_S = 600.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, ended TEXT);
CREATE TABLE IF NOT EXISTS models (
  id TEXT PRIMARY KEY, session TEXT, base TEXT, rank INTEGER, targets TEXT, metadata TEXT, next_seq INTEGER,
  state_seq INTEGER, created REAL, ended TEXT);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, session TEXT, base TEXT, path TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (
  path TEXT PRIMARY KEY, model TEXT, kind TEXT, base TEXT, created REAL, expires REAL, metadata TEXT, sampler TEXT);
CREATE TABLE IF NOT EXISTS requests (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, model TEXT, seq INTEGER, kind TEXT, body BLOB,
  content_type TEXT, result BLOB, fetched REAL);
CREATE INDEX IF NOT EXISTS waiting ON requests (model, seq) WHERE result IS NULL;
"""


@dataclasses.dataclass(frozen=True)
class ModelRow:
    """A model: adapters in training."""

    id: str
    session: str
    base: str
    rank: int
    targets: Sequence[str]
    metadata: dict[str, Any]  # of the user
    next_seq: int  # number of the request that runs next
    state_seq: int  # number of the request that made the stored state
    created: float
    ended: str | None  # why nothing can be trained any more; None while it can


@dataclasses.dataclass(frozen=True)
class SamplerRow:
    """A sampling session: a base, and the path of adapters or None."""

    id: str
    session: str
    base: str
    path: str | None


@dataclasses.dataclass(frozen=True)
class CheckpointRow:
    """Saved adapters; `kind` is "weights", "sampler_weights" or "external_weights"."""

    path: str
    model: str
    kind: str
    base: str
    created: float
    expires: float | None
    metadata: dict[str, str] | None
    sampler: str | None


@dataclasses.dataclass(frozen=True)
class RequestRow:
    """A request of a model, in the order in which they arrived."""

    number: int
    id: str
    model: str
    seq: int
    kind: str
    body: bytes


def disk_is_full(error: BaseException) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


Row = TypeVar("Row", ModelRow, SamplerRow, CheckpointRow, RequestRow)


class Store:
    """The SQLite file of a work directory, used by several threads."""

    def __init__(self, workdir: pathlib.Path):
        """Opens the file, or makes it; ValueError if another server has it open."""
        workdir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(workdir / FILE, check_same_thread=False, isolation_level=None, timeout=1.0)
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(SCHEMA)
        except sqlite3.OperationalError as error:
            raise ValueError(
                f"{workdir / FILE} cannot be used ({error}): stop the other server of this --workdir, or choose "
                "another."
            ) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended it
                    self._db.execute("ROLLBACK")
                raise

    def _run(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    def _records(self, kind: type[Row], statement: str, *values: Any) -> list[Row]:
        """Returns rows of a table; lists and mappings are stored in it as JSON."""
        found = []
        for row in self._run(statement, *values):
            columns = {field.name: row[field.name] for field in dataclasses.fields(kind)}
            parsed = {name: json.loads(columns[name]) for name in ("targets", "metadata") if columns.get(name)}
            found.append(kind(**columns | parsed))
        return found

    def _one(self, kind: type[Row], statement: str, *values: Any) -> Row | None:
        return next(iter(self._records(kind, statement, *values)), None)

    def _insert(self, table: str, row: Any, conflict: str = "ABORT") -> None:
        values = [json.dumps(value) if isinstance(value, tuple | dict) else value for value in vars(row).values()]
        places = ", ".join("?" * len(values))
        self._run(f"INSERT OR {conflict} INTO {table} VALUES ({places})", *values)

    # ---- sessions ------------------------------------------------------------------------------------------------

    def add_session(self, session: str) -> None:
        self._run("INSERT INTO sessions (id) VALUES (?)", session)

    def sessions(self) -> dict[str, str | None]:
        """Returns every session, with the reason for which it ended or None."""
        return {row["id"]: row["ended"] for row in self._run("SELECT * FROM sessions")}

    def end_session(self, session: str, why: str, answer: Result) -> list[str]:
        """Ends a session, its models and its samplers; returns the requests that waited, which get this answer.

        They could never run if a request before them is missing: the client can no longer send it.
        """
        with self.transaction():
            waiting = self._run(
                "UPDATE requests SET content_type = ?, result = ?, body = NULL WHERE content_type IS NULL "
                "AND model IN (SELECT id FROM models WHERE session = ?) RETURNING id",
                answer.content_type, answer.body, session,
            )  # fmt: skip
            self._run("UPDATE sessions SET ended = ? WHERE id = ?", why, session)
            self._run("UPDATE models SET ended = ? WHERE session = ?", why, session)
            self._run("DELETE FROM samplers WHERE session = ?", session)
        return [row["id"] for row in waiting]

    # ---- models --------------------------------------------------------------------------------------------------

    def add_model(self, model: ModelRow) -> None:
        self._insert("models", model)

    def models(self) -> list[ModelRow]:
        return self._records(ModelRow, "SELECT * FROM models ORDER BY created")

    def model(self, model_id: str) -> ModelRow | None:
        return self._one(ModelRow, "SELECT * FROM models WHERE id = ?", model_id)

    def set_state(self, model: str, seq: int) -> None:
        self._run("UPDATE models SET state_seq = ? WHERE id = ?", seq, model)

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, model: str, seq: int, kind: str, body: bytes) -> None:
        """Adds a request, unless it is there: a client sends one again if it got no answer."""
        self._run(
            "INSERT OR IGNORE INTO requests (id, model, seq, kind, body) VALUES (?, ?, ?, ?, ?)",
            request_id, model, seq, kind, body,
        )  # fmt: skip

    def num_waiting(self) -> dict[str, int]:
        """Returns the number of requests without a result of each model that has some."""
        rows = self._run(
            "SELECT model, COUNT(*) AS n FROM requests WHERE result IS NULL AND content_type IS NULL GROUP BY model"
        )
        return {row["model"]: row["n"] for row in rows}

    def num_creating(self) -> int:
        """Returns the number of requests without a result that make models."""
        return self._run("SELECT COUNT(*) AS n FROM requests WHERE content_type IS NULL AND seq = 0")[0]["n"]

    def next_request(self) -> RequestRow | None:
        """Returns the oldest request whose predecessors of the same model have their results."""
        return self._one(
            RequestRow,
            "SELECT r.* FROM requests r LEFT JOIN models m ON m.id = r.model "
            "WHERE r.result IS NULL AND r.content_type IS NULL AND r.seq <= COALESCE(m.next_seq, 0) "
            "ORDER BY r.number LIMIT 1",
        )

    def done_since(self, model: str, state_seq: int, kind: str) -> list[RequestRow]:
        """Returns the requests of a kind that ran after a model's stored state was made, in order."""
        return self._records(
            RequestRow,
            "SELECT * FROM requests WHERE model = ? AND seq > ? AND kind = ? AND content_type IS NOT NULL "
            "AND body IS NOT NULL ORDER BY seq",
            model, state_seq, kind,
        )  # fmt: skip

    def finish(self, request: RequestRow, result: Result, *, replayed: bool) -> None:
        """Stores a result, unless there is one, and lets the model's next request run.

        A request that is `replayed` may have to run again after a kill, and keeps its body.
        """
        body = request.body if replayed else None
        with self.transaction():
            self._run(
                "UPDATE requests SET content_type = ?, result = ?, body = ? WHERE number = ? AND content_type IS NULL",
                result.content_type, result.body, body, request.number,
            )  # fmt: skip
            self._run("UPDATE models SET next_seq = MAX(next_seq, ?) WHERE id = ?", request.seq + 1, request.model)

    def drop_replays(self, model: str, state_seq: int) -> None:
        """Removes the bodies that a stored state makes superfluous, and results fetched some time ago."""
        self._run(
            "UPDATE requests SET body = NULL WHERE model = ? AND seq <= ? AND content_type IS NOT NULL",
            model, state_seq,
        )  # fmt: skip
        self._run("UPDATE requests SET result = NULL WHERE fetched < ?", time.time() - FORGOTTEN_AFTER_S)

    def result(self, request_id: str) -> tuple[bool, Result | None]:
        """Returns (the request is known and its result not removed, its result or None while it waits)."""
        rows = self._run("SELECT content_type, result FROM requests WHERE id = ?", request_id)
        if not rows or (rows[0]["content_type"] is not None and rows[0]["result"] is None):
            return False, None
        if rows[0]["result"] is None:
            return True, None
        self._run("UPDATE requests SET fetched = ? WHERE id = ?", time.time(), request_id)
        return True, Result(rows[0]["content_type"], rows[0]["result"])

    # ---- samplers and checkpoints --------------------------------------------------------------------------------

    def add_sampler(self, sampler: SamplerRow) -> None:
        """Adds a sampling session, unless it is there."""
        self._insert("samplers", sampler, "IGNORE")

    def sampler(self, sampler_id: str) -> SamplerRow | None:
        return self._one(SamplerRow, "SELECT * FROM samplers WHERE id = ?", sampler_id)

    def add_checkpoint(self, checkpoint: CheckpointRow) -> None:
        """Adds a checkpoint, in place of one of the same path."""
        self._insert("checkpoints", checkpoint, "REPLACE")

    def checkpoints(self) -> list[CheckpointRow]:
        return self._records(CheckpointRow, "SELECT * FROM checkpoints ORDER BY created")

    def checkpoint(self, path: str) -> CheckpointRow | None:
        return self._one(CheckpointRow, "SELECT * FROM checkpoints WHERE path = ?", path)

    def remove_checkpoint(self, path: str) -> None:
        self._run("DELETE FROM checkpoints WHERE path = ?", path)

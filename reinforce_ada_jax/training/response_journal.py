"""Journal of graded responses of iterations that no checkpoint holds yet, for a resumed run.

Drawing takes most of an iteration, and its result is small: 8 bytes a token. So each collection is written to a file
when it is complete, and one that a request to end breaks off is written with the responses so far. So that a kill costs
little, the responses of a running collection are written as well, once a minute. The other processes send theirs to
process 0. The file names the weights that they are drawn from by their fingerprints. A resumed run that draws the
iteration from these weights takes the responses from the file; they have the bits that drawing again would give. The
file is removed once a checkpoint has the iteration.
"""

import dataclasses
import hashlib
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes, to_bytes
from reinforce_ada_jax.data.problems import json_hash
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.files.durable import write_atomically
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.training import fingerprints
from reinforce_ada_jax.training.state import RunState
from reinforce_ada_jax.types import PartialRollouts, Prompt

FOLDER, SUFFIX = "unfinished", ".responses"  # in the work directory; a line of JSON, then a CollectedShard
TOKEN_BYTES = 8
# Limit of all files, 250 million tokens, so that they fill no disk. A resumed run draws further ones again.
MOST_BYTES = 2 * 10**9
# Least seconds between two writings of a collection that goes on, and the largest share of the time that they take:
# 120 MB, 15 million tokens, take a second or two.
EVERY_S, MOST_SHARE = 60.0, 0.02


class Pace:
    """Rate at which responses so far are sent and written: once in EVERY_S; twice in a run of several processes.

    What was sent is up to one period old when it is written.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """The first call is due after a period; `clock` counts seconds."""
        self._clock, self._next_at = clock, clock() + self._period_s()

    def call(self, action: Callable[[], None]) -> None:
        """Calls the action if it is due."""
        begin = self._clock()
        if begin < self._next_at:
            return
        action()
        now = self._clock()
        self._next_at = now + max(self._period_s(), (now - begin) / MOST_SHARE)

    @staticmethod
    def _period_s() -> float:
        return EVERY_S / min(processes.total(), 2)


@dataclasses.dataclass(frozen=True, eq=False)
class _Origin:
    """Weights and choice of prompts that a collection is drawn from."""

    iteration: int
    weights: LearnerState | Params
    selection: str  # hash of the state that chose the prompts, which weights that are drawn ahead from do not determine


class ResponseJournal:
    """The `unfinished` folder of a work directory; process 0 reads and writes it."""

    def __init__(
        self,
        workdir: pathlib.Path,
        identity: Mapping[str, Any],
        *,
        limit_bytes: int = MOST_BYTES,
        broken_off: bool,
        ready: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Finds the files of an earlier start; all processes must call it.

        Files of a run with another identity are not used, and all files together have at most `limit_bytes`. With
        `broken_off` the responses of an incomplete collection are stored, too. A resumed run draws the missing ones in
        other slots, so this needs devices, or numerics, that round alike in each slot. `ready` waits until the program
        of the fingerprints is compiled; `clock` counts seconds.
        """
        self._folder, self._limit_bytes = workdir / FOLDER, limit_bytes
        self._identity, self._ready = json_hash(identity), ready
        self._stores_broken_off = broken_off
        self._broken_off = CollectedShard([])
        self._clock, self._pace = clock, Pace(clock)  # of a collection that goes on
        self._origin: _Origin | None = None  # of the newest collection
        self._given = CollectedShard([])  # what an earlier start stored of it
        self._known: tuple[LearnerState | Params, list[int]] | None = None  # weights and their fingerprints
        self._writing = threading.Lock()  # a thread may draw, and store, while the main one removes files
        self._sent: dict[int, tuple[int, bytes]] = {}  # iteration and responses so far of other processes
        files = self._folder.glob(f"*{SUFFIX}") if processes.is_writer() else ()
        found = json.dumps([int(file.stem) for file in files if file.stem.isdecimal()])
        self._found: set[int] = set(json.loads(processes.of_writer(found)))

    def begin(self) -> CollectedShard:
        """Returns a record for the responses of a collection that may be broken off."""
        self._broken_off = CollectedShard([])
        return self._broken_off

    def read(self, state: RunState, prompts: Iterable[Prompt]) -> CollectedShard | None:
        """Returns what is stored of the iteration after `state`, if it was drawn from the weights that `state` names.

        The record has the pools of all prompts if the collection was complete, otherwise the rollouts so far. From
        now on, collected responses belong to these weights (`store_so_far`, `write_broken_off`).
        """
        origin = self._origin = _origin(state)
        self._pace, self._given = Pace(self._clock), CollectedShard([])
        self._sent.clear()
        if state.sampler_weights is not None or (self._stores_broken_off and processes.count() > 1):
            self._fingerprints(origin.weights)  # a program of all learners, which a thread that draws can't call
        if origin.iteration not in self._found:
            return None
        self._found.discard(origin.iteration)
        file = self._file(origin.iteration)
        own = processes.exchange(file.read_bytes() if processes.is_writer() and file.exists() else b"")[0]
        header, _, content = own.partition(b"\n")
        if header != self._header(origin, content):
            return None
        self._given = from_bytes(content, prompts)
        return self._given

    def write(self, state: RunState, collected: CollectedShard) -> bool:
        """Stores the collection of the iteration after `state`; False if it is too large. Every process calls it."""
        return self._write(_origin(state), collected)

    def _write(self, origin: _Origin, collected: CollectedShard) -> bool:
        content = to_bytes(collected)
        header = self._header(origin, content)
        if not processes.is_writer():
            return True
        file = self._file(origin.iteration)
        with self._writing:
            others = sum(other.stat().st_size for other in self._folder.glob(f"*{SUFFIX}") if other != file)
            if others + len(content) > self._limit_bytes:
                return False
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, header + b"\n" + content)
        return True

    def write_broken_off(self) -> int:
        """Stores the responses of the newest collection if it was broken off; returns their number.

        Every process must call it. If all of them are larger than the limit, some prompts have none.
        """
        collected = self._broken_off
        if self._origin is None or not collected.partial or not self._stores_broken_off:
            return 0
        saved = CollectedShard([], _within(collected.partial, self._limit_bytes), collected.counts)
        return saved.num_responses if self._write(self._origin, saved) else 0

    def store_so_far(self, iteration: int, so_far: Callable[[], CollectedShard]) -> None:
        """Stores the responses so far once a minute, so that a kill costs a minute of drawing.

        `so_far` returns those of this process, or of all that only draw. Nothing is done if broken collections are not
        stored.
        """
        origin = self._origin
        if self._stores_broken_off and origin is not None and origin.iteration == iteration:
            self._pace.call(lambda: self._store(origin, so_far()))

    def _store(self, origin: _Origin, collected: CollectedShard) -> None:
        if not processes.is_writer():
            processes.send(0, b"%d\n" % origin.iteration + to_bytes(collected))
            return
        # What was stored before stays until newer responses of its prompts are there.
        merged = CollectedShard([], dict(self._given.partial), dict(self._given.counts))
        for newer in (*self._received(origin.iteration), collected):
            merged.add_rollouts(newer)
        self._write(origin, CollectedShard([], _within(merged.partial, self._limit_bytes), merged.counts))

    def _received(self, iteration: int) -> list[CollectedShard]:
        """Returns the newest message of each other process about an iteration."""
        for process in range(1, processes.count()):
            while processes.has_sent(process):
                number, _, content = processes.receive(process).partition(b"\n")
                self._sent[process] = int(number), content
        return [from_bytes(content, ()) for number, content in self._sent.values() if number == iteration]

    def forget(self, iteration: int) -> None:
        """Removes the files of iterations up to this one, which a complete checkpoint has."""
        if processes.is_writer():
            with self._writing:
                for file in self._folder.glob(f"*{SUFFIX}"):
                    if file.stem.isdecimal() and int(file.stem) <= iteration:
                        file.unlink(missing_ok=True)

    def _file(self, iteration: int) -> pathlib.Path:
        return self._folder / f"{iteration:06d}{SUFFIX}"

    def _header(self, origin: _Origin, content: bytes) -> bytes:
        """Returns the first line of a file: identity of the run, origin and hash of the content."""
        record = {
            "identity": self._identity,
            "iteration": origin.iteration,
            "weights": self._fingerprints(origin.weights),
            "selection": origin.selection,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        return json.dumps(record).encode()

    def _fingerprints(self, weights: LearnerState | Params) -> list[int]:
        """Returns the fingerprints of the weights. Every process must make the first call for given weights."""
        if self._known is None or self._known[0] is not weights:
            self._ready()
            self._known = weights, fingerprints.numbers(weights)
        return self._known[1]


def _origin(state: RunState) -> _Origin:
    """Returns what the iteration after `state` is drawn from."""
    weights = state.learner if state.sampler_weights is None else state.sampler_weights
    return _Origin(state.iteration + 1, weights, json_hash(state.selection))


def _within(partial: Mapping[str, PartialRollouts], limit_bytes: int) -> dict[str, PartialRollouts]:
    """Returns rollouts of as many prompts as fit into three quarters of the limit; their records need the rest."""
    size, fitting = 0, {}
    for prompt_id, rollouts in partial.items():
        found = *(response for response in rollouts.responses if response is not None), *rollouts.begun
        size += sum(TOKEN_BYTES * len(r.tokens) + (0 if r.experts is None else r.experts.nbytes) for r in found)
        if size > 0.75 * limit_bytes:
            break
        fitting[prompt_id] = rollouts
    return fitting

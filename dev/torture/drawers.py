"""Pods in which some processes only draw, killed while they do: what is lost, and what is drawn twice."""

import functools
import io
import json
import pathlib
import shutil
import sys
import time

import numpy as np

from dev.torture.bench import Bench
from dev.torture.runs import Kind, Runs, assert_same_bits, ended, kill_once
from tests.forked import Forked

# Drawing takes most of the time. Each process that draws logs its responses (time, iteration, prompt, draw) beside the
# work directory. They are stored twice a second. Invariant numerics are made for one device of each side: here several
# may learn, or draw.
SLOW = """
import json, os, sys, time
from reinforce_ada_jax.collection.request_queue import CollectionQueue
from reinforce_ada_jax.config import rules
from reinforce_ada_jax.training import drawing_host, response_journal
rules.RULES = tuple(rule for rule in rules.RULES if rule is not rules.invariant_numerics_are_possible)
response_journal.EVERY_S, response_journal.MOST_SHARE = 0.5, 1e9
(workdir,) = (flag.partition("=")[2] for flag in sys.argv if flag.startswith("--workdir="))
log, iteration = os.open(f"{workdir}-drawn", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 0
def drawn(inputs, rollouts, weights, order, original=drawing_host._drawn):
    global iteration
    iteration = order.iteration
    return original(inputs, rollouts, weights, order)
def receive(self, responses, original=CollectionQueue.receive):
    time.sleep(0.2)
    original(self, responses)
    lines = [json.dumps([time.time(), iteration, each.prompt_id, each.draw]) + "\\n" for each in responses]
    os.write(log, "".join(lines).encode())
drawing_host._drawn, CollectionQueue.receive = drawn, receive
"""
CHANGES = (
    ("iterations", 3), ("evaluation.every", 0), ("model.numerics", "invariant"), ("collection.speculative", False),
    ("sampling.slots", 4),
)  # fmt: skip
KINDS = tuple(
    Kind(
        learning + drawing, 1,
        (*CHANGES, ("mesh.data", learning), ("mesh.sampler", drawing), ("collection.strategy", strategy)), True, SLOW,
    )
    for learning, drawing, strategy in ((1, 1, "balance"), (2, 1, "balance"), (1, 2, "dapo"))
)  # fmt: skip
# Seconds after which a response is stored: two periods of a quarter, one of waiting, and those of a busy machine.
STORED_S = 5.0

Addresses = set[tuple[int, str, int]]  # iteration, prompt and draw of responses


def stored(workdir: pathlib.Path) -> Addresses:
    """Returns the stored responses that have ended."""
    found = set()
    for file in sorted(workdir.glob("unfinished/*.responses")):
        with np.load(io.BytesIO(file.read_bytes().partition(b"\n")[2])) as arrays:
            header = json.loads(arrays["header"].tobytes())
        for record in (*header["pools"], *header["partial"]):
            found |= {(int(file.stem), record["prompt"], entry[0]) for entry in record["responses"] if entry}
    return found


class Log:
    """Log of the responses that a run draws, and the check of each of its starts."""

    def __init__(self, workdir: pathlib.Path):
        self._workdir, self._file, self._num_read = workdir, workdir.with_name(f"{workdir.name}-drawn"), 0
        self.num_stored = self.num_lost = 0  # of incomplete iterations, at the end of each start

    def num_lines(self) -> int:
        """Returns the number of responses so far."""
        return self._file.read_bytes().count(b"\n") if self._file.exists() else 0

    def wait(self, number: int, processes: list[Forked]) -> None:
        """Waits until a start has drawn this number of responses, or has ended."""
        while self.num_lines() < self._num_read + number and all(process.poll() is None for process in processes):
            time.sleep(0.05)

    def check(self, before: Addresses, ended_at: float) -> None:
        """Checks a start at whose beginning some responses were stored, and which ended at this time."""
        lines = self._file.read_bytes().splitlines()[self._num_read :] if self._file.exists() else []
        self._num_read += len(lines)
        drawn = {(iteration, prompt, draw): at for at, iteration, prompt, draw in map(json.loads, lines)}
        twice = before & drawn.keys()
        assert not twice, f"{len(twice)} of {len(before)} stored responses are drawn again: {sorted(twice)[:3]}"
        names = [folder.name for folder in self._workdir.glob("checkpoints/*") if folder.name.isdecimal()]
        saved, now = max(map(int, names), default=0), stored(self._workdir)
        gone = {address for address in before if address[0] > saved} - now
        assert not gone, f"{len(gone)} of {len(before)} stored responses are gone: {sorted(gone)[:3]}"
        lost = {address: at for address, at in drawn.items() if address[0] > saved and address not in now}
        late = [address for address, at in lost.items() if at < ended_at - STORED_S]
        assert not late, f"{len(late)} responses were not stored within {STORED_S} s: {sorted(late)[:3]}"
        self.num_stored += len(now)
        self.num_lost += len(lost)


def drawers(bench: Bench) -> None:
    """SIGKILL and SIGTERM of any process of such a pod, up to three times in a run, and a resume to its end."""
    runs, number, num_kills, num_stored, num_lost = Runs(bench), 0, 0, 0, 0
    while bench.goes_on():
        kind = KINDS[number % len(KINDS)]
        with bench.case(f"drawers, run {number}, {kind}"):
            unbroken, _ = runs.unbroken(kind)
            workdir = runs.new_folder()
            log, whats = Log(workdir), []
            try:
                for _ in range(bench.rng.randrange(1, 4)):
                    before = stored(workdir)
                    number = bench.rng.randrange(1, max(2, Log(unbroken).num_lines() - log.num_lines()))
                    what, at = kill_once(runs, workdir, kind, bench.rng, functools.partial(log.wait, number))
                    whats.append(what)
                    num_kills += 1
                    log.check(before, at)
                num_stored, num_lost = num_stored + log.num_stored, num_lost + log.num_lost
                before = stored(workdir)
                codes, said = ended(runs.start(workdir, kind))
                assert codes == [0] * kind.processes, f"the resume: {codes} {said}"
                log.check(before, time.time())
                assert_same_bits(workdir, unbroken, kind)
            except AssertionError as error:
                raise AssertionError(f"after {whats}: {error!s:.800}") from error
            shutil.rmtree(workdir)
        number += 1
    kept = f"{num_stored} responses were stored then, and {num_lost} of the last {STORED_S:g} s were not"
    print(f"drawers: {num_kills} kills; {kept}", file=sys.stderr)

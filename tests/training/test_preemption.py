"""Runs that are told to end at 20 random moments, and continue, make the run that nothing disturbed."""

import re
import signal

import numpy as np
import pytest

from reinforce_ada_jax.collection.serialization import from_bytes
from reinforce_ada_jax.distributed import processes as processes_lib
from reinforce_ada_jax.distributed.watchdog import RESTART
from tests.forked import Forked
from tests.running import assert_same_state, environment, free_port, reproducible, texts

SETTINGS = {
    "iterations": 24, "checkpoint.every": 4, "evaluation.every": 4,
    "evaluation.samples": 1, "collection.prompts_per_iteration": 8, "learning.prompts_per_update": 4,
    "sampling.slots": 8, "sampling.window": 4, "logging.sampled_prompts": 8, "logging.trackers": "",
    "learning.micro_batches": 4,
}  # fmt: skip
# With invariant numerics a response has the same bits in another slot, so that a CPU keeps a broken collection, and
# unfinished responses go on. They are for one device; two processes draw a broken collection again.
OF_PROCESSES = {1: {"model.numerics": "invariant"}, 2: {"mesh.fsdp": 2}}
SIGTERMS = 20
PHASES = ("collecting", "updating", "evaluating", "collecting", "")  # "": the first of them, such as compiling
# Work of the engine, which has drawn again what was lost in the slots.
OF_THE_ENGINE = re.compile(
    "collection/(slot_utilisation|redone_tokens|prefills|prefilled_tokens|shared_tokens|dispatches|waited_share|draft_.*"
    "|discarded.*)"
)
# Trains with one micro-batch in a program, so that an update can be broken off.
UNHARMED = """
import runpy
from reinforce_ada_jax.config import rules
from reinforce_ada_jax.learning import platform

platform.PROGRAM_S, rules.LONG_RESPONSE = 0.0, 1
runpy.run_module("reinforce_ada_jax.train", run_name="__main__")
"""
# Ends itself, a moment after it has shown for the N-th time that it is in a phase (any of them: "").
AT_A_PHASE = """
import os, runpy, signal, threading
from reinforce_ada_jax.config import rules
from reinforce_ada_jax.learning import platform
from reinforce_ada_jax.reporting import progress

platform.PROGRAM_S, rules.LONG_RESPONSE = 0.0, 1
left = {number}

def phase(self, text, original=progress.Progress.phase):
    global left
    left -= text.startswith({phase!r})
    if left == 0:
        left = -1
        print("at", text.split(":")[0].split(" ")[0], flush=True)
        threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGTERM)).start()
    original(self, text)

progress.Progress.phase = phase
runpy.run_module("reinforce_ada_jax.train", run_name="__main__")
"""
# Stores a collection that goes on after every window.
ALWAYS_STORED = """
from reinforce_ada_jax.training import response_journal

response_journal.EVERY_S, response_journal.MOST_SHARE = 0.0, 1e9
"""
# Ends itself inside its third update, which is the first one of iteration 2.
IN_AN_UPDATE = """
import os, runpy, signal
from reinforce_ada_jax.config import rules
from reinforce_ada_jax.learning import platform
from reinforce_ada_jax.learning.update import UpdatePrograms

platform.PROGRAM_S, rules.LONG_RESPONSE = 0.0, 1
updates = 0

def update(self, state, batch, base, version, between, original=UpdatePrograms.__call__):
    global updates
    updates += 1
    if updates == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, state, batch, base, version, between)

UpdatePrograms.__call__ = update
runpy.run_module("reinforce_ada_jax.train", run_name="__main__")
"""


def start(workdir, count, how, **changes):
    """Returns the processes of a run, each with one device; `how` says how each one is started."""
    address = f"127.0.0.1:{free_port()}"
    flags = ["--config=configs/tiny.py", f"--workdir={workdir}"]
    flags += [f"--config.{key}={value}" for key, value in (SETTINGS | OF_PROCESSES[count] | changes).items()]
    started = []
    for index in range(count):
        env = environment()
        if count > 1:
            names = (processes_lib.ADDRESS, processes_lib.COUNT, processes_lib.INDEX)
            env |= dict(zip(names, (address, str(count), str(index)), strict=True))
        started.append(Forked([*how[index], *flags], env))
    return started


def ended(processes, code) -> list[str]:
    """Waits for processes; returns their outputs."""
    said = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), said
    return [out + err for out, err in said]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_twenty_sigterms_change_no_bit(tmp_path, count):
    unharmed = ("-c", UNHARMED)
    ended(start(tmp_path / "unbroken", count, [unharmed] * count), 0)
    numbers, workdir, said = np.random.default_rng(count), tmp_path / "run", []
    for number in range(SIGTERMS):
        how, phase = [unharmed] * count, PHASES[number % len(PHASES)]
        first = numbers.integers(1, 40) if phase == "collecting" else 1
        program = AT_A_PHASE.format(phase=phase, number=first, delay=numbers.uniform(0.0, 0.1))
        how[numbers.integers(count)] = ("-c", program)
        said += ended(start(workdir, count, how), RESTART)
    said = "\n".join(said)
    phases = set(re.findall("^at ([a-z]+)", said, re.MULTILINE))
    assert {"collecting", "evaluating", "updating"} <= phases, phases
    broken_off = len(re.findall(r"[1-9]\d* responses of the next collection are stored", said))
    assert broken_off > 3 if count == 1 else broken_off == 0
    assert len(re.findall(r"begins with \d+ stored responses", said)) > 3
    ended(start(workdir, count, [unharmed] * count), 0)

    assert_same_state(workdir, tmp_path / "unbroken")
    for line, expected in zip(reproducible(workdir), reproducible(tmp_path / "unbroken"), strict=True):
        assert line.keys() == expected.keys()
        assert {key for key in line if line[key] != expected[key] and not OF_THE_ENGINE.fullmatch(key)} == set()
    for folder in ("samples", "evaluations"):
        assert texts(workdir / folder) == texts(tmp_path / "unbroken" / folder)


@pytest.mark.slow
def test_kills_keep_what_a_collection_has_so_far(tmp_path):
    """A kill -9 in the middle of a collection: its responses so far are taken up, unfinished ones with their tokens."""
    few = {"iterations": 2, "evaluation.every": 0}
    (said,) = ended(start(tmp_path / "unbroken", 1, [("-c", UNHARMED)], **few), 0)
    assert "stored responses" not in said
    taken_up = []
    for number in (6, 9):
        program = AT_A_PHASE.format(phase="collecting", number=number, delay=0.0)
        killed = start(tmp_path / "run", 1, [("-c", ALWAYS_STORED + program.replace("SIGTERM", "SIGKILL"))], **few)
        (said,) = ended(killed, -signal.SIGKILL)
        taken_up += re.findall(r"iteration 1 begins with (\d+) stored responses", said)
    (said,) = ended(start(tmp_path / "run", 1, [("-c", UNHARMED)], **few), 0)
    taken_up += re.findall(r"iteration 1 begins with (\d+) stored responses", said)
    assert len(taken_up) == 2 and 0 < int(taken_up[0]) < int(taken_up[1])
    assert_same_state(tmp_path / "run", tmp_path / "unbroken")


# A CPU keeps nothing of two processes, since the rest of the responses would be rounded otherwise.
AS_AN_ACCELERATOR = """
from reinforce_ada_jax.training import components

components.rounds_alike = lambda config: True
"""


@pytest.mark.slow
def test_a_kill_of_one_process_keeps_what_both_have_drawn(tmp_path):
    few = {"iterations": 1, "evaluation.every": 0, "collection.prompts_per_iteration": 32}
    few |= {"learning.prompts_per_update": 32, "collection.strategy": "dapo"}  # of 32 prompts many are replaced
    unharmed, taken_up = AS_AN_ACCELERATOR + UNHARMED, []
    for number in (12, 24):
        program = AS_AN_ACCELERATOR + AT_A_PHASE.format(phase="collecting", number=number, delay=0.0)
        killed = ("-c", ALWAYS_STORED + program.replace("SIGTERM", "SIGKILL"))
        run = start(tmp_path / "run", 2, [("-c", ALWAYS_STORED + unharmed), killed], **few)
        said = [process.communicate(timeout=400) for process in run]
        assert [process.returncode for process in run] == [RESTART, -signal.SIGKILL], said
        taken_up += re.findall(r"iteration 1 begins with (\d+) stored responses", said[0][0] + said[0][1])
        file = tmp_path / "run" / "unfinished" / "000001.responses"
        taken_up.append(from_bytes(file.read_bytes().partition(b"\n")[2], ()).num_responses)
    said = ended(start(tmp_path / "run", 2, [("-c", unharmed)] * 2, **few), 0)
    taken_up += re.findall(r"iteration 1 begins with (\d+) stored responses", said[0])
    first, taken, second, taken_at_last = map(int, taken_up)
    assert 0 < first == taken < second == taken_at_last, taken_up


# The second process only draws. It sends what it has after every window, and counts what it draws.
SPLIT = {
    "iterations": 3, "checkpoint.every": 1, "evaluation.every": 0, "mesh.fsdp": 1, "mesh.sampler": 1,
    "model.numerics": "invariant", "collection.strategy": "grpo", "collection.prompts_per_iteration": 16,
    "collection.group_size": 4,
}  # fmt: skip
COUNTED = """
from reinforce_ada_jax.collection.request_queue import CollectionQueue
from reinforce_ada_jax.training import drawing_host

def drawn(inputs, rollouts, weights, order, original=drawing_host._drawn):
    counts = []
    def receive(self, responses, original=CollectionQueue.receive):
        counts.append(len(responses))
        original(self, responses)
    CollectionQueue.receive, before = receive, CollectionQueue.receive
    try:
        return original(inputs, rollouts, weights, order)
    finally:
        CollectionQueue.receive = before
        print(f"drew {sum(counts)} of iteration {order.iteration}", flush=True)

drawing_host._drawn = drawn
"""
# Ends itself after it has sent responses of an iteration for the third time, a moment after process 0 has stored some.
DRAWER_ENDS = """
import os, signal, sys, time
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.training.drawing_hosts import SO_FAR

def of_iteration(inputs, rollouts, weights, order, original=drawing_host._drawn):
    left = 3

    def send(process, message, original=processes.send):
        nonlocal left
        original(process, message)
        left -= message.startswith(SO_FAR) and order.iteration == {iteration}
        if not left:
            (workdir,) = (flag.partition("=")[2] for flag in sys.argv if flag.startswith("--workdir="))
            while not os.path.exists(f"{{workdir}}/unfinished/{iteration:06d}.responses"):
                time.sleep(0.1)
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)

    processes.send, before = send, processes.send
    try:
        return original(inputs, rollouts, weights, order)
    finally:
        processes.send = before

drawing_host._drawn = of_iteration
"""
# Ends itself when it has stored responses of an iteration.
LEARNER_ENDS = """
import os, signal

def store(self, origin, collected, original=response_journal.ResponseJournal._store):
    original(self, origin, collected)
    if origin.iteration == {iteration} and collected.num_responses > 4:
        os.kill(os.getpid(), signal.SIGKILL)

response_journal.ResponseJournal._store = store
"""


@pytest.fixture(scope="module")
def unbroken_split(tmp_path_factory):
    """Work directory of a run whose second process only draws; nothing disturbed it."""
    workdir = tmp_path_factory.mktemp("split") / "run"
    said = ended(start(workdir, 2, [("-c", UNHARMED), ("-c", COUNTED + UNHARMED)], **SPLIT), 0)
    assert re.findall(r"drew (\d+) of iteration (\d)", said[1]) == [("64", "1"), ("64", "2"), ("64", "3")]
    return workdir


@pytest.mark.slow  # the messages are in test_drawing_hosts.py, the files in test_response_journal.py
@pytest.mark.parametrize("iteration", [1, 3])  # the third is drawn ahead
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_keeps_what_a_process_that_only_draws_has_so_far(unbroken_split, tmp_path, victim, iteration):
    stored = ALWAYS_STORED + COUNTED
    ends = (LEARNER_ENDS, DRAWER_ENDS)[victim].format(iteration=iteration)
    programs = [stored + (ends if index == victim else "") + UNHARMED for index in range(2)]
    run = start(tmp_path / "run", 2, [("-c", program) for program in programs], **SPLIT)
    said = [process.communicate(timeout=400) for process in run]
    codes = [-signal.SIGKILL if index == victim else RESTART for index in range(2)]
    assert [process.returncode for process in run] == codes, said
    file = tmp_path / "run" / "unfinished" / f"{iteration:06d}.responses"
    found = from_bytes(file.read_bytes().partition(b"\n")[2], ())
    num_ended = sum(response is not None for each in found.partial.values() for response in each.responses)
    assert 0 < num_ended < 64

    said = ended(start(tmp_path / "run", 2, [("-c", UNHARMED), ("-c", COUNTED + UNHARMED)], **SPLIT), 0)
    assert f"iteration {iteration} begins with {found.num_responses} stored responses" in said[0]
    assert f"drew {64 - num_ended} of iteration {iteration}" in said[1], "nothing is drawn twice"
    assert_same_state(tmp_path / "run", unbroken_split)
    assert texts(tmp_path / "run" / "samples") == texts(unbroken_split / "samples")


@pytest.mark.slow
def test_two_processes_leave_an_update_together(tmp_path):
    """`test_interrupted_update.py` has one process; here only one of two is told to end."""
    unharmed = ("-c", UNHARMED)
    few = {"iterations": 3, "evaluation.every": 0}
    ended(start(tmp_path / "unbroken", 2, [unharmed] * 2, **few), 0)
    said = ended(start(tmp_path / "run", 2, [unharmed, ("-c", IN_AN_UPDATE)], **few), RESTART)
    assert all("told to end; iteration 1 is saved" in text for text in said)
    ended(start(tmp_path / "run", 2, [unharmed] * 2, **few), 0)
    assert_same_state(tmp_path / "run", tmp_path / "unbroken")
    assert reproducible(tmp_path / "run") == reproducible(tmp_path / "unbroken")

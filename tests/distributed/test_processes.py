"""Two processes on loopback are a pod of two hosts: the same samples, the same weights, and one end for both."""

import functools
import json
import pathlib
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest
import safetensors.numpy

from reinforce_ada_jax import cli
from reinforce_ada_jax.collection.serialization import partial_from_text
from reinforce_ada_jax.config import MeshConfig
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed import processes as processes_lib
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.training import components as components_lib
from tests import forked, hosts
from tests.hosts import finished
from tests.running import assert_same_state, cipher_file, environment, free_port, reproducible, restored, saved_config

SMALL = {
    "iterations": 3, "checkpoint.every": 2, "evaluation.every": 3, "evaluation.samples": 1, "sampling.slots": 32,
    "collection.prompts_per_iteration": 8, "learning.prompts_per_update": 4, "logging.sampled_prompts": 8,
    # The gradient of a key bias is almost 0. With Adam's default its steps would be those of the rounding's sign.
    "learning.epsilon": 1e-5,
}  # fmt: skip
# What differs with the number of engines, and with the order of sums.
OF_ENGINES = {
    "collection/slot_utilisation", "collection/dispatches", "collection/waited_share", "update/logprob_gap",
    "update/logprob_gap_max",
}  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(workdir, processes, flags) -> the running processes, of two devices together, which share programs."""
    started, heldout = [], cipher_file(tmp_path_factory.mktemp("shared") / "heldout.jsonl", 16)

    def start(workdir, count, *more, devices=2, own=list):
        flags = [f"--config.{key}={value}" for key, value in (SMALL | {"mesh.fsdp": devices}).items()]
        flags += [f"--config.evaluation.benchmarks=({heldout!r},)", f"--workdir={workdir}"]
        train = ["-m", "reinforce_ada_jax.train", "--config=configs/tiny.py", *flags, *more]
        processes = hosts.start(train, count, devices=devices, own=own)
        started.extend(processes)
        return processes

    yield start
    for process in started:
        process.kill()
        process.communicate()


def samples(workdir) -> tuple[list[dict], list[float]]:
    """The written samples, and their advantages, which may come from sums over log-probabilities."""
    lines = [line for file in sorted((workdir / "samples").iterdir()) for line in file.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    return records, [record.pop("advantage") for record in records]


def assert_same_run(first: pathlib.Path, second: pathlib.Path) -> None:
    """The same samples to the letter; advantages, weights, moments and metrics but for the order of sums."""
    (records, advantages), (other_records, other_advantages) = samples(first), samples(second)
    assert records == other_records and advantages == pytest.approx(other_advantages, abs=1e-5)
    (one, record), (other, other_record) = restored(first), restored(second)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    jax.tree.map(close, one, other)
    for name in ("estimator", "averages"):
        jax.tree.map(functools.partial(close, rtol=1e-5), record.pop(name), other_record.pop(name))
    for name in ("config", "fingerprints", "sampler_fingerprints"):  # the runs may have meshes of their own
        del record[name], other_record[name]
    assert record == other_record
    for line, other_line in zip(reproducible(first), reproducible(second), strict=True):
        assert line.keys() == other_line.keys()
        for key in line.keys() - OF_ENGINES:
            assert line[key] == pytest.approx(other_line[key], abs=1e-5), key


def until_iteration(workdir, number, processes) -> None:
    deadline = time.monotonic() + 300
    while len(writers.read_metrics(workdir)) < number:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory):
    """Work directory of a run in one process, of two devices: its programs are those of each of two processes."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    finished(start(workdir, 1, devices=2))
    return workdir


def test_two_processes_make_the_run_of_one(start, unbroken, tmp_path):
    """With two devices each, which may be in different transfers of one program."""
    spoke, silent = finished(start(tmp_path / "two", 2, devices=4))
    assert "finished iteration 3" in spoke and "finished" not in silent
    assert "process 1 of 2, " in (tmp_path / "two" / "logs" / "host-1.log").read_text()
    assert_same_run(unbroken, tmp_path / "two")


@pytest.mark.slow  # test_watchdog.py has processes that end when another is lost, test_train.py runs that resume
def test_two_processes_make_the_run_of_one_through_an_end_of_either(start, unbroken, tmp_path):
    workdir = tmp_path / "two"
    processes = start(workdir, 2)
    until_iteration(workdir, 2, processes)
    processes[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    _, said = processes[0].communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert processes[0].returncode == RESTART
    assert "error: process 1 of 2 is gone" in said
    logs = [workdir / "logs" / f"host-{number}.log" for number in range(2)]
    assert "error: process 1 of 2 is gone" in logs[0].read_text() and "process 1 of 2, " in logs[1].read_text()
    spoke, silent = finished(start(workdir, 2))
    assert "finished iteration 3" in spoke and "finished" not in silent
    assert_same_run(unbroken, workdir)


# Single draws until the first success, with a control variate from averages and estimates over all prompts.
EXACT = (
    *(f"--config.collection.{flag}" for flag in ("objective=log", "samples_per_round=1", "control_variate=noise")),
    "--config.reward.path=examples/second_half.py:reward",
    "--config.reward.workers=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dapo", "estimate", "ngu", "positive", "proportional"])
def test_every_strategy_makes_the_run_of_one_process(start, tmp_path, strategy):
    chooses = strategy == "proportional"
    strategy = "positive" if chooses else strategy
    flags = (f"--config.collection.strategy={strategy}",)
    flags += ("--config.collection.selection=proportional",) if chooses else ()
    flags += ("--config.estimator.kind=value",) if strategy == "estimate" else ()
    flags += EXACT if strategy == "positive" else ()
    for count in (1, 2):
        finished(start(tmp_path / str(count), count, *flags, devices=4))
    assert_same_run(tmp_path / "1", tmp_path / "2")


def with_even_vocabulary(folder: pathlib.Path) -> pathlib.Path:
    """The packaged model with a token that has no text, as published ones have some: `tensor` can split 134 words."""
    shutil.copytree(components_lib.model_folder("package:cipher"), folder)
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = np.pad(weights["model.embed_tokens.weight"], ((0, 1), (0, 0)))
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 134}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}], ids=["fsdp", "tensor", "data"])
def test_eight_devices_in_two_processes_make_the_run_of_one(start, tmp_path, mesh):
    flags = [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
    flags += [f"--config.model.path={with_even_vocabulary(tmp_path / 'model')}"] if "tensor" in mesh else []
    # Where positions hardly turn them, a key's bias moves all scores alike: no gradient but for rounding, which Adam
    # would scale up to a tenth of a step.
    flags += ["--config.learning.epsilon=1e-6"]
    for count in (1, 2):
        finished(start(tmp_path / str(count), count, *flags, devices=8))
    assert_same_run(tmp_path / "1", tmp_path / "2")


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_more_processes_make_the_run_of_one_through_an_end_of_any(start, tmp_path, count):
    # The model's width divides by 4 and not by 3: the copies of three devices are along `data`.
    flags = ["--config.iterations=4", "--config.mesh.fsdp=1", f"--config.mesh.data={count}"]
    flags += ["--config.collection.prompts_per_iteration=12", "--config.learning.prompts_per_update=6"]
    finished(start(tmp_path / "one", 1, *flags, devices=count))
    processes = start(tmp_path / "many", count, *flags, devices=count)
    until_iteration(tmp_path / "many", 2, processes)
    processes[count - 1].send_signal(signal.SIGKILL)
    for process in processes[:-1]:
        _, said = process.communicate(timeout=60)
        assert process.returncode == RESTART
        assert f"error: process {count - 1} of {count} is gone" in said
    finished(start(tmp_path / "many", count, *flags, devices=count))
    assert_same_run(tmp_path / "one", tmp_path / "many")
    assert all(0 < line["collection/waited_share"] < 1 for line in writers.read_metrics(tmp_path / "many"))


@pytest.mark.slow
def test_overlapping_iterations_share_what_was_begun(start, tmp_path):
    flags = ("--config.collection.overlap=in_flight", "--config.checkpoint.every=1", "--config.sampling.window=2")
    finished(start(tmp_path / "two", 2, *flags, devices=4))
    _, record = restored(tmp_path / "two", SMALL["iterations"] - 1)
    assert partial_from_text(record["partial_rollouts"]), "the checkpoint holds what both drew ahead"
    lines = writers.read_metrics(tmp_path / "two")
    assert lines[-1]["collection/ahead"] > 0 and any(line["collection/in_flight"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number", "code"), [
    (0, signal.SIGKILL, RESTART), (1, signal.SIGKILL, RESTART),
    (1, signal.SIGTERM, RESTART), (0, signal.SIGTERM, RESTART), (1, signal.SIGINT, 130),
])  # fmt: skip
def test_both_end_and_resume(start, unbroken, tmp_path, victim, number, code):
    workdir = tmp_path / "run"
    processes = start(workdir, 2, "--config.iterations=500")
    until_iteration(workdir, 2, processes)
    processes[victim].send_signal(number)
    said = [process.communicate(timeout=60)[1] for process in processes]
    codes = [process.returncode for process in processes]
    if number == signal.SIGKILL:
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == RESTART
        assert f"error: process {victim} of 2 is gone" in said[1 - victim]
    else:
        assert codes == [code, code]
        assert all("is saved" in text and "goes on from there" in text for text in said)
        saved = int(re.search(r"iteration (\d+) is saved", said[0])[1])
        assert [line["iteration"] for line in writers.read_metrics(workdir)] == list(range(1, saved + 1))
    resumed = start(workdir, 2, "--config.iterations=500")
    until_iteration(workdir, len(writers.read_metrics(workdir)) + 1, resumed)
    resumed[0].send_signal(signal.SIGINT)
    for process in resumed:
        process.communicate(timeout=60)
    for line, other in zip(reproducible(workdir)[:3], reproducible(unbroken), strict=True):
        assert line["collection/tokens"] == other["collection/tokens"]


# ---- some processes only draw ------------------------------------------------------------------------------------

APART = ("--config.mesh.fsdp=1", "--config.mesh.sampler=1")  # of two processes
# A host that waits for another one launches windows without requests, by time.
OF_TIME = {"collection/slot_utilisation", "collection/dispatches", "collection/waited_share"}


def assert_same_bits(first: pathlib.Path, second: pathlib.Path) -> None:
    """The same samples, weights and moments, to the last bit; the record has the sampler's weights as fingerprints."""
    record = assert_same_state(first, second)
    assert bool(record["sampler_fingerprints"]) == saved_config(first).draws_ahead
    assert samples(first) == samples(second)
    for line, other_line in zip(reproducible(first), reproducible(second), strict=True):
        assert line.keys() == other_line.keys()
        assert {key for key in line if line[key] != other_line[key]} <= OF_TIME


def kill_one(workdir, processes, victim, number=signal.SIGKILL) -> list[str]:
    """Sends a signal to one process, after which the others end, too; returns what each of them said."""
    processes[victim].send_signal(number)
    said = [process.communicate(timeout=60)[1] for process in processes]
    lost = -signal.SIGKILL if number == signal.SIGKILL else RESTART
    assert [process.returncode for process in processes] == [
        lost if process is processes[victim] else RESTART for process in processes
    ], said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    ("count", "devices", "mesh"),
    [
        (2, 2, APART),
        (4, 4, ("--config.mesh.fsdp=2", "--config.mesh.sampler=2")),  # the last two
    ],
)
def test_processes_that_only_draw_or_learn_end_at_random_moments(start, tmp_path, number, count, devices, mesh):
    flags = (*mesh, "--config.iterations=24")
    finished(start(tmp_path / "whole", count, *flags, devices=devices))
    moments, workdir = np.random.default_rng(number), tmp_path / "run"
    for _ in range(4):
        done = len(writers.read_metrics(workdir)) if workdir.exists() else 0
        processes = start(workdir, count, *flags, devices=devices)
        until_iteration(workdir, min(done + 2, 20), processes)
        time.sleep(moments.uniform(0, 0.5))
        said = kill_one(workdir, processes, int(moments.integers(count)), number)
        assert number == signal.SIGKILL or all("goes on from there" in text for text in said), said
    finished(start(workdir, count, *flags, devices=devices))
    assert_same_bits(tmp_path / "whole", workdir)


@pytest.fixture(scope="module")
def apart(start, tmp_path_factory):
    """Work directory of a run of one process with two devices, one of which draws."""
    workdir = tmp_path_factory.mktemp("apart") / "run"
    finished(start(workdir, 1, *APART, devices=2))
    return workdir


def test_a_process_that_only_draws_makes_the_run_of_one(start, apart, tmp_path):
    spoke, silent = finished(start(tmp_path / "two", 2, *APART, devices=2))
    assert "finished iteration 3" in spoke and "finished" not in silent
    assert "process 1 of 2, " in (tmp_path / "two" / "logs" / "host-1.log").read_text()
    assert_same_bits(apart, tmp_path / "two")
    lines = writers.read_metrics(tmp_path / "two")
    assert [line["collection/staleness_max"] for line in lines] == [0, 1, 1]
    assert {line["memory/reshard_bytes"] for line in lines} == {4 * 107_392}
    assert all(line["time/verify_s"] > 0 for line in lines)


# The test above has two processes; test_draw_ahead.py has resumed runs, test_watchdog.py lost processes.
@pytest.mark.slow
def test_processes_that_only_draw_or_learn_resume_with_the_same_bits(start, apart, tmp_path):
    for iteration, victim, number in ((1, 1, signal.SIGTERM), (2, 0, signal.SIGKILL)):
        processes = start(tmp_path / "run", 2, *APART, devices=2)
        until_iteration(tmp_path / "run", iteration, processes)
        said = kill_one(tmp_path / "run", processes, victim, number)
        assert number == signal.SIGKILL or all("is saved" in text and "from there" in text for text in said), said
    finished(start(tmp_path / "run", 2, *APART, devices=2))
    assert_same_bits(apart, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "flags"),
    [
        (3, 3, ("--config.mesh.fsdp=2", "--config.mesh.sampler=1")),
        (3, 3, ("--config.mesh.fsdp=1", "--config.mesh.sampler=2")),
        (2, 4, ("--config.mesh.fsdp=2", "--config.mesh.sampler=2")),
        (2, 2, (*APART, "--config.collection.max_staleness=0")),
        (2, 2, (*APART, "--config.collection.strategy=dapo")),
        (2, 2, (*APART, "--config.collection.strategy=estimate")),
        (3, 3, (*APART, "--config.mesh.sampler=2", *EXACT, "--config.collection.strategy=positive")),
        (2, 2, (*APART, "--config.lora.rank=2", "--config.model.compute_dtype=bfloat16")),
        (2, 2, (*APART, "--config.sampling.weight_dtype=int8", "--config.model.compute_dtype=bfloat16")),
    ],
)
def test_processes_that_only_draw_make_the_run_of_one(start, tmp_path, count, devices, flags):
    for number in (1, count):
        finished(start(tmp_path / str(number), number, *flags, devices=devices))
    compare = assert_same_bits if "--config.mesh.fsdp=1" in flags else assert_same_run
    compare(tmp_path / "1", tmp_path / str(count))


@pytest.mark.slow  # test_watchdog.py has refusals that end all processes
def test_a_run_that_stops_ends_processes_that_only_draw(start, tmp_path):
    fails = tmp_path / "reward.py"
    fails.write_text("def grade(response, answer):\n    assert response == answer, 'no reward here'\n    return 1\n")
    flags = (*APART, f"--config.reward.path={fails}:grade", "--config.reward.workers=1", "--config.evaluation.every=0")
    processes = start(tmp_path / "run", 2, *flags, devices=2)
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [cli.STOPPED] * 2, said
    assert all("could not grade" in text and "no reward here" in text for text in said), said


# ---- what is said where something is wrong -----------------------------------------------------------------------


def test_processes_with_other_configurations_are_told(start, tmp_path):
    seeds = iter(("--config.seed=0", "--config.seed=1"))
    processes = start(tmp_path / "run", 2, own=lambda: [next(seeds)])
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [cli.BAD_INPUT] * 2
    assert all("error: the configurations differ between process 0 and process 1 of 2" in text for text in said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({processes_lib.ADDRESS: "127.0.0.1:1"}, "JAX_COORDINATOR_ADDRESS=127.0.0.1:1"),
        ({processes_lib.ADDRESS: "127.0.0.1:1", processes_lib.COUNT: "2"}, "JAX_NUM_PROCESSES=2"),
        ({processes_lib.ADDRESS: "a:1", processes_lib.COUNT: "2", processes_lib.INDEX: "2"}, "JAX_PROCESS_ID=2"),
        ({processes_lib.ADDRESS: "a:1", processes_lib.COUNT: "two", processes_lib.INDEX: "0"}, "JAX_NUM_PROCESSES=two"),
    ],
)
def test_half_named_processes_are_refused(monkeypatch, given, said):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"Set all three, or none\.") as error:
        processes_lib.initialize(cluster=False)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("address", "host"),
    [("[::1]:8476", "::1"), ("::1:8476", "::1"), ("a-host.b:8476", "a-host.b"), ("127.0.0.1:8476", "127.0.0.1")],
)
def test_the_host_of_an_address(address, host):
    assert processes_lib._host(address) == host
    assert processes_lib._host("") == "", "all addresses"


# What a run does with the other processes before it does anything else.
JOIN = """
import sys
from reinforce_ada_jax.distributed import processes, watchdog
if sys.argv[1] == "deaf":  # process 0 names a port at which nothing listens
    real, watchdog.JOIN_S = watchdog.Watchdog.listen, 3
    watchdog.Watchdog.listen = lambda line, host="": "9 " + real(line, host).split()[1]
with processes.joined(cluster=False):
    print(processes.exchange(b"%d" % processes.index()), flush=True)
"""


def joining(host, *arguments, script=JOIN):
    address = f"{host}:{free_port(host.strip('[]'))}"
    processes = []
    for index in range(2):
        given = {processes_lib.ADDRESS: address, processes_lib.COUNT: "2", processes_lib.INDEX: str(index)}
        processes.append(forked.Forked(["-c", script, *arguments], environment() | given))
    try:
        return [(*process.communicate(timeout=60), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_processes_join_by_ipv6():
    try:
        said = joining("[::1]", "")
    except OSError:
        pytest.skip("no IPv6 here")
    for out, err, code in said:
        assert code == 0 and out.endswith("[b'0', b'1']\n"), err


# Process 1 sends messages of several parts, of none and of one.
MESSAGES = """
from reinforce_ada_jax.distributed import processes
processes.CHUNK, processes.POLL_MS = 4, 50
with processes.joined(cluster=False):
    if processes.index() == 0:
        print(processes.receive(1), processes.has_sent(1))
        processes.send(1, b"go on")
        print(processes.receive(1), processes.receive(1), processes.has_sent(1))
    else:
        processes.send(0, b"0123456789")
        print(processes.receive(0))
        processes.send(0, b"")
        processes.send(0, b"0123")
"""


def test_messages_arrive_whole_and_in_order():
    (received, err, code), (other, other_err, other_code) = joining("127.0.0.1", script=MESSAGES)
    assert code == other_code == 0, err + other_err
    assert received == "b'0123456789' False\nb'' b'0123' False\n" and other == "b'go on'\n"


def test_processes_that_can_not_reach_each_other_say_so_in_a_line():
    (_, waited, first), (_, refused, second) = joining("127.0.0.1", "deaf")
    assert first == second == RESTART  # a process that is lost while it joins can't be told from a closed network
    assert waited.startswith("error: process 0 waited 3 s for process 1 of 2") and waited.count("\n") == 1
    assert "error: process 1 of 2 can't connect with process 0 at 127.0.0.1, port 9 (" in refused
    assert "Traceback" not in refused


# Process 1 dies between the first message to JAX's coordinator and the first look at devices, where JAX waits for it.
VANISHING = """
import os, signal, sys
import jax
from reinforce_ada_jax.distributed import processes, watchdog
watchdog.JOIN_S = 3
def end():
    if os.environ[processes.INDEX] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
def initialize(*arguments, real=jax.distributed.initialize, **settings):
    real(*arguments, **settings)
    if sys.argv[1] == "before the watchdog":
        end()
jax.distributed.initialize = initialize
with processes.joined(cluster=False):
    end()
    jax.devices()
"""


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("before the watchdog", "process 0 waited 3 s for process 1 of 2 to connect"),
        ("before devices", "process 1 of 2 is gone"),
    ],
)
def test_a_process_that_dies_in_the_start_ends_the_others(when, said):
    (_, err, code), (_, _, victim) = joining("127.0.0.1", when, script=VANISHING)
    assert victim == -signal.SIGKILL and code == RESTART, err
    assert said in err and "Traceback" not in err


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_waits_for_a_process_that_never_starts_says_so_in_a_line(index):
    address = f"127.0.0.1:{free_port()}"
    given = {processes_lib.ADDRESS: address, processes_lib.COUNT: "2", processes_lib.INDEX: str(index)}
    result = forked.run(["-c", JOIN, ""], environment() | given | {processes_lib.JOIN: "2"})
    assert result.returncode == RESTART
    assert result.stderr.startswith("error: not all processes of the run started within 2 s.")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_a_wrong_time_to_join(monkeypatch, text):
    for name, value in ((processes_lib.ADDRESS, "127.0.0.1:1"), (processes_lib.COUNT, "2"), (processes_lib.INDEX, "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(processes_lib.JOIN, text)
    with pytest.raises(ValueError, match=f"REINFORCE_ADA_JOIN_S is '{text}'; it must be a number of seconds above 0"):
        processes_lib.initialize(cluster=False)


def test_what_is_wrong_with_the_processes_is_one_line(tmp_path):
    flags = ("--config=configs/tiny.py", f"--workdir={tmp_path}")
    command_line = ["-m", "reinforce_ada_jax.train", *flags]
    alone = environment() | {processes_lib.INDEX: "1"}
    result = forked.run(command_line, alone)
    assert result.returncode == cli.BAD_INPUT
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: a run of several processes needs") and "Set all three, or none." in line


def test_one_process_exchanges_with_itself():
    assert processes_lib.exchange(b"abc") == [b"abc"]
    assert processes_lib.any_of(True) and not processes_lib.any_of(False)
    processes_lib.check_same("anything", "text")
    assert not processes_lib.asked_to_stop()


class Device:
    """One of a topology's devices, as far as a mesh looks at it."""

    platform = "cpu"

    def __init__(self, process, number):
        self.process_index, self.id = process, number

    def __repr__(self):
        return f"{self.process_index}.{self.id}"


def test_tensor_stays_within_a_process():
    # As on a v5e slice: ids go row by row over the whole slice, and a host has a square of it.
    devices = [Device(process, number) for number, process in enumerate([0, 0, 1, 1, 0, 0, 1, 1])]
    mesh = mesh_lib.make_mesh(fsdp=2, tensor=4, devices=devices)
    assert [{device.process_index for device in group} for group in mesh.devices.reshape(2, 4)] == [{0}, {1}]
    with pytest.raises(ValueError, match=r"= 4, over 2 processes of 4 devices: the product must be 8"):
        mesh_lib.make_mesh(fsdp=4, devices=devices)
    with pytest.raises(ValueError, match=r"mesh.tensor a divisor of a process's devices"):
        mesh_lib.make_mesh(tensor=8, devices=devices)


def test_the_last_processes_only_draw():
    devices = [Device(n // 4, n) for n in range(16)]
    learner, sampler = mesh_lib.split_meshes(MeshConfig(fsdp=2, tensor=2, sampler=12), devices)
    assert [device.process_index for device in learner.devices.flat] == [0] * 4
    assert dict(sampler.shape) == {"data": 6, "fsdp": 1, "context": 1, "tensor": 2}
    assert {device.process_index for device in sampler.devices.flat} == {1, 2, 3}
    assert mesh_lib.num_learning(learner, sampler) == 1
    for wrong, said in (
        (MeshConfig(fsdp=4, sampler=8), r"= 4 \+ 8 = 12, over 4 processes of 4 devices: the sum must be 16"),
        (MeshConfig(fsdp=10, sampler=6), r"mesh.sampler a multiple of 4, because a process either learns or draws"),
        (MeshConfig(fsdp=16, sampler=4), r"= 16 \+ 4 = 20, but there are 16 devices"),
    ):
        with pytest.raises(ValueError, match=said):
            mesh_lib.split_meshes(wrong, devices)

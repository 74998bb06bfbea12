"""Drawing an iteration on the sampler's devices while the one before is learned: the schedule, its bits, and faults."""

import contextlib
import json
import re
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest

from reinforce_ada_jax import cli
from reinforce_ada_jax.collection.selection import PromptCursor, next_prompts
from reinforce_ada_jax.distributed.signals import Interrupted, Stop
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.training import components, drawing, iteration
from reinforce_ada_jax.training.draw_ahead import DrawAhead
from reinforce_ada_jax.training.loop import Ending
from tests import compiling, running, standins
from tests.forked import Forked, finished
from tests.running import assert_same_state, cipher_file, environment, killed_after, reproducible, restored, texts, tiny

PROMPTS = 8
ITERATIONS = 8  # of trainings in processes of their own
# Two updates an iteration; every response is written to samples/.
SMALL = {
    "iterations": 3, "checkpoint.every": 0, "evaluation.every": 0, "logging.trackers": "",
    "logging.sampled_prompts": PROMPTS, "collection.prompts_per_iteration": PROMPTS, "learning.prompts_per_update": 4,
    "sampling.slots": 32,
}  # fmt: skip
SPLIT = {"mesh.sampler": 1}


def train(workdir, evaluator=None, **changes):
    """The outcome of a run in this process."""
    load = (lambda *_: evaluator) if evaluator else (lambda *_: None)
    return running.train(tiny(**SMALL | SPLIT | changes), workdir, load)


def assert_same_run(workdir, other):
    """Bitwise: weights, moments, the sampler's weights by their fingerprints, metrics and every response."""
    assert assert_same_state(workdir, other)["sampler_fingerprints"]
    assert reproducible(workdir) == reproducible(other)
    assert texts(workdir / "samples") == texts(other / "samples")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Work directory of a run in this process that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    assert train(workdir).ending is Ending.FINISHED
    return workdir


# ---- the schedule ------------------------------------------------------------------------------------------------


def test_every_iteration_but_the_first_is_drawn_from_weights_one_iteration_old(unbroken):
    lines = writers.read_metrics(unbroken)
    assert [line["collection/staleness_max"] for line in lines] == [0, 1, 1]
    assert [line["collection/ahead"] for line in lines] == [0] + [line["collection/responses"] for line in lines[1:]]
    # Engine and learner can be compared under the same weights only.
    assert ["update/logprob_gap" in line for line in lines] == [True] + 2 * [False]
    assert all(line["memory/reshard_bytes"] == 4 * 107_392 and line["time/wait_s"] >= 0 for line in lines)
    assert lines[0]["time/wait_s"] >= lines[0]["time/collect_s"], "nothing is learned meanwhile"
    assert [line["compile/count"] for line in lines[2:]] == [0]


def test_every_prompt_is_drawn_once_in_the_order_of_the_data(unbroken):
    prompts = [
        json.loads(line)["prompt"] for text in texts(unbroken / "samples").values() for line in text.splitlines()
    ]
    assert list(dict.fromkeys(prompts)) == _prompts_in_order(3 * PROMPTS)


def _prompts_in_order(count):
    config = tiny()
    made = components.build(config, components.model_folder(config.model.path))
    data = made.prompts(config.data.prompts, config)
    return [prompt.id for prompt in next_prompts(data, PromptCursor(config.seed), count)[0]]


@pytest.mark.parametrize("slow", ["draw", pytest.param("learn", marks=pytest.mark.slow)])
def test_time_decides_nothing(unbroken, tmp_path, monkeypatch, slow):
    # Whichever side is late, the same weights draw the same iteration.
    name, owner = ("collect", drawing) if slow == "draw" else ("make_updates", iteration)
    threads = set()

    def delay(*_, **__):
        time.sleep(0.3)
        threads.add(threading.current_thread().name.split("_")[0])

    standins.before(monkeypatch, owner, name, delay)
    assert train(tmp_path / "run").ending is Ending.FINISHED
    assert threads == ({"MainThread", "drawing"} if slow == "draw" else {"MainThread"})
    assert_same_run(tmp_path / "run", unbroken)


@pytest.mark.slow  # the schedule of draws is in the tests above
def test_in_turn_the_run_is_that_of_one_device(unbroken, tmp_path):
    in_turn, together = tmp_path / "in_turn", tmp_path / "together"
    train(in_turn, iterations=2, **{"collection.max_staleness": 0})
    train(together, iterations=2, **{"mesh.sampler": 0})
    jax.tree.map(np.testing.assert_array_equal, restored(in_turn)[0], restored(together)[0])
    assert reproducible(in_turn) == reproducible(together)
    assert texts(in_turn / "samples") == texts(together / "samples")
    assert restored(in_turn)[1]["sampler_fingerprints"] is None
    assert {line["collection/staleness_max"] for line in writers.read_metrics(in_turn)} == {0}
    # The first iteration is the same either way; the weights after it do not draw the second one.
    assert texts(unbroken / "samples")["000001.jsonl"] == texts(together / "samples")["000001.jsonl"]
    assert texts(unbroken / "samples")["000002.jsonl"] != texts(together / "samples")["000002.jsonl"]


@pytest.mark.slow  # runs below end and go on
def test_more_iterations_go_on_as_if_they_had_been_planned(unbroken, tmp_path):
    train(tmp_path / "run", iterations=2)
    train(tmp_path / "run")
    assert_same_run(tmp_path / "run", unbroken)


@pytest.mark.slow
def test_with_adapters_beside_their_base_a_resumed_run_has_the_same_bits(tmp_path):
    changes = {"lora.rank": 2, "model.compute_dtype": "bfloat16"}
    train(tmp_path / "whole", **changes)
    train(tmp_path / "run", iterations=2, **changes)
    train(tmp_path / "run", **changes)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_an_evaluation_waits_for_the_engine(unbroken, tmp_path):
    # It draws with the same engine: nothing else may be drawn meanwhile, and nothing is lost.
    busy = []

    class Evaluator:
        def is_done(self, run, iteration):
            return False

        def __call__(self, run, state):
            drawing = [thread for thread in threading.enumerate() if thread.name.startswith("drawing")]
            busy.append((state.iteration, len(drawing)))
            return {"evaluation/heldout/avg": 0.0}

    waited = []

    def wait(_, stop):
        waited.append(stop)
        time.sleep(0.2)

    with pytest.MonkeyPatch.context() as patch:
        standins.before(patch, DrawAhead, "wait", wait)
        train(tmp_path / "run", Evaluator(), **{"evaluation.every": 2})
    assert [iteration for iteration, _ in busy] == [0, 2, 3]
    assert len(waited) == 3 + 3  # before each evaluation, and in each iteration
    # The wait before an evaluation counts as one for responses.
    lines = writers.read_metrics(tmp_path / "run")
    assert all(line["time/wait_s"] >= 0.4 for line in lines[1:])
    assert texts(tmp_path / "run" / "samples") == texts(unbroken / "samples")


# ---- a collection in flight --------------------------------------------------------------------------------------


def test_a_collection_is_taken_once():
    with DrawAhead() as ahead:
        assert ahead.take(Stop()) is None
        ahead.begin(lambda stop: stop.check("collecting: 1/2") or 7, Stop())
        assert ahead.take(Stop()) == 7
        assert ahead.take(Stop()) is None


def test_a_fault_of_a_collection_shows_where_it_is_taken():
    def fail(stop):
        raise RuntimeError("no grader")

    with DrawAhead() as ahead:
        ahead.begin(fail, Stop())
        ahead.wait(Stop())
        with pytest.raises(RuntimeError, match="no grader"):
            ahead.take(Stop())


def test_a_run_that_is_asked_to_end_does_not_wait_for_the_collection():
    # The thread asks, and its outcome counts: over several processes that is the outcome of all.
    asked, ended = threading.Event(), threading.Event()

    def draw(stop):
        try:
            while True:
                stop.check("collecting: 0/2")
                time.sleep(0.01)
        finally:
            ended.set()

    with DrawAhead() as ahead:
        ahead.begin(draw, Stop(asked.is_set))
        asked.set()
        with pytest.raises(Interrupted):
            ahead.take(Stop())
    assert ended.is_set()


def test_a_collection_that_has_ended_is_taken_in_spite_of_a_request_to_end():
    # Another process may detect the request later, when it has gone on to the updates.
    asked = threading.Event()
    with DrawAhead() as ahead:
        ahead.begin(lambda stop: 7, Stop(asked.is_set))
        ahead.wait(Stop())
        asked.set()
        assert ahead.take(Stop(asked.is_set)) == 7


def test_a_collection_ends_with_the_run():
    ended = threading.Event()

    def draw(stop):
        with contextlib.suppress(Interrupted):
            while True:
                stop.check("collecting: 0/2")
                time.sleep(0.01)
        ended.set()

    with DrawAhead() as ahead:
        ahead.begin(draw, Stop())
    assert ended.is_set()


def test_a_failing_grader_costs_nothing_that_is_finished(unbroken, tmp_path, monkeypatch):
    # It fails while iteration 3 is drawn: iteration 2 is learned to its end, and saved.
    def fail_at_3(*arguments, **_):
        if arguments[4].iteration == 3:
            raise TypeError("yours")

    with monkeypatch.context() as patch:
        standins.before(patch, drawing, "collect", fail_at_3)
        with pytest.raises(TypeError, match="yours"):
            train(tmp_path / "run")
    assert restored(tmp_path / "run")[1]["iteration"] == 2
    train(tmp_path / "run")
    assert_same_run(tmp_path / "run", unbroken)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_run_that_was_asked_to_end_draws_the_collection_in_flight_again(unbroken, tmp_path, monkeypatch, number):
    def asked_at_3(*arguments, **_):
        if arguments[4].iteration == 3:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        standins.before(patch, drawing, "collect", asked_at_3)
        outcome = train(tmp_path / "run")
    ending, reason = {
        signal.SIGINT: (Ending.INTERRUPTED, "interrupted"), signal.SIGTERM: (Ending.PREEMPTED, "told to end"),
    }[number]  # fmt: skip
    assert outcome.ending is ending and re.match(rf"{reason}; iteration [12] is saved\.", outcome.message)
    train(tmp_path / "run")
    assert_same_run(tmp_path / "run", unbroken)


def test_collections_that_are_stored_are_not_drawn_again(unbroken, tmp_path, monkeypatch):
    """Without a checkpoint the run begins again, and takes all of them, also those that it drew ahead."""
    with running.responses_kept():
        train(tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        standins.not_called(monkeypatch, drawing, "collect")
        assert train(tmp_path / "run").ending is Ending.FINISHED
    assert_same_run(tmp_path / "run", unbroken)


def test_a_collection_that_has_ended_before_a_request_to_end_is_not_drawn_again(unbroken, tmp_path, monkeypatch):
    """Iteration 2 is drawn to its end during the updates of iteration 1, in which the run is asked to end."""

    def asked_at_1(run, state, minibatches):
        run.ahead.wait(run.stop)
        if state.iteration == 0:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        standins.before(patch, iteration, "make_updates", asked_at_1)
        assert train(tmp_path / "run").ending is Ending.INTERRUPTED
    drawn = []
    standins.before(monkeypatch, drawing, "collect", lambda *arguments, **_: drawn.append(arguments[4].iteration))
    train(tmp_path / "run")
    assert drawn == [3]
    assert_same_run(tmp_path / "run", unbroken)


# ---- kills -------------------------------------------------------------------------------------------------------
# The test above holds what a request to end leaves, and test_train.py kills runs that draw and learn in turn.


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(workdir, iterations) -> a training as users start it, on two CPU devices."""
    flags = [f"--config.{key}={value}" for key, value in (SMALL | SPLIT).items()]
    source = cipher_file(tmp_path_factory.mktemp("shared") / "heldout.jsonl", 8)
    flags += ["--config.evaluation.every=4", "--config.evaluation.samples=1", "--config.checkpoint.every=2"]
    flags += [f"--config.evaluation.benchmarks=({source!r},)"]
    devices = f"{compiling.DEVICES}2 {compiling.QUICKLY}"

    def start(workdir, iterations=ITERATIONS):
        command = ["-m", "reinforce_ada_jax.train", "--config=configs/tiny.py", f"--workdir={workdir}"]
        return Forked([*command, *flags, f"--config.iterations={iterations}"], environment(devices))

    return start


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """Work directory of such a training that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert "2 updates each, while the next iteration is drawn" in finished(start(workdir))[0]
    return workdir


def kill_at_random_moments(start, workdir, iterations, kills):
    moments = np.random.default_rng(kills)
    for _ in range(kills):
        lines = len(writers.read_metrics(workdir)) + 2
        process = start(workdir, iterations)
        while len(writers.read_metrics(workdir)) < lines and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        process.communicate()
    finished(start(workdir, iterations))


@pytest.mark.slow
def test_kills_at_random_moments(start, whole, tmp_path):
    kill_at_random_moments(start, tmp_path / "run", ITERATIONS, 2)
    assert_same_run(tmp_path / "run", whole)
    assert texts(tmp_path / "run" / "evaluations") == texts(whole / "evaluations")


@pytest.mark.slow
def test_twenty_kills_at_random_moments(start, tmp_path):
    finished(start(tmp_path / "whole", 100))
    kill_at_random_moments(start, tmp_path / "run", 100, 20)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end(start, whole, tmp_path, how):
    workdir = tmp_path / "run"
    process = start(workdir)
    err = killed_after(process, workdir / "metrics.jsonl", 3, how)
    assert process.returncode == (cli.INTERRUPTED if how == signal.SIGINT else RESTART)
    assert "is saved. python -m reinforce_ada_jax.train" in err.splitlines()[-1] and "Traceback" not in err
    finished(start(workdir))
    assert_same_run(workdir, whole)

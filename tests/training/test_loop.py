"""The loop in this process: real files and checkpoints, scripted iterations and evaluations."""

import contextlib
import dataclasses
import pathlib
import re
import signal
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax import cli, train
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection.averages import Averages
from reinforce_ada_jax.distributed.signals import Interrupt, Interrupted
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.isolation.workers import CannotStart
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import loop, resume, startup
from reinforce_ada_jax.training.checkpoint import Checkpoints
from reinforce_ada_jax.training.loop import Ending
from reinforce_ada_jax.training.response_journal import ResponseJournal
from reinforce_ada_jax.training.run import TrainingStopped
from reinforce_ada_jax.training.state import RunState, from_record, to_record
from reinforce_ada_jax.types import PartialRollouts, Response, Verdict
from reinforce_ada_jax.user_code import UserCodeError
from tests import forked, standins
from tests.running import cipher_file, compiles_nothing_early, environment, reproducible, restored, tiny
from tests.running import train as train_here

NAMES = (
    "reward/first_round", "collection/zero_signal_share", "collection/verifier_failures", "collection/responses",
    "collection/slot_utilisation", "update/entropy",
)  # fmt: skip


def iterate(run, state):
    """An iteration that costs nothing."""
    iteration = state.iteration + 1
    return dataclasses.replace(state, iteration=iteration, pending=dict.fromkeys(NAMES, iteration / 3)), None


class Evaluator:
    """Evaluation of a made-up benchmark; a Ctrl-C comes during that of iteration `interrupt_at`."""

    def __init__(self, interrupt_at=None):
        self.interrupt_at, self.evaluated = interrupt_at, []

    def is_done(self, run, iteration):
        return False

    def __call__(self, run, state):
        if state.iteration == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)
        run.stop.check("evaluating")
        self.evaluated.append(state.iteration)
        return {"evaluation/heldout/avg": state.iteration / 7}


def run(workdir, iterate=iterate, evaluator=None, has_journal=True, **changes):
    """(outcome, the state that the run began with) of a run to its end."""
    config = tiny(**{"iterations": 6, "evaluation.every": 2, "logging.trackers": "", **changes})
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        compiles_nothing_early(patch)
        made, state = startup.start(startup.read_inputs(config, workdir, lambda *_: None), workdir, stack, quiet=True)
        made = dataclasses.replace(
            made, iterate=iterate, evaluator=evaluator, verifiers=components_lib.no_verifiers(config),
            journal=made.journal if has_journal else None,
        )  # fmt: skip
        return loop.run_to_end(made, state), state


def test_an_interrupt_during_an_evaluation_loses_nothing(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    outcome, _ = run(unbroken, evaluator=Evaluator())
    assert outcome.ending is Ending.FINISHED and outcome.message == "" and outcome.state.iteration == 6
    outcome, _ = run(broken, evaluator=Evaluator(interrupt_at=4))
    assert outcome.ending is Ending.INTERRUPTED and outcome.message.startswith("interrupted; iteration 4 is saved. ")
    # The update of iteration 4 is made and saved; its line waits for the evaluation.
    assert [line["iteration"] for line in writers.read_metrics(broken)] == [1, 2, 3]
    outcome, resumed = run(broken, evaluator=(second := Evaluator()))
    assert outcome.ending is Ending.FINISHED
    assert resumed.iteration == 4 and resumed.pending is not None and second.evaluated == [4, 6]
    assert reproducible(broken) == reproducible(unbroken)
    assert [line.get("evaluation/heldout/avg") for line in writers.read_metrics(broken)] == [
        None, 2 / 7, None, 4 / 7, None, 6 / 7
    ]  # fmt: skip


def test_a_run_of_no_iterations_names_no_weights(tmp_path, capsys):
    outcome, _ = run(tmp_path / "run", iterations=0)
    loop.end(outcome, tmp_path / "run", "iteration", compiles=False)
    assert capsys.readouterr().out.endswith("0 are finished, and 0 were asked for.\nfinished iteration 0.\n")
    assert not [*(tmp_path / "run" / "checkpoints").iterdir()]  # nothing could be exported


# Errors of files of the user, in a process of their own and in the run's.
NAMED = [CannotStart("mine.py:grade: NameError", "Traceback ..."), UserCodeError("mine.py:grade: NameError")]


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("error", [*NAMED, TypeError("yours")])
def test_a_fault_costs_nothing_that_is_finished(tmp_path, error, donated):
    def fail_at_4(run, state):
        if state.iteration < 3:
            return iterate(run, state)
        if donated:
            jax.tree.map(lambda x: x.delete(), state.learner)
        raise error

    workdir = tmp_path / "my run"
    if error in NAMED and not donated:
        outcome, _ = run(workdir, fail_at_4)
        assert outcome.ending is Ending.STOPPED
        assert re.search(r"mine.py:grade: NameError.* Iteration 3 is saved. python -m", outcome.message)
        assert f"--workdir='{workdir}' goes on" in outcome.message  # a shell takes it as one word
    else:
        with pytest.raises(type(error)):
            run(workdir, fail_at_4)
    iterations = sorted(int(folder.name) for folder in (workdir / "checkpoints").iterdir())
    assert iterations == ([] if donated else [3])


def test_a_model_that_draws_nan_stops_the_run(tmp_path, monkeypatch):
    # All rewards are 0 and no response has an advantage: no update would meet a number that is not finite.
    original = components_lib.load_params

    def poisoned(*arguments, **options):
        return jax.tree.map(lambda weight: weight * jnp.nan, original(*arguments, **options))

    monkeypatch.setattr(components_lib, "load_params", poisoned)
    compiles_nothing_early(monkeypatch)
    changes = {"evaluation.every": 0, "logging.trackers": "", "collection.prompts_per_iteration": 8}
    changes |= {"learning.prompts_per_update": 4, "sampling.slots": 32}
    outcome = train_here(tiny(**changes), tmp_path)
    assert outcome.ending is Ending.STOPPED and outcome.state.iteration == 0
    assert "iteration 1: 8 of 8 tokens of a response to problem '" in outcome.message
    assert "in float32, are NaN or infinite" in outcome.message and not writers.read_metrics(tmp_path)


def test_weights_that_overflow_are_no_result(tmp_path, monkeypatch):
    # The gradient is finite, and the only step, 100 * (3e38 w), is not: without a check the run ends as finished.
    compiles_nothing_early(monkeypatch)
    changes = {"iterations": 1, "evaluation.every": 0, "logging.trackers": "", "collection.prompts_per_iteration": 8}
    changes |= {"learning.prompts_per_update": 4, "sampling.slots": 32, "learning.warmup_updates": 0}
    outcome = train_here(tiny(**changes, **{"learning.learning_rate": 100, "learning.weight_decay": 3e38}), tmp_path)
    assert outcome.ending is Ending.STOPPED
    assert "iteration 1, update 1 of 2: the new weights are not finite, and are not saved. Lower" in outcome.message
    assert "No checkpoint was finished yet" in outcome.message and not writers.read_metrics(tmp_path)
    assert not any((tmp_path / "checkpoints").iterdir())


def test_one_iteration_is_traced(tmp_path):
    seen = []

    def watched(run, state):
        seen.append((state.iteration + 1, (tmp_path / "profile").exists()))
        jnp.add(state.iteration, 1).block_until_ready()
        return iterate(run, state)

    run(tmp_path, watched, **{"logging.profile": 3, "iterations": 4})
    assert seen == [(1, False), (2, False), (3, False), (4, True)]
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 100


def test_a_full_disk_ends_the_run(tmp_path):
    with contextlib.ExitStack() as stack:

        def full_at_4(run, state):
            if state.iteration == 3:
                run.checkpoints.wait()
                stack.enter_context(standins.full_disk())
            return iterate(run, state)

        outcome, _ = run(tmp_path, full_at_4, **{"checkpoint.every": 1})
    assert outcome.ending is Ending.STOPPED
    assert outcome.message.startswith("no checkpoint could be written to ")
    assert ". Training stopped. The last complete checkpoint is 3. Fix this (on a full disk" in outcome.message
    assert run(tmp_path)[1].iteration == 3


def test_a_save_that_fails_after_another_error_is_not_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoints, "check", lambda _: None)  # the save of iteration 3 still goes on
    with contextlib.ExitStack() as stack:

        def full_at_3(run, state):
            if state.iteration == 2:
                run.checkpoints.wait()
                stack.enter_context(standins.full_disk())
            if state.iteration == 3:
                raise OSError("no samples could be written")
            return iterate(run, state)

        outcome, _ = run(tmp_path, full_at_3, **{"checkpoint.every": 1})
    assert outcome.message.startswith(
        "no samples could be written. Training stopped. The last complete checkpoint is 2."
    )


THREAD_THAT_RUNS = """
import pathlib, threading, time
from reinforce_ada_jax.training.loop import Ending, Outcome, end
threading.Thread(target=time.sleep, args=(60,)).start()  # of the compiler, or of a save that failed
end(Outcome(Ending.{ending}, "Training stopped. Free space."), pathlib.Path("run"), "iteration", compiles=True)
"""


@pytest.mark.parametrize(("ending", "code"), [("STOPPED", cli.STOPPED), ("PREEMPTED", RESTART)])
def test_the_end_waits_for_no_thread(ending, code):
    command = forked.Forked(["-c", THREAD_THAT_RUNS.format(ending=ending)], environment())
    assert command.wait(30) == code
    assert command.communicate() == ("", "error: Training stopped. Free space.\n")


def test_lines_that_are_lost_are_counted(tmp_path, capsys):
    run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    outcome, _ = run(tmp_path, iterations=7)
    assert outcome.state.iteration == 7
    shown = capsys.readouterr()
    assert "metrics.jsonl has no lines for 6 of 6 iterations" in shown.out + shown.err


@pytest.mark.parametrize(("minutes", "saved"), [(0, [6]), (60, [6]), (1e-9, [1, 2, 3, 4, 5, 6])])
def test_a_checkpoint_is_written_after_some_minutes(tmp_path, minutes, saved):
    changes = {"checkpoint.minutes": minutes, "checkpoint.every": 0, "checkpoint.keep": 9}
    assert run(tmp_path, **changes)[0].ending is Ending.FINISHED
    assert sorted(int(folder.name) for folder in (tmp_path / "checkpoints").glob("[0-9]*")) == saved


@pytest.mark.parametrize("updates_made", [0, 1])
def test_an_iteration_that_stops_the_run(tmp_path, updates_made):
    # With an update in the weights the iteration counts; without one it is drawn again.
    def stop_at_3(run, state):
        if state.iteration < 2:
            return iterate(run, state)
        return (iterate(run, state)[0] if updates_made else state), TrainingStopped("update 2 is not finite.")

    outcome, _ = run(tmp_path, stop_at_3)
    last = 2 + updates_made
    assert outcome.ending is Ending.STOPPED
    assert outcome.message == f"update 2 is not finite. The state before it is saved as iteration {last}."
    assert [line["iteration"] for line in writers.read_metrics(tmp_path)] == [1, 2, 3][:last]
    assert restored(tmp_path)[1]["iteration"] == last


@pytest.mark.parametrize("seconds", [1.0, 1000.0])
def test_a_preemption_saves_only_what_is_written_in_time(tmp_path, seconds, monkeypatch):
    """By the times of earlier saves: here of one of 1 MB, which is about the size of the state."""
    kept = []
    monkeypatch.setattr(ResponseJournal, "write_broken_off", lambda _: kept.append(1) or 7)

    def told_at_4(run, state):
        if state.iteration == 4:
            signal.raise_signal(signal.SIGTERM)
            raise Interrupted
        return iterate(run, state)

    (tmp_path / "saves.jsonl").write_text(f'{{"iteration": 1, "bytes": 1000000, "seconds": {seconds}}}\n')
    outcome, _ = run(tmp_path, told_at_4, **{"checkpoint.every": 3, "checkpoint.minutes": 0})
    assert outcome.ending is Ending.PREEMPTED
    if seconds == 1.0:
        assert outcome.message.startswith(
            "told to end; iteration 4 is saved. 7 responses of the next collection are stored. python -m"
        )
    else:
        assert outcome.message.startswith(
            "told to end; iteration 3 is the newest that is saved, because a checkpoint would end later than "
            "checkpoint.notice_s (25 s) after the signal. The responses drawn since then are stored. python -m"
        )
    assert kept == [1], "they are small, also where a checkpoint is not"
    saved = sorted(int(folder.name) for folder in (tmp_path / "checkpoints").iterdir())
    assert saved == ([3, 4] if seconds == 1.0 else [3])
    assert len((tmp_path / "saves.jsonl").read_text().splitlines()) == 1 + len(saved)


def test_a_late_end_without_a_journal_stores_no_responses(tmp_path):
    # Supervised training has none: the message said that the responses drawn since then were stored.
    def told_at_1(run, state):
        if state.iteration == 0:
            return iterate(run, state)
        signal.raise_signal(signal.SIGTERM)
        raise Interrupted

    (tmp_path / "saves.jsonl").write_text('{"iteration": 1, "bytes": 1000000, "seconds": 1000.0}\n')
    outcome, _ = run(tmp_path, told_at_1, has_journal=False, **{"checkpoint.every": 3, "checkpoint.minutes": 0})
    assert outcome.message.startswith(
        "told to end; no iteration is saved, because a checkpoint would end later than checkpoint.notice_s (25 s) "
        "after the signal. python -m"
    )


def test_weights_are_evaluated_before_training_once(tmp_path):
    first, second = Evaluator(), Evaluator(interrupt_at=0)
    run(tmp_path, evaluator=first)
    assert first.evaluated == [0, 2, 4, 6]
    second.is_done = lambda run, iteration: iteration == 0
    assert run(tmp_path / "second", evaluator=second)[0].ending is Ending.FINISHED


def test_the_first_interrupt_waits_and_the_second_does_not():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        stop = interrupt.stop()
        stop.check("drawing")
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            stop.check("drawing")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_due():
    """Work is due every n-th iteration, and after the last."""
    assert [loop.is_due(4, iteration, 10) for iteration in (0, 3, 4, 8, 9, 10)] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    assert not loop.is_due(0, 10, 10)


def test_a_record_and_back():
    response = Response("p1", 0, np.array([3, 4], np.int32), np.array([-0.1, -1e-7], np.float32), False)
    learner = LearnerState({}, (), jnp.int32(0))
    state = RunState(
        learner,
        {"seed": 1, "epoch": 2, "position": 3},
        iteration=7,
        skipped_in_a_row=2,
        partial_rollouts={"p1": PartialRollouts((response, None), (Verdict(True, 1.0),), 1)},
        estimator={"counts": {"p1": [2.0, 1.0]}},
        pending={"update/loss": 0.1},
        evaluation=0.25,
        averages=Averages({"rounds": (30.0, 10.0)}),
    )
    back = from_record(learner, to_record(state) | {"iteration": 7, "evaluation": state.evaluation})
    assert to_record(back) == to_record(state)
    assert (
        back.iteration == 7
        and back.selection == state.selection
        and back.evaluation == 0.25
        and back.pending == state.pending
        and back.averages == state.averages
    )


def test_processes_compare_what_they_have_read(tmp_path, monkeypatch):
    """Files of the same names may differ between hosts; each would then train on pools of the others' problems."""

    class Compared(Exception):
        pass

    def compared(answers, body):
        texts = {}
        (tmp_path / "mine.py").write_text(f"def reward(response, answer):\n    return {body}\n")
        prompts = cipher_file(tmp_path / "prompts.jsonl", 4, **answers)

        def check_same(what, text):
            texts[what] = text
            if len(texts) == 4:
                raise Compared

        standins.of_processes(monkeypatch, check_same=check_same)
        config = tiny(**{
            "data.prompts": prompts, "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 4,
            "reward.path": f"{tmp_path}/mine.py:reward", "reward.workers": 1,
        })  # fmt: skip
        inputs = startup.read_inputs(config, tmp_path / "run", lambda *_: None)
        with contextlib.ExitStack() as stack, pytest.raises(Compared):
            startup.start(inputs, tmp_path / "run", stack, quiet=True)
        return texts

    ours, theirs, others = compared({}, "1.0"), compared({"answer": "?"}, "1.0"), compared({}, "0.0")
    assert {what for what in ours if ours[what] != theirs[what]} == {"the prompts", "the reward functions"}
    assert {what for what in ours if ours[what] != others[what]} == {"the reward functions"}


@pytest.mark.parametrize("setting", ["collection.strategy", "collection.selection", "learning.loss"])
def test_a_changed_file_of_the_users_is_refused_as_a_changed_reward_is(tmp_path, setting):
    file = tmp_path / "mine.py"

    def identity(text: str) -> dict:
        file.write_text(text)
        same = {"config": "c", "architecture": {}, "prompts": "a", "reward": "1", "base": None, "reference": None}
        return same | {"code": resume.code_hash(tiny(**{setting: f"{file}:mine"}))}

    then, now = identity("mine = 1"), identity("mine = 2")
    resume.check(tmp_path, tmp_path, identity("mine = 1"), then)
    with pytest.raises(ValueError, match="file of collection.strategy, .* is not the one that .*accept_changed_reward"):
        resume.check(tmp_path, tmp_path, now, then)
    resume.check(tmp_path, tmp_path, now, then, accept_reward=True)
    del then["code"]  # of an earlier version
    resume.check(tmp_path, tmp_path, now, then)


def test_a_strategy_of_the_users_is_built_once(tmp_path, monkeypatch):
    """The instance that was checked trains: a second one would have another state."""
    (tmp_path / "mine.py").write_text(
        "from reinforce_ada_jax.collection import strategies\n\n"
        "def grpo(section):\n"
        f"    with open({str(tmp_path / 'calls')!r}, 'a') as calls:\n"
        "        calls.write('.')\n"
        "    return strategies.fixed(section.group_size)\n"
    )
    compiles_nothing_early(monkeypatch)
    config = tiny(**{"collection.strategy": f"{tmp_path / 'mine.py'}:grpo", "logging.trackers": ""})
    with contextlib.ExitStack() as stack:
        made, _ = startup.start(startup.read_inputs(config, tmp_path / "run", lambda *_: None), tmp_path / "run", stack)
    assert (tmp_path / "calls").read_text() == "." and made.strategy.max_draws == config.collection.group_size


@pytest.mark.slow  # test_public_api.py runs this example of docs/api.md
def test_training_from_a_notebook(tmp_path):
    settings = {"iterations": 1, "evaluation.every": 0, "logging.trackers": "", "learning.prompts_per_update": 4}
    config = tiny(**settings | {"collection.prompts_per_iteration": 8, "sampling.slots": 32})
    done = train.train(config, tmp_path / "run")
    assert done.iteration == 1 and [line["iteration"] for line in done.metrics] == [1]
    state, _ = restored(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, done.params, state.params)
    done.export(tmp_path / "model")
    assert huggingface.load(tmp_path / "model")[0] == done.architecture
    with pytest.raises(ValueError, match="data.prompts"):
        train.train(config_lib.replaced(config, {"data.prompts": ""}), tmp_path / "other")


def test_training_with_a_function_of_the_notebook(tmp_path, monkeypatch):
    settings = {"iterations": 1, "evaluation.every": 0, "logging.trackers": "", "learning.prompts_per_update": 4}
    config = tiny(**settings | {"collection.prompts_per_iteration": 8, "sampling.slots": 32})
    given = []

    def letters(response, answer):  # local, so that no worker could import it
        given.append(sum(map(str.__eq__, response, answer)) / len(answer))
        return given[-1]

    def other(response, answer):
        return response == answer

    done = train.train(config, tmp_path / "run", reward=letters)
    assert given.pop(0) == 1.0  # the reference answer of a problem, before anything is drawn
    assert 0 < sum(given) < len(given) == done.metrics[0]["collection/responses"]
    assert done.metrics[0]["reward/pool"] not in (0.0, 1.0)
    assert restored(tmp_path / "run")[1]["reward"] is not None
    compiles_nothing_early(monkeypatch)
    for reward in (other, None):
        with pytest.raises(ValueError, match=r"the reward \(.* is not the one that the run in .* began with"):
            train.train(config, tmp_path / "run", reward=reward)
    with pytest.raises(ValueError, match=r"reward.path is 'mine.py:grade', and a reward function is given as well"):
        train.train(
            config_lib.replaced(config, {"reward.path": "mine.py:grade", "reward.workers": 1}), tmp_path, reward=other
        )


def test_a_decode_window_is_at_most_eight_functions_from_the_loop(tmp_path, monkeypatch):
    """A reader follows a prompt from the loop to the engine through few functions, both ends counted."""

    class Reached(Exception):
        pass

    compiles_nothing_early(monkeypatch)
    standins.failing(monkeypatch, Engine, "decode_window", Reached())
    with pytest.raises(Reached) as reached:
        train_here(tiny(), tmp_path / "run")
    package = str(pathlib.Path(loop.__file__).parents[1])
    names = [frame.name for frame in traceback.extract_tb(reached.tb) if frame.filename.startswith(package)]
    walk = [*names[names.index("run_to_end") :], "decode_window"]
    assert walk[1] == "train_iteration" and len(walk) <= 8, walk

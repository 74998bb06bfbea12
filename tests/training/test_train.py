"""Whole runs of the built-in task, small: what they write, and that killing or interrupting them changes nothing."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from reinforce_ada_jax import cli, evaluate, export, train
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection.serialization import partial_from_text
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.evaluation import evaluator
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.training import resume, startup
from reinforce_ada_jax.training import workdir as workdir_lib
from reinforce_ada_jax.training.fingerprints import recorded
from reinforce_ada_jax.types import Prompt
from tests import compiling, standins
from tests.forked import Forked, finished
from tests.running import (
    ROOT,
    assert_same_state,
    cipher_file,
    compiles_nothing_early,
    environment,
    refused,
    reproducible,
    restored,
    saved_config,
    texts,
    tiny,
)

ITERATIONS = 8
# Two updates an iteration. Checkpoints at 5 and 8, evaluations at 0, 4 and 8.
SMALL = {
    "iterations": ITERATIONS, "checkpoint.every": 5, "evaluation.every": 4, "evaluation.samples": 2,
    "collection.prompts_per_iteration": 8, "learning.prompts_per_update": 4, "sampling.slots": 32,
}  # fmt: skip
KEYS = """
    iteration reward/first_round reward/pool collection/responses collection/tokens collection/rounds_mean
    collection/zero_signal_share collection/unmet_share collection/truncated_share collection/slot_utilisation
    collection/verifier_failures update/loss update/entropy update/clip_fraction update/grad_norm update/logprob_gap
    time/collect_s time/reshard_s time/update_s time/verify_s memory/reshard_bytes compile/count
""".split()
EVALUATION_KEYS = {f"evaluation/heldout/{name}" for name in ("avg", "avg_standard_error", "pass_at_1", "pass_at_2")}


# ---- runs as a user starts them -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(workdir, more flags) -> the running process. All of them share their compiled programs."""
    benchmark = cipher_file(tmp_path_factory.mktemp("shared") / "heldout.jsonl", 32)
    flags = ["--config=configs/tiny.py", f"--config.evaluation.benchmarks=({benchmark!r},)"]
    flags += [f"--config.{key}={value}" for key, value in SMALL.items()]

    def start(workdir, *more, how=("-m", "reinforce_ada_jax.train"), fork=True):
        arguments = [*flags, f"--workdir={workdir}", *more]
        if fork:
            return Forked([*how, *arguments], environment())
        return subprocess.Popen(
            [sys.executable, "-c", compiling.SHARING, how[1], *arguments], cwd=ROOT, text=True, env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def wait_for_lines(process, workdir, count):
    """Returns while iteration `count` + 1 is under way, or a little later."""
    while len(writers.read_metrics(workdir)) < count:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory):
    """(work directory, stdout) of a run that nothing disturbed, with a live page."""
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    return workdir, finished(start(workdir, "--page=0"))[0]


def assert_same_run(workdir, other):
    """Bitwise: weights, moments, cursor, metrics, evaluations, and every response that was written down."""
    assert_same_state(workdir, other)
    assert reproducible(workdir) == reproducible(other)
    for folder in ("samples", "evaluations"):
        assert texts(workdir / folder) == texts(other / folder)


def test_what_a_run_writes(unbroken):
    workdir, shown = unbroken
    assert {"config.json", "metrics.jsonl", "checkpoints", "evaluations", "samples"} <= set(os.listdir(workdir))
    lines = writers.read_metrics(workdir)
    assert [line["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    for line in lines:
        assert set(KEYS) <= line.keys()
        assert (EVALUATION_KEYS <= line.keys()) == (line["iteration"] in (4, 8))
    assert list(texts(workdir / "evaluations")) == ["000000.json", "000004.json", "000008.json"]
    assert sorted(os.listdir(workdir / "checkpoints"), key=int) == ["5", "8"]
    assert len(os.listdir(workdir / "samples")) == ITERATIONS
    config = saved_config(workdir)
    assert config.collection.prompts_per_iteration == 8 and config.iterations == ITERATIONS
    assert config.model.compute_dtype == "float32" and "precision   float32\n" in shown
    started = json.loads((workdir / "started.json").read_text())
    assert started["device"] == "1 x cpu" and started["date"] and started["commit"]
    # Its page has ended with it.
    port = re.search(r"^page +http://127\.0\.0\.1:(\d+)$", shown, re.MULTILINE)[1]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(port)))
    assert "qwen2, 107,392 weights" in shown and f"finished iteration {ITERATIONS}" in shown


def test_a_finished_run_has_nothing_to_do(unbroken, tmp_path, monkeypatch, capsys):
    compiles_nothing_early(monkeypatch)
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train.main(config_lib.replaced(saved_config(workdir), {"iterations": ITERATIONS - 3}), workdir)
    shown = capsys.readouterr().out
    assert (
        f"nothing to do: {ITERATIONS} are finished, and {ITERATIONS - 3} were asked for.\nfinished iteration" in shown
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert "nothing to do" not in unbroken[1]


def test_what_a_run_counts(unbroken):
    # Each iteration draws 8 responses a round for 8 prompts, one to four rounds each; the word and its end are 3 to 7
    # tokens, 8 at most.
    for line in writers.read_metrics(unbroken[0]):
        assert line["collection/responses"] == 64 * line["collection/rounds_mean"]
        assert 3 <= line["collection/tokens"] / line["collection/responses"] <= 8
        # Where the rule is met there are right and wrong responses, and so a signal.
        assert line["collection/zero_signal_share"] <= line["collection/unmet_share"]
        assert line["collection/verifier_failures"] == 0
        assert 0 < line["collection/slot_utilisation"] <= 1


def test_samples_can_be_read(unbroken):
    lines = [json.loads(line) for line in (unbroken[0] / "samples" / "000001.jsonl").read_text("utf-8").splitlines()]
    by_prompt = {name: list(group) for name, group in itertools.groupby(lines, key=lambda line: line["prompt"])}
    assert len(by_prompt) == 4
    for draws in by_prompt.values():
        assert [line["draw"] for line in draws] == list(range(len(draws)))
        assert sum(line["advantage"] is not None for line in draws) == 4
        for line in draws:
            assert line["correct"] == (line["response"] == line["answer"]) == (line["reward"] == 1.0)


def test_after_the_first_iteration_nothing_compiles(unbroken):
    counts = [line["compile/count"] for line in writers.read_metrics(unbroken[0])]
    assert counts[0] > 0 and counts[1:] == [0] * (ITERATIONS - 1)


def test_the_engine_and_the_learner_agree(unbroken):
    for line in writers.read_metrics(unbroken[0]):
        assert line["update/logprob_gap"] <= line["update/logprob_gap_max"] < 1e-4


AT_A_PHASE = """
import os, runpy, signal
from reinforce_ada_jax.reporting import progress

def phase(self, text, original=progress.Progress.phase):
    if self.done == {done} and text.startswith({phase!r}):
        os.kill(os.getpid(), {signal})
    original(self, text)

progress.Progress.phase = phase
runpy.run_module("reinforce_ada_jax.train", run_name="__main__")
"""


def end_when_drawn(start, workdir, done, number):
    """Ends a run by a signal when all of the iteration after `done` is drawn; returns its stderr."""
    ended = AT_A_PHASE.format(done=done, phase="updating", signal=int(number))
    codes = {signal.SIGINT: cli.INTERRUPTED, signal.SIGTERM: RESTART, signal.SIGKILL: -signal.SIGKILL}
    return finished(start(workdir, how=("-c", ended)), codes[number])[1]


def test_interrupted_and_killed_it_resumes(start, unbroken, tmp_path):
    """Ctrl-C in iteration 2 and SIGKILL in 4, when all is drawn; then a new interpreter."""
    workdir = tmp_path / "run"
    last = end_when_drawn(start, workdir, 1, signal.SIGINT).splitlines()[-1]
    assert last.startswith("error: interrupted; iteration 1 is saved.")
    assert f"--workdir={workdir} goes on from there" in last
    end_when_drawn(start, workdir, 3, signal.SIGKILL)
    # The state after iteration 1 was saved at Ctrl-C; that after iteration 3 was not at SIGKILL.
    assert [int(file.stem) for file in sorted((workdir / "unfinished").iterdir())] == [2, 3, 4]

    out, err = finished(start(workdir, fork=False))
    assert "resuming after iteration 1\n" in out
    # A complete collection is not drawn again.
    assert re.findall(r"iteration (\d+) begins with \d+ stored responses", err)[:3] == ["2", "3", "4"]
    assert_same_run(workdir, unbroken[0])
    assert not [*(workdir / "unfinished").iterdir()], "the last checkpoint has them"


@pytest.mark.slow  # the test above has the other ends; test_draw_ahead.py has SIGTERM
def test_ended_in_every_way_it_resumes(start, unbroken, tmp_path):
    """SIGTERM in iteration 2 and SIGKILL in 4, when all is drawn; Ctrl-C at any moment; a new interpreter."""
    workdir = tmp_path / "run"
    for done, number in ((1, signal.SIGTERM), (3, signal.SIGKILL)):
        end_when_drawn(start, workdir, done, number)
    process = start(workdir)
    wait_for_lines(process, workdir, 4)
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    _, err = finished(process, cli.INTERRUPTED)
    assert time.monotonic() - asked < 30
    last = err.splitlines()[-1]
    saved = int(re.match(r"error: interrupted; iteration (\d+) is saved\.", last)[1])
    assert f"--workdir={workdir} goes on from there" in last and "Traceback" not in err
    # The line of an iteration whose evaluation was interrupted is saved, and not yet written.
    assert saved - len(writers.read_metrics(workdir)) in (0, 1)

    out, _ = finished(start(workdir, fork=False))
    assert f"resuming after iteration {saved}\n" in out
    assert_same_run(workdir, unbroken[0])


@pytest.mark.slow  # test_interrupted_and_killed_it_resumes ends such a run when all of an iteration is drawn
def test_kills_at_random_moments(start, tmp_path):
    # In the middle of collections, updates, checkpoints and evaluations: there is little else in so small a run.
    kills, iterations = 20, 60
    flags = (f"--config.iterations={iterations}", "--config.checkpoint.every=3", "--config.evaluation.every=4")
    finished(start(tmp_path / "unbroken", *flags))
    moments, workdir, killed = np.random.default_rng(kills), tmp_path / "run", 0
    while killed < kills:
        process, before = start(workdir, *flags), len(writers.read_metrics(workdir))
        deadline = time.monotonic() + 120
        while len(writers.read_metrics(workdir)) in (before, 0) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(moments.uniform(0, iterations / 60))
        process.kill()
        process.communicate()
        if process.returncode == 0:  # it was faster: what is left of its last iterations is made again
            shutil.rmtree(workdir / "checkpoints" / str(iterations))
            continue
        killed += 1
    finished(start(workdir, *flags))
    assert_same_run(workdir, tmp_path / "unbroken")


@pytest.mark.slow  # test_train_strategies.py has one such run that is resumed
def test_with_overlapping_iterations_too(start, tmp_path):
    overlap = "--config.collection.overlap=finish"
    finished(start(tmp_path / "unbroken", overlap))
    process = start(tmp_path / "run", overlap)
    wait_for_lines(process, tmp_path / "run", 5)
    process.kill()
    finished(process, -signal.SIGKILL)
    finished(start(tmp_path / "run", overlap))
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")
    # From the second iteration on some responses were there already, drawn with the weights before.
    ahead = [line["collection/ahead"] for line in writers.read_metrics(tmp_path / "run")]
    assert ahead[0] == 0 and min(ahead[1:]) > 0
    assert partial_from_text(restored(tmp_path / "run")[1]["partial_rollouts"])


@pytest.mark.slow  # test_checkpoint.py has every kind of damage, and the checkpoint before
def test_a_damaged_checkpoint_is_said_and_done_again(start, unbroken, tmp_path):
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    arrays = max((workdir / "checkpoints" / "8" / "learner").rglob("*"), key=lambda file: file.stat().st_size)
    arrays.write_bytes(arrays.read_bytes()[: arrays.stat().st_size // 2])
    out, _ = finished(start(workdir))
    assert "warning: the checkpoint of iteration 8 in" in out and "resuming after iteration 5\n" in out
    assert_same_run(workdir, unbroken[0])


@pytest.fixture
def refusal(monkeypatch, capsys):
    """refusal(workdir) -> the message of the command that refuses the work directory as it is."""
    compiles_nothing_early(monkeypatch)

    return lambda workdir: refused(capsys, train.main, saved_config(workdir), workdir).err


def test_another_model_is_refused(refusal, unbroken, tmp_path):
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    model = shutil.copytree(ROOT / "reinforce_ada_jax" / "assets" / "cipher", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    saved = config_lib.replaced(saved_config(workdir), {"model.path": str(model)})
    (workdir / "config.json").write_text(config_lib.to_json(saved))
    err = refusal(workdir)
    assert "holds checkpoints of another model" in err and "now 0.25" in err
    assert "Traceback" not in err


FULL_DISK = """
import resource, runpy, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # as on a full disk
runpy.run_module("reinforce_ada_jax.train", run_name="__main__")
"""


@pytest.mark.slow  # test_loop.py has the end of a run on a full disk, and its resume
def test_a_full_disk_ends_the_run_and_harms_nothing(start, unbroken, tmp_path):
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    flags = ("--config.iterations=40", "--config.checkpoint.every=1")
    _, err = finished(start(workdir, *flags, how=("-c", FULL_DISK)), cli.STOPPED)
    last = err.splitlines()[-1]
    assert last.startswith("error: no checkpoint could be written to")
    assert "Training stopped. The last complete checkpoint is 8." in last
    assert "Traceback" not in err, "neither of TensorStore nor of TensorBoard"
    assert len(writers.read_metrics(workdir)) <= ITERATIONS + 2
    (workdir / "metrics.jsonl").unlink()
    out, _ = finished(start(workdir, "--config.iterations=9", "--config.logging.trackers="))
    assert "metrics.jsonl has no lines for 8 of 8 iterations" in out


@pytest.mark.slow  # test_draw_ahead.py has one, and resumed runs with evaluations are above
def test_without_its_checkpoints_a_run_says_that_it_begins_again(start, tmp_path):
    workdir = tmp_path / "run"
    first, _ = finished(start(workdir, "--config.iterations=1"))
    shutil.rmtree(workdir / "checkpoints")
    again, _ = finished(start(workdir, "--config.iterations=1"))
    assert "no checkpoint" not in first
    assert f"warning: {workdir} has metrics and no checkpoint: the run begins again" in again
    assert len(writers.read_metrics(workdir)) == 1


@pytest.mark.slow  # test_draw_ahead.py has such a run that goes on, and the runs above resume
def test_more_iterations(unbroken, tmp_path, capsys):
    """A finished run goes on with a larger number of iterations."""
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    train.main(config_lib.replaced(saved_config(workdir), {"iterations": ITERATIONS + 2}), workdir)
    assert f"resuming after iteration {ITERATIONS}\n" in capsys.readouterr().out
    lines = writers.read_metrics(workdir)
    assert lines[:ITERATIONS] == writers.read_metrics(unbroken[0])
    assert [line["iteration"] for line in lines[ITERATIONS:]] == [ITERATIONS + 1, ITERATIONS + 2]
    assert EVALUATION_KEYS <= lines[-1].keys()


POISONED = """
import runpy
import numpy
from reinforce_ada_jax.training import drawing

calls = 0

def poisoned(pool, strategy, ages, original=drawing.make_group, **weight):
    global calls
    calls += 1
    group = original(pool, strategy, ages, **weight)
    if calls == 8 * 2 + 6:  # the sixth prompt of iteration 3: its second update
        group.advantages[0] = numpy.nan
    return group

drawing.make_group = poisoned
runpy.run_module("reinforce_ada_jax.train", run_name="__main__")
"""


@pytest.mark.slow  # test_updates.py has the update and its message, test_loop.py the saved state
def test_a_loss_that_is_not_finite_stops_the_run(start, tmp_path):
    _, err = finished(start(tmp_path / "run", how=("-c", POISONED)), cli.STOPPED)
    last = err.splitlines()[-1]
    assert last.startswith("error: iteration 3, update 2 of 2: loss nan, gradient norm nan: not finite.")
    # The first update of the iteration is in the weights, so the iteration ends with it, and a resume begins the next.
    assert "saved as iteration 3" in last and "Traceback" not in err
    lines = writers.read_metrics(tmp_path / "run")
    assert [(line["iteration"], line["update/count"], line["update/skipped"]) for line in lines] == [
        (1, 2, 0), (2, 2, 0), (3, 1, 1),
    ]  # fmt: skip
    state, record = restored(tmp_path / "run")
    assert record["iteration"] == 3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert "resuming after iteration 3" in finished(start(tmp_path / "run", "--config.iterations=4"))[0]
    assert [line["iteration"] for line in writers.read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("seconds", [0, 3, 10**6])
def test_a_folder_that_all_share_may_show_late(tmp_path, monkeypatch, seconds):
    slept, file = [], tmp_path / "run" / "config.json"
    standins.of_processes(monkeypatch, is_writer=lambda: False)

    def sleep(time_s):
        slept.append(time_s)
        if sum(slept) >= seconds:
            file.parent.mkdir()
            file.write_text("{}")

    monkeypatch.setattr(workdir_lib.time, "sleep", sleep)
    if not seconds:
        sleep(0)
    with (
        pytest.raises(ValueError, match="is a folder of process 0 alone") if seconds > 60 else contextlib.nullcontext()
    ):
        workdir_lib.write_config(tiny(), tmp_path / "run")
    assert sum(slept) == min(seconds, processes.SHARED_AFTER_S)


def test_a_second_training_in_the_same_directory_is_refused(refusal, unbroken, tmp_path):
    # test_checkpoint.py has the lock of another process, and its end.
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    before, lock = (workdir / "config.json").read_bytes(), workdir_lib.WorkdirLock(workdir)
    err = refusal(workdir)
    lock.close()
    assert f"another training runs in {workdir} (process {os.getpid()} on " in err and "Traceback" not in err
    assert (workdir / "config.json").read_bytes() == before


def test_what_a_run_must_find_as_it_was(tmp_path):
    ours = {"config": "c", "architecture": {"num_layers": 2}, "prompts": "a", "base": None, "reference": "b"}
    ours |= {"reward": None, "code": ""}
    resume.check(tmp_path, tmp_path, ours, ours | {"iteration": 3})
    parts = {
        "prompts": r"prompts of data.prompts, or their tokens \(.*\) are not those",
        "reference": "weights of model.path are not those",
        "reward": r"reward \(reward.path, .* is not the one",
        "code": "file of collection.strategy, collection.selection or learning.loss is not the one",
    }
    for part, differs in parts.items():
        with pytest.raises(ValueError, match=f"the {differs} that the run in .* began with"):
            resume.check(tmp_path, tmp_path, ours, ours | {part: "c"})
    prompt = Prompt("a", "1 + 1?", "2", np.array([5, 6], np.int32))
    same, retold, retokenised = (
        dataclasses.replace(prompt, **changes)
        for changes in ({"pass_rate": 0.5}, {"answer": "3"}, {"tokens": np.array([5, 7], np.int32)})
    )
    hashes = [resume.prompts_hash([each]) for each in (prompt, same, retold, retokenised)]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3
    with pytest.raises(ValueError, match="another model than .*: num_layers 3, now 2"):
        resume.check(tmp_path, tmp_path, ours, ours | {"architecture": {"num_layers": 3}})


def test_a_run_keeps_the_precision_of_its_start(tmp_path):
    asked = functools.partial(startup.read_inputs, workdir=tmp_path, load_benchmarks=lambda *_: None)
    auto = tiny(**{"model.compute_dtype": "auto"})
    assert asked(auto).config.model.compute_dtype == "float32"  # a CPU's
    elsewhere = tiny(**{"model.compute_dtype": "bfloat16"})
    workdir_lib.write_config(elsewhere, tmp_path)
    found = asked(auto)
    assert found.config == elsewhere and found.components.engine.dtype == "bfloat16"
    with pytest.raises(ValueError, match="model.compute_dtype: bfloat16 -> float32"):
        asked(tiny(**{"model.compute_dtype": "float32"}))


def test_other_prompts_are_refused(refusal, unbroken, tmp_path):
    workdir, others = shutil.copytree(unbroken[0], tmp_path / "run"), cipher_file(tmp_path / "others.jsonl", 64)
    saved = config_lib.replaced(saved_config(workdir), {"data.prompts": others})
    (workdir / "config.json").write_text(config_lib.to_json(saved))
    err = refusal(workdir)
    assert "the prompts of data.prompts, or their tokens (" in err and "Traceback" not in err


def test_a_refused_resume_writes_no_configuration(unbroken, tmp_path, capsys, monkeypatch):
    """Otherwise the right command would be refused afterwards."""
    compiles_nothing_early(monkeypatch)
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    (workdir / "config.json").unlink()
    other = config_lib.replaced(saved_config(unbroken[0]), {"seed": 5})
    assert "holds checkpoints of another configuration" in refused(capsys, train.main, other, workdir).err
    assert not (workdir / "config.json").exists()


# ---- export and evaluate ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(unbroken, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    export.main(unbroken[0], None, folder)
    return folder


def test_export_is_the_checkpoint(unbroken, exported, tmp_path, capsys):
    _, params = huggingface.load(exported)
    jax.tree.map(np.testing.assert_array_equal, params, restored(unbroken[0])[0].params)
    export.main(unbroken[0], 5, tmp_path / "earlier")
    assert f"iteration 5 of {unbroken[0]} written to {tmp_path / 'earlier'}" in capsys.readouterr().out
    _, earlier = huggingface.load(tmp_path / "earlier")
    jax.tree.map(np.testing.assert_array_equal, earlier, restored(unbroken[0], 5)[0].params)
    assert (earlier["embedding"] != params["embedding"]).any()


@pytest.mark.parametrize(
    ("iteration", "name", "message"),
    [
        (7, "new", "no finished checkpoint of iteration 7; it has those of 5, 8. Name"),
        (None, "model", "not an empty folder"),
    ],
)
def test_export_refuses(unbroken, exported, capsys, iteration, name, message):
    """A checkpoint that is not there, and a folder in use, are refused."""
    assert message in refused(capsys, export.main, unbroken[0], iteration, exported.with_name(name)).err
    assert not exported.with_name("new").exists()


def test_evaluate_gives_the_figures_of_the_run(unbroken, tmp_path, capsys):
    workdir = shutil.copytree(unbroken[0], tmp_path / "run")
    (workdir / "evaluations" / "000008.json").unlink()
    evaluate.main(saved_config(workdir), evaluate.Options(workdir=str(workdir)))
    # A copy of a checkpoint is the same one, and no other is.
    assert recorded(workdir, 8) == recorded(unbroken[0], 8) != recorded(unbroken[0], 5)
    kept = workdir / "evaluations" / "000008"
    assert (kept / "heldout.jsonl").read_text("utf-8").count("\n") == 2 * 32
    title, _, table = (kept / "table.md").read_text("utf-8").partition("\n\n")
    shutil.rmtree(kept)
    assert texts(workdir / "evaluations") == texts(unbroken[0] / "evaluations")
    line = writers.read_metrics(workdir)[-1]
    average, error = line["evaluation/heldout/avg"], line["evaluation/heldout/avg_standard_error"]
    shown = capsys.readouterr().out
    assert f"model       {workdir}, iteration 8: qwen2" in shown and "stops on 2 '<eos>'" in shown
    assert title == "## heldout" and table in shown
    assert [cell.strip() for cell in table.splitlines()[2].split("|")[1:5]] == [
        "heldout", "32", f"{average:.3f} ± {error:.3f}", f"{line['evaluation/heldout/pass_at_2']:.3f}"
    ]  # fmt: skip
    assert shown.endswith(f"table.md are in {kept}, results in {workdir / 'evaluations' / '000008.json'}\n")


def test_evaluate_of_an_exported_folder_is_that_of_its_run(unbroken, exported, tmp_path, monkeypatch):
    # A folder knows no iteration, so its samples have addresses of their own; here they get those of the run.
    streams = evaluator.streams
    monkeypatch.setattr(evaluator, "streams", lambda benchmarks, _: streams(benchmarks, 8))
    monkeypatch.chdir(tmp_path)
    evaluate.main(saved_config(unbroken[0]), evaluate.Options(model=str(exported)))
    line = writers.read_metrics(unbroken[0])[-1]
    results = json.loads((tmp_path / "evaluations" / exported.name / "results.json").read_text())
    assert results["evaluation/heldout/avg"] == line["evaluation/heldout/avg"]

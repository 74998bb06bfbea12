"""Runs whose responses are trajectories: the built-in model against an environment that lets it try again."""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from reinforce_ada_jax import cli, train
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.distributed.watchdog import RESTART
from reinforce_ada_jax.isolation import process_tree
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import environments
from reinforce_ada_jax.types import Response
from tests import forked, hosts
from tests.environments import try_again
from tests.running import OF_THE_ENGINE, assert_same_state, environment, refused, reproducible, restored, tiny

SETTINGS = {
    "iterations": 2, "evaluation.every": 2, "checkpoint.every": 1, "logging.trackers": "",
    "evaluation.samples": 2, "sampling.slots": 16, "sampling.check_invariants": True,
    "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 4,
}  # fmt: skip
TRAIN = """
import json, pathlib, sys
from reinforce_ada_jax import train
from tests.running import tiny
settings, workdir = json.loads(sys.argv[1])
train.main(tiny(**settings), pathlib.Path(workdir))
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The folder of the environment and its problems; its files `turns`, `hold` and `held` are those of one run."""
    return try_again.write(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def settings(task):
    return SETTINGS | try_again.settings(task)


def started(settings, workdir):
    # With the devices of this process: as many threads compute, and round alike.
    return forked.Forked(["-c", TRAIN, json.dumps([settings, str(workdir)])], environment(os.environ["XLA_FLAGS"]))


def of_two(settings, workdir, count=2):
    """Two processes of a run with a device each, or one with both."""
    flags = [f"--config.{key}={value}" for key, value in (settings | {"mesh.fsdp": 2}).items()]
    train = ["-m", "reinforce_ada_jax.train", "--config=configs/tiny.py", f"--workdir={workdir}", *flags]
    return hosts.start(train, count, devices=2)


def finished(settings, workdir) -> str:
    """Output and stderr of a run that ends without an error."""
    return "".join(forked.finished(started(settings, workdir)))


@pytest.fixture
def trained(capfd):
    """trained(settings, workdir) -> output and stderr of a run in this process, which ends without an error."""

    def trained(settings, workdir):
        train.main(tiny(**settings), workdir)
        return "".join(capfd.readouterr())

    return trained


def ended_between_turns(task, start, line, how) -> list[tuple[int, str]]:
    """Ends the last process of a run when it waits for second or third turns, from a line of `turns` on.

    Args:
      task: the folder of the environment.
      start: starts the processes; the run may end before that line.
      line: number of a line.
      how: signal.

    Returns:
      Exit code and output of each process.
    """
    for name in ("turns", "held"):
        (task / name).write_text("")
    (task / "hold").write_text(str(line))
    processes = start()
    while processes[-1].poll() is None and not (task / "held").read_text():
        time.sleep(0.01)
    processes[-1].send_signal(how)
    said = ["".join(process.communicate()) for process in processes]
    (task / "hold").unlink()
    waiting = [int(pid) for pid in (task / "held").read_text().split()]
    deadline = time.monotonic() + 60
    while any(map(process_tree.is_running, waiting)):
        assert time.monotonic() < deadline, "the environment outlives its run"
        time.sleep(0.02)
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def assert_same_bits(one, other):
    assert_same_state(one, other)
    assert_same_files(one, other)


def assert_same_files(one, other):
    for folder in ("samples", "evaluations"):
        files = [sorted((run / folder).rglob("*.json*")) for run in (one, other)]
        assert [file.read_text() for file in files[0]] == [file.read_text() for file in files[1]] != []


def second_iteration(task, whole) -> list[int]:
    """Lines of `turns`, of the whole run, that its second iteration wrote."""
    lines = (task / "turns").read_text().splitlines()
    shown = (whole / "samples" / "000002.jsonl").read_text(encoding="utf-8").splitlines()
    names = {json.loads(line)["prompt"] for line in shown}
    return [number for number, line in enumerate(lines) if line in names]


def test_a_run_trains_on_trajectories(tmp_path, settings, trained):
    whole = tmp_path / "whole"
    said = trained(settings, whole)
    assert "three tries" in (whole / "environment_output.log").read_text() and "three tries" not in said
    metrics = reproducible(whole)
    assert len(metrics) == 2
    for line in metrics:
        assert 1.0 < line["collection/turns_mean"] <= 3.0
        assert line["collection/environment_tokens"] > 0
        assert line["collection/verifier_failures"] == 0
        assert line["update/logprob_gap"] < 1e-4  # of whole trajectories, whose prompts the sampler prefilled by turns
    assert 0.0 <= metrics[-1]["evaluation/heldout/avg"] <= 1.0
    shown = (whole / "samples" / "000001.jsonl").read_text(encoding="utf-8").splitlines()
    assert any("\n[environment]\n" in json.loads(line)["response"] for line in shown)


@pytest.mark.slow  # test_train.py and test_train_strategies.py have runs that resume
def test_it_resumes_bit_for_bit(tmp_path, settings, trained):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trained(settings, whole)
    metrics = reproducible(whole)
    # As after a kill in iteration 2; the test below has real ones, between turns.
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "2")
    for file in ("samples/000002.jsonl", "evaluations/000002.json"):
        (resumed / file).unlink()
    assert "resuming after iteration 1" in trained(settings, resumed)
    assert reproducible(resumed) == metrics
    assert_same_bits(resumed, whole)


@pytest.mark.slow
def test_kills_at_random_turns(tmp_path, task, settings):
    settings, whole, codes = settings | {"iterations": 4, "checkpoint.every": 2}, tmp_path / "whole", []
    (task / "turns").unlink(missing_ok=True)
    finished(settings, whole)
    count, random = len((task / "turns").read_text().splitlines()), np.random.default_rng(0)
    for number in range(2):
        workdir = tmp_path / str(number)
        for _ in range(3):
            line = int(random.integers(1, count // 2))  # a run that goes on may have less than this before it
            [(code, _)] = ended_between_turns(task, lambda to=workdir: [started(settings, to)], line, signal.SIGKILL)
            codes.append(code)
        finished(settings, workdir)
        assert reproducible(workdir) == reproducible(whole)
        assert_same_bits(workdir, whole)
    assert codes.count(-signal.SIGKILL) >= 4 and set(codes) <= {-signal.SIGKILL, 0}


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_collection_that_is_broken_off_between_turns_keeps_its_finished_rounds(
    tmp_path, task, settings, deterministic
):
    settings = settings | {
        "model.numerics": "invariant", "collection.deterministic": deterministic, "collection.samples_per_round": 2,
        "collection.max_rounds": 6, "collection.group_size": 2, "sampling.slots": 4,
    }  # fmt: skip
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    (task / "turns").unlink(missing_ok=True)
    finished(settings, whole)
    lines = second_iteration(task, whole)
    line = lines[len(lines) // 2]
    [(code, said)] = ended_between_turns(task, lambda: [started(settings, ended)], line, signal.SIGTERM)
    assert code == RESTART
    kept = int(re.search(r"iteration 1 is saved. (\d+) responses of the next collection are stored", said)[1])
    assert kept > 4 and f"iteration 2 begins with {kept} stored responses" in finished(settings, ended)
    assert_same_bits(ended, whole)
    for line, expected in zip(reproducible(ended), reproducible(whole), strict=True):
        assert line.keys() == expected.keys()
        assert {key for key in line if line[key] != expected[key] and not OF_THE_ENGINE.fullmatch(key)} == set()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_two_processes_make_the_run_of_one_through_an_end_between_turns(tmp_path, task, settings, how):
    settings = settings | {"learning.epsilon": 1e-5, "logging.sampled_prompts": 8}
    one, two = tmp_path / "one", tmp_path / "two"
    (task / "turns").unlink(missing_ok=True)
    hosts.finished(of_two(settings, one, count=1))
    line = second_iteration(task, one)[5]
    ended = ended_between_turns(task, lambda: of_two(settings, two), line, how)
    assert [code for code, _ in ended] == [RESTART, -how if how == signal.SIGKILL else RESTART], ended
    assert len(reproducible(two)) == 1
    hosts.finished(of_two(settings, two))
    # The same samples to the letter; the rest but for the order of sums.
    assert_same_files(one, two)
    states = [restored(run)[0] for run in (one, two)]
    jax.tree.map(lambda *arrays: np.testing.assert_allclose(*arrays, rtol=0, atol=1e-5), *states)
    for metrics, expected in zip(reproducible(two), reproducible(one), strict=True):
        for key in metrics.keys() - set(filter(OF_THE_ENGINE.fullmatch, metrics)):
            assert metrics[key] == pytest.approx(expected[key], abs=1e-5), key


def test_the_summary_has_the_lengths_of_trajectories(tmp_path, settings, capsys):
    """Turns are parts of a trajectory: 40 + 24 are the 64 tokens that the model was made for, and 41 + 24 are more."""
    lengths = {}
    for longest in (40, 41):
        train.dry_run(tiny(**settings | {"data.max_prompt_tokens": longest}), tmp_path / "run")
        (lengths[longest],) = re.findall(r"^lengths +(.*)", capsys.readouterr().out, re.MULTILINE)
    assert lengths[40] == "prompts up to 40 tokens (template chat), responses up to 24, turns up to 8"
    assert lengths[41].endswith("turns up to 8; the model was made for 64 tokens in all")


def test_an_environment_that_fails_stops_the_run_with_its_traceback(tmp_path, settings, capfd):
    broken = settings | {"environment.path": settings["environment.path"].replace("TryAgain", "Broken")}
    err = refused(capfd, train.main, tiny(**broken), tmp_path / "run", code=cli.STOPPED).err
    assert "RuntimeError: no luck today" in err
    assert "could grade none of the" in err


def test_an_environment_that_fails_is_no_better_than_a_wrong_answer(settings):
    config = tiny(**settings | {
        "environment.path": settings["environment.path"].replace("TryAgain", "Strict"), "reward.time_limit_s": 2.0
    })  # fmt: skip
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    said = "rwetc"
    strategy = strategies.fixed(len(said))
    turns = components.trajectories(config, 0, 24)
    verify_fn = environments.shaped_verdicts(turns, components_lib.shaping(config))

    def sample(queue):
        while requests := queue.take(8):
            texts = [components.tokenizer.encode(said[request.draw]) for request in requests]
            tokens = [np.array([*text, components.tokenizer.stop_ids[0]], np.int32) for text in texts]
            yield [
                Response(request.prompt.id, request.draw, each, np.zeros(len(each), np.float32), False)
                for request, each in zip(requests, tokens, strict=True)
            ]

    prompts = components.prompts(config.data.prompts, config)[:1]
    with contextlib.closing(components.environments.pool):
        (pool,) = collect(prompts, sample, verify_fn, strategy, turns=turns)
    assert [verdict.reason for verdict in pool.verdicts] == ["", "", "error", "timeout", "crash"]
    # Right 1, wrong and failed -1: mean -3/5. With 0 for failures it was 0, and only the wrong answer was discouraged.
    np.testing.assert_allclose(make_group(pool, strategy).advantages, [1.6, -0.4, -0.4, -0.4, -0.4])

"""`bench.learning`: what is read from runs, at equal updates and at equal tokens."""

import dataclasses
import json
import pathlib
import subprocess

import numpy as np
import pytest
from absl import flags

from bench import command_line, learning, options
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config.config_files import packaged
from reinforce_ada_jax.reporting.history import Accuracy, History
from tests import standins
from tests.running import cipher_file, refused


def history(tokens_per_update: int, last: float, num_updates: int = 200) -> History:
    """A run whose updates take a second each, and whose held-out average rises in a straight line from 0 to `last`."""
    updates = np.arange(1.0, num_updates + 1.0)
    tokens = tokens_per_update * updates
    evaluated = np.array([0.0, num_updates / 2, num_updates])
    evaluation = Accuracy(evaluated, tokens_per_update * evaluated, evaluated / num_updates * last, np.zeros(3))
    curves = {"heldout": {"pass": {evaluated[1]: {1: 0.0, 16: 0.1}, evaluated[2]: {1: last, 16: 1.0}}}}
    metrics = {
        "collection/entropy": np.linspace(2.0, 0.01, num_updates), "completions/mean_length": updates - 1.0,
        "collection/draws_mean": np.ones(num_updates), "collection/zero_signal_share": np.ones(num_updates),
    }  # fmt: skip
    config = {"learning": {"learning_rate": 2e-3}}
    return History(
        "run", 16, updates, tokens, updates, metrics, {"heldout": evaluation}, curves, config, pathlib.Path("run")
    )


HISTORIES = {"grpo-4": [history(320, 0.4), history(320, 0.8)], "balance": [history(3350, 1.0), history(3350, 0.9)]}


def test_summary():
    """Averages and intervals over seeds, at equal updates, tokens and times."""
    found = learning.summary(learning.TASKS["cipher"], HISTORIES)
    # Half of the way: 0.2 and 0.4, whose standard error is 0.1; 12.706 times that with one degree of freedom.
    assert found["grpo-4"]["avg_at_100_updates"] == pytest.approx([0.3, 1.2706], abs=1e-4)
    assert found["grpo-4"]["tokens_at_100_updates"] == [32_000.0, 0.0]
    # 46,000 tokens are 143.75 of 200 updates; grpo ends at 64,000.
    assert found["grpo-4"]["avg_at_tokens"]["46000"][0] == pytest.approx(0.6 * 143.75 / 200)
    assert found["grpo-4"]["avg_at_tokens"]["70000"] is None and found["grpo-4"]["reached_threshold"] == 0
    # 15 seconds are 15 of 200 updates.
    assert found["grpo-4"]["avg_at_time"] == pytest.approx([0.6 * 15 / 200, 12.7062 * 0.2 * 15 / 200], abs=1e-5)
    # 0.9 is reached after 180 and 200 updates, a second each.
    assert found["balance"]["seconds_to_threshold"][0] == pytest.approx(190.0)
    assert found["balance"]["tokens_to_threshold"][0] == pytest.approx(190.0 * 3350)
    assert found["balance"]["pass_at_end"] == [1.0, 0.0]
    # 0.01 a update from 2 to 0.01: the last ten are 0.1 to 0.01.
    assert found["balance"]["entropy_at_end"] == pytest.approx([0.055, 0.0])
    assert found["balance"]["length_at_end"] == pytest.approx([194.5, 0.0])
    row = learning.table(learning.TASKS["cipher"], found).splitlines()[2].split("|")
    row = [cell.strip() for cell in row[1:-1]]
    assert row[:2] == ["grpo-4", "0.002"] and row[4:6] == ["not reached", "0.300 ± 1.271"]
    assert row[7:9] == ["0.045 ± 0.191", "0 of the seeds"]


def test_a_task_has_its_own_number_of_updates():
    task = learning.TASKS["sums"]
    found = learning.summary(task, {"grpo-8": [history(320, 0.4)]})
    assert found["grpo-8"]["avg_at_16_updates"][0] == pytest.approx(0.4 * 16 / 200)
    assert "at 16 updates" in learning.table(task, found)
    entries = {entry.name: entry for entry in learning.ENTRIES}
    planned = learning.planned_entry(entries["exact-log"], task, None)
    assert (planned.updates, planned.learning_rate) == (16, 3e-5)
    assert learning.planned_entry(entries["exact-log"], task, 4).updates == 4


def test_one_seed_has_no_interval_and_a_short_run_no_time():
    run = history(320, 0.4)
    short = dataclasses.replace(run, seconds=run.seconds / 20)  # 10 s in all
    found = learning.summary(learning.TASKS["cipher"], {"grpo-4": [short]})
    row = [cell.strip() for cell in learning.table(learning.TASKS["cipher"], found).splitlines()[2].split("|")[1:-1]]
    assert row[5] == "0.200" and row[7] == "not reached"


def test_a_run_of_fewer_updates_has_no_average_at_those_of_the_task():
    found = learning.summary(learning.TASKS["cipher"], {"grpo-4": [history(320, 0.1, 50), history(320, 0.4)]})
    assert found["grpo-4"]["avg_at_100_updates"] is None and found["grpo-4"]["tokens_at_100_updates"] is None
    row = [cell.strip() for cell in learning.table(learning.TASKS["cipher"], found).splitlines()[2].split("|")[1:-1]]
    assert row[5:7] == ["not reached", "not reached"]


@pytest.mark.parametrize(
    ("names", "drawn"),
    [
        ([f"mine-{index}" for index in range(7)], [f"mine-{index}" for index in range(6)]),
        ([*"abcdef", "maxrl"], ["maxrl", *"abcde"]),
        (["mine", *learning.DRAWN], [*learning.DRAWN]),
    ],
)
def test_a_figure_of_many_algorithms_has_as_many_as_it_can_name(tmp_path, monkeypatch, names, drawn):
    found = []
    monkeypatch.setattr(learning.plotting, "draw", lambda panels, *_, **__: found.extend(panels))
    learning.figure(learning.TASKS["cipher"], {name: [history(3350, 0.9)] for name in names}, tmp_path / "figure")
    assert [[curve.label for curve in panel.curves] for panel in found] == [drawn] * 3


@pytest.mark.parametrize(
    ("overrides", "is_same"),
    [
        ({"strategy": "grpo", "group_size": "8"}, True),  # a flag's text
        ({"strategy": "grpo", "group_size": 8}, True),
        ({"strategy": "grpo", "group_size": "16"}, False),
        ({"strategy": "grpo"}, False),  # the task's group size
    ],
)
def test_a_finished_run_of_an_algorithm_with_other_settings_is_not_taken(tmp_path, monkeypatch, overrides, is_same):
    """`train` gets the new settings, and refuses the work directory."""
    config = config_lib.replaced(config_lib.resolve(packaged("tiny")), {"collection.strategy": "grpo"})
    (tmp_path / "config.json").write_text(config_lib.to_json(config_lib.replaced(config, {"collection.group_size": 8})))
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "evaluation/heldout/avg": 0.5}\n')
    calls = []
    refusal = subprocess.CompletedProcess([], 2, "", "error: another configuration")
    monkeypatch.setattr(learning.subprocess, "run", lambda command, **_: calls.append(command) or refusal)
    run = learning.Run("cipher", learning.Entry("mine", overrides, updates=1), 0)
    if is_same:
        learning.train(run, tmp_path)
    else:
        with pytest.raises(RuntimeError, match="another configuration"):
            learning.train(run, tmp_path)
    assert len(calls) == (0 if is_same else 1)


def test_the_numbers_of_one_seed_are_json(tmp_path):
    """Half of an interval is NaN then, which JSON lacks."""
    found = learning.summary(learning.TASKS["cipher"], {"grpo-4": [history(320, 0.4)]})
    command_line.report("learning", {"cipher": found}, str(tmp_path / "out.json"))

    def refused_constant(name):
        raise AssertionError(f"{name} is no JSON")

    numbers = json.loads((tmp_path / "out.json").read_text(), parse_constant=refused_constant)
    assert numbers["cipher"]["grpo-4"]["avg_at_100_updates"] == [0.2, None]


@pytest.mark.parametrize(("count", "point"), [(5, 2.776), (10, 2.262), (11, 2.228)])
def test_the_interval_is_students(count, point):
    values = np.random.default_rng(0).normal(size=count).tolist()
    mean, half = learning.interval(values)
    assert mean == pytest.approx(np.mean(values))
    assert half == pytest.approx(point * np.std(values, ddof=1) / count**0.5, rel=1e-3)


def measured(folder, *arguments):
    """Returns the result of the command."""
    values = options.define_flags(flags.FlagValues())
    values(["bench", f"--output={folder}", *arguments])
    return command_line.measured(learning.run, values)


@pytest.fixture
def scripted(monkeypatch):
    """scripted(train, load): what a measurement does in place of training a run, and of reading what it left.

    Pass rates are not measured.
    """
    monkeypatch.setattr(learning, "measured_rates", lambda *_: np.array([0.1, 0.5]))

    def put(train, load):
        monkeypatch.setattr(learning, "train", train)
        monkeypatch.setattr(learning, "load", load)

    return put


def test_every_run_is_trained_and_drawn(tmp_path, scripted):
    trained = []
    scripted(lambda run, workdir: trained.append((run, workdir)), lambda workdir: HISTORIES["balance"][0])
    flags_given = ("--seeds=2", "--task=cipher,second_half", "--algorithms=ngu,dapo", "--updates=300")
    result = measured(tmp_path, *flags_given, "--learning_rates=0.5")
    # Every algorithm has a run before any has two.
    assert [(run.seed, run.task, run.entry.name, run.entry.updates, workdir) for run, workdir in trained] == [
        (seed, task, name, 300, tmp_path / task / f"{name}-0.5-{seed}")
        for seed in (0, 1)
        for task in ("cipher", "second_half")
        for name in ("ngu", "dapo")
    ]
    assert list(result) == ["cipher", "second_half"] and list(result["second_half"]) == ["ngu", "dapo"]
    page = (tmp_path / "learning.md").read_text()
    for name in result:
        assert f"## {name}\n\n{learning.table(learning.TASKS[name], result[name])}\n" in page
        assert (tmp_path / f"{name}.png").exists() and (tmp_path / f"{name}.svg").exists()


def test_shorter_runs_are_compared_at_their_end(tmp_path, scripted):
    """The heading said "at 16 updates" above the averages after 4."""
    scripted(lambda run, workdir: None, lambda workdir: HISTORIES["balance"][0])
    result = measured(tmp_path, "--seeds=1", "--task=sums", "--algorithms=ngu", "--updates=4")
    assert result["sums"]["ngu"]["avg_at_4_updates"][0] == pytest.approx(4 / 200)
    assert "at 4 updates" in (tmp_path / "learning.md").read_text()


def test_predictions_are_beside_outcomes(tmp_path, scripted):
    """A method that chooses prompts meets other pass rates than those measured, so it has no prediction."""

    def load(workdir):
        collection = {"selection": "proportional"} if workdir.name.startswith("dapo") else {"strategy": "ngu"}
        return dataclasses.replace(
            history(320, 0.8), config={"learning": {"learning_rate": 1.0}, "collection": collection}
        )

    scripted(lambda *_: None, load)
    measured(tmp_path, "--seeds=1", "--task=cipher", "--algorithms=ngu,dapo", "--learning_rates=1")
    beside = (tmp_path / "learning.md").read_text().split("### Predicted and measured\n\n")[1]
    assert [line.split("|")[1].strip() for line in beside.splitlines()[2:]] == ["ngu"]
    assert "avg@16 at 46k tokens" in beside


def test_each_algorithm_has_its_best_learning_rate(tmp_path, scripted, monkeypatch):
    """The average with 46,000 tokens of a seed that is not reported decides, on each task."""
    best = {("cipher", "ngu"): 0.25, ("cipher", "dapo"): 0.5, ("second_half", "ngu"): 1.0, ("second_half", "dapo"): 0.5}
    trained = []

    def load(workdir):
        name, rate, seed = workdir.name.split("-")
        trained.append((workdir.parent.name, name, float(rate), int(seed)))
        return history(3350, 0.9 if float(rate) == best[workdir.parent.name, name] else 0.8)

    updates = []
    scripted(lambda run, workdir: updates.append((run.seed, run.entry.updates)), load)
    monkeypatch.setattr(learning, "figure", lambda *_: None)
    measured(tmp_path, "--seeds=1", "--task=cipher,second_half", "--algorithms=ngu,dapo", "--learning_rates=0.25,0.5,1")
    tried = [run for run in trained if run[3] == learning.TRIAL_SEED]
    assert sorted(tried) == sorted((*key, rate, 1000) for key in best for rate in (0.25, 0.5, 1.0))
    assert trained[12:] == [(*key, rate, 0) for key, rate in best.items()]
    # 46 of 70 parts of 100 updates.
    assert set(updates) == {(learning.TRIAL_SEED, 66), (0, 100)}


def test_learning_rates_are_compared_at_tokens_that_all_trials_generated(tmp_path, scripted):
    """A trial ends at 20,000 tokens with 0.5. The other one has 0.25 there, and 0.575 at the 46,000 of the budget."""
    trials = {"0.25": history(100, 0.5), "0.5": history(400, 1.0)}
    scripted(lambda *_: None, lambda workdir: trials[workdir.name.split("-")[1]])
    planned = [("cipher", learning.Entry("ngu", {}))]
    ((_, entry),) = learning.with_best_rates(planned, [0.25, 0.5], tmp_path, jobs=1)
    assert entry.learning_rate == 0.25


def test_an_algorithm_of_the_users_own_is_in_the_table(tmp_path, scripted):
    trained = []
    scripted(lambda run, workdir: trained.append(run.entry), lambda workdir: HISTORIES["balance"][0])
    flags_given = ("--seeds=1", "--task=cipher", "--own=pairs,strategy=mine.py:pairs", "--algorithms=grpo-4")
    result = measured(tmp_path, *flags_given)
    assert [entry.name for entry in trained] == list(result["cipher"]) == ["grpo-4", "pairs"]
    assert trained[-1].overrides == {"strategy": "mine.py:pairs"}
    page = (tmp_path / "learning.md").read_text()
    assert [line.split("|")[1].strip() for line in page.splitlines()[4:6]] == ["grpo-4", "pairs"]


@pytest.mark.slow  # the test above has its row; tests/training has runs with files of users
def test_an_algorithm_of_the_users_own_is_trained(tmp_path, scripted, monkeypatch):
    """One file and one flag: it is trained, and has a row of its own. The built-in algorithm is scripted."""
    (tmp_path / "mine.py").write_text(
        "from reinforce_ada_jax.collection.strategies import fixed\n\n\ndef pairs(config):\n    return fixed(2)\n"
    )
    settings = {"data.prompts": cipher_file(tmp_path / "words.jsonl", 32), "evaluation.benchmarks": "heldout.jsonl"}
    cipher_file(tmp_path / "heldout.jsonl", 4)
    monkeypatch.chdir(tmp_path)
    small = dataclasses.replace(learning.TASKS["cipher"], samples=2, every=1, settings=settings)
    monkeypatch.setitem(learning.TASKS, "cipher", small)
    train, load = learning.train, learning.load
    scripted(
        lambda run, workdir: run.entry.name == "pairs" and train(run, workdir),
        lambda workdir: load(workdir) if workdir.exists() else history(320, 0.8),
    )
    arguments = ("--seeds=1", "--updates=1", "--own=pairs,strategy=mine.py:pairs", "--algorithms=grpo-4")
    result = measured(tmp_path / "runs", *arguments)
    assert list(result["cipher"]) == ["grpo-4", "pairs"]
    page = (tmp_path / "runs" / "learning.md").read_text()
    assert [line.split("|")[1].strip() for line in page.splitlines()[4:6]] == ["grpo-4", "pairs"]
    # 32 prompts and two responses of each, which the file decides.
    assert load(tmp_path / "runs/cipher/pairs-0.002-0").metrics["collection/responses"].tolist() == [64.0]
    # A finished run is left alone.
    standins.not_called(monkeypatch, learning.subprocess, "run")
    measured(tmp_path / "runs", *arguments)
    assert (tmp_path / "runs" / "learning.md").read_text() == page


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--algorithms=ppo", "algorithm 'ppo' is not one of exact-log, "),
        ("--task=chess", f"task 'chess' is not one of {', '.join(learning.TASKS)}"),
        ("--own=mine,mine.py:triple", "must be a name and settings of the section collection"),
    ],
)
def test_a_mistake(tmp_path, capsys, argument, message):
    """A wrong flag ends the command with its message."""
    assert message in refused(capsys, measured, tmp_path, argument).err

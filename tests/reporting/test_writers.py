"""Metrics are written and read back, cut at a resume, and passed on to trackers."""

import json
import math
import sys
import types

import numpy as np
import pytest

from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.reporting.writers import MetricsWriter
from tests import standins


def writer(workdir, last_iteration, trackers=""):
    return MetricsWriter(workdir, last_iteration=last_iteration, trackers=trackers)


def test_lines_are_read_back_as_written(tmp_path):
    assert writers.read_metrics(tmp_path) == []
    lines = writer(tmp_path, 0)
    lines.write(1, {"update/loss": 0.1, "collection/responses": 3})
    lines.write(2, {"update/loss": 1 / 3})
    lines.close()
    # Bitwise: a third comes back as the same float.
    assert writers.read_metrics(tmp_path) == [
        {"iteration": 1, "update/loss": 0.1, "collection/responses": 3},
        {"iteration": 2, "update/loss": 1 / 3},
    ]


def test_iterations_without_a_line_are_counted(tmp_path):
    assert writer(tmp_path, 3).lacking == 3
    writer(tmp_path, 0).write(1, {"update/loss": 0.5})
    assert writer(tmp_path, 1).lacking == 0 and writer(tmp_path, 3).lacking == 2


def test_a_run_whose_folder_was_moved_writes_no_second_file(tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    lines = writer(workdir, 0)
    lines.write(1, {"update/loss": 0.5})
    workdir.rename(tmp_path / "moved")
    (workdir / "checkpoints").mkdir(parents=True)  # as a checkpoint makes them again
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl is gone: .* was moved or removed"):
        lines.write(2, {"update/loss": 0.25})
    assert [entry.name for entry in workdir.iterdir()] == ["checkpoints"]
    assert len(writers.read_metrics(tmp_path / "moved")) == 1


@pytest.mark.parametrize("trackers", ["", "tensorboard"])
def test_a_full_disk_is_an_error_of_the_write_and_not_of_closing(tmp_path, trackers):
    lines = writer(tmp_path, 0, trackers)
    with standins.full_disk(2000):
        with pytest.raises(OSError, match="File too large"):
            for iteration in range(1, 200):
                (lines.plot if trackers else lines.write)(iteration, {"update/loss": 0.5})
        lines.close()


@pytest.mark.parametrize("ending", ["", '{"iteration": 5, "upd'])
def test_a_resume_cuts_off_what_the_dead_run_wrote_later(tmp_path, ending):
    lines = writer(tmp_path, 0)
    for iteration in range(1, 5):
        lines.write(iteration, {"update/loss": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(ending)
    writer(tmp_path, 2).write(3, {"update/loss": 0.7})
    assert [(line["iteration"], line["update/loss"]) for line in writers.read_metrics(tmp_path)] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.7),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2')
    assert writers.read_metrics(tmp_path) == [{"iteration": 1}]


def test_the_same_numbers_reach_tensorboard(tmp_path):
    lines = writer(tmp_path, 0, "tensorboard")
    lines.plot(0, {"evaluation/heldout/avg": 0.2})
    lines.write(1, {"update/loss": 0.1})
    lines.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    recorded = events.read_bytes()
    assert b"evaluation/heldout/avg" in recorded and b"update/loss" in recorded
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"iteration": 1, "update/loss": 0.1}


def test_every_line_is_strict_json(tmp_path):
    numbers = {"update/kl": math.nan, "update/loss": np.float64(-math.inf), "update/entropy": 0.5}
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 1, "update/kl": NaN}\n')  # of a program that wrote what JSON does not have
    writer(tmp_path, 1).write(2, numbers)
    writer(tmp_path, 2).close()  # a resume writes the lines again
    assert [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()] == [
        {"iteration": 1, "update/kl": None, "not_finite": {"update/kl": "nan"}},
        {
            "iteration": 2, "update/kl": None, "update/loss": None, "update/entropy": 0.5,
            "not_finite": {"update/kl": "nan", "update/loss": "-inf"},
        },
    ]  # fmt: skip
    np.testing.assert_equal(writers.read_metrics(tmp_path)[1], {"iteration": 2, **numbers})


@pytest.mark.parametrize(
    "line",
    [
        '{"iteration": 1, ',
        "[1]",
        '{"reward": 1}',
        "3",
        '{"iteration": 2, "reward/pool": "x"}',
        '{"iteration": 2, "not_finite": 3}',
    ],
)
def test_a_finished_line_that_is_none_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 1}}\n{line}\n{{"iteration": 3}}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2 is not an object with the metrics .*Remove the line"):
        writers.read_metrics(tmp_path)


# ---- Weights & Biases ------------------------------------------------------------------------------------------------


class StandIn(types.ModuleType):
    """The little of wandb and trackio that is used: what was begun, logged and finished."""

    class Error(Exception):
        """Error of wandb."""

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.logged, self.finished, self.failure = [], [], 0, None

    def Settings(self, **settings):  # noqa: N802  (its name there)
        return settings

    def init(self, **arguments):
        if self.failure:
            raise self.failure
        self.begun.append(arguments)
        print("begun")
        return self

    def log(self, numbers, step):
        self.logged.append((step, numbers))

    def finish(self):
        self.finished += 1
        print("finished")


@pytest.fixture
def wandb(monkeypatch):
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_the_same_numbers_reach_wandb(tmp_path, wandb):
    workdir = tmp_path / "balance"
    workdir.mkdir()
    (workdir / "config.json").write_text('{"seed": 3}')
    for last, quiet in ((0, False), (1, True)):
        lines = MetricsWriter(workdir, last_iteration=last, trackers="wandb:ciphers", quiet=quiet)
        lines.plot(last, {"evaluation/heldout/avg": 0.2})
        lines.write(last + 1, {"update/loss": 0.1})
        lines.close()
    assert wandb.logged == [
        (0, {"evaluation/heldout/avg": 0.2}),
        (1, {"update/loss": 0.1}),
        (1, {"evaluation/heldout/avg": 0.2}),
        (2, {"update/loss": 0.1}),
    ]
    assert wandb.finished == 2
    first, second = wandb.begun
    assert (first["project"], first["name"], first["config"]) == ("ciphers", "balance", {"seed": 3})
    assert first["settings"] == {"silent": False} and second["settings"] == {"silent": True}
    # The resumed run is the same one; a new folder is another run.
    assert first["id"] == second["id"] and first["resume"] == "allow"
    other = tmp_path / "other"
    other.mkdir()
    writer(other, 0, "wandb:ciphers").close()
    assert wandb.begun[2]["id"] != first["id"]


# ---- trackio ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trackio(monkeypatch):
    module = StandIn()
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_the_same_numbers_reach_trackio(tmp_path, trackio, capsys):
    workdir = tmp_path / "balance"
    workdir.mkdir()
    (workdir / "config.json").write_text('{"seed": 3}')
    for last, quiet in ((0, False), (1, True)):
        lines = MetricsWriter(workdir, last_iteration=last, trackers="trackio:ciphers", quiet=quiet)
        lines.write(last + 1, {"update/loss": 0.1})
        lines.close()
    assert trackio.logged == [(1, {"update/loss": 0.1}), (2, {"update/loss": 0.1})] and trackio.finished == 2
    first, second = trackio.begun
    # A run is found again by its name, so this has an id: another folder of the same name is another run.
    assert first == second and first["resume"] == "allow" and first["config"] == {"seed": 3}
    assert first["name"] == "balance-" + (workdir / "trackio_id").read_text()[:8] and first["project"] == "ciphers"
    assert first["auto_log_cpu"] is first["auto_log_gpu"] is False
    assert capsys.readouterr().out == "begun\nfinished\n"  # of the one that is not quiet


def test_trackio_that_cannot_be_used_is_an_error(tmp_path, trackio, monkeypatch):
    trackio.failure = OSError("no room")
    with pytest.raises(ValueError, match="trackio: no room Leave it out of logging.trackers"):
        writer(tmp_path, 0, "trackio:ciphers")
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ValueError, match="has trackio:ciphers, but trackio is not installed: pip install trac"):
        writers.check_installed("trackio:ciphers")


def test_several_trackers_get_the_same_numbers(tmp_path, wandb, trackio):
    lines = writer(tmp_path, 0, "tensorboard, wandb:ours, trackio:theirs")
    lines.write(1, {"update/loss": 0.1})
    lines.close()
    assert wandb.logged == trackio.logged == [(1, {"update/loss": 0.1})]
    assert [each.begun[0]["project"] for each in (wandb, trackio)] == ["ours", "theirs"]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


# ---- none of them ----------------------------------------------------------------------------------------------------


def test_wandb_is_left_alone_where_no_project_is_named(tmp_path, wandb):
    lines = writer(tmp_path, 0)
    lines.write(1, {"update/loss": 0.1})
    lines.close()
    assert wandb.begun == wandb.logged == [] and wandb.finished == 0


def test_wandb_not_installed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what makes an import fail
    with pytest.raises(ValueError, match="has wandb:ciphers, but wandb is not installed: pip install wandb"):
        writers.check_installed("tensorboard, wandb:ciphers")


def test_wandb_without_a_login_is_an_error(tmp_path, wandb):
    wandb.failure = wandb.Error("api_key not configured.")
    with pytest.raises(ValueError, match="wandb: api_key not configured. Log in with `wandb login`"):
        writer(tmp_path, 0, "wandb:ciphers")

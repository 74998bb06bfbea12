"""Lines and bars of progress in a terminal and in a log file."""

import pytest

from reinforce_ada_jax.reporting import progress as progress_lib
from reinforce_ada_jax.reporting.progress import Progress, watched
from tests import standins


def test_progress_shows_iterations_phase_and_figures(capsys):
    progress = Progress(total=4, done=2)
    progress.iteration({"reward": "0.250"})
    progress.note("iteration 3: avg@16 heldout 0.200")
    progress.say("every group was dropped")
    progress.iteration({"reward": "0.500"})
    progress.close()
    shown = capsys.readouterr().err
    assert "iteration 3: avg@16 heldout 0.200\n" in shown and "every group was dropped\n" in shown
    assert "4/4" in shown and "reward 0.500" in shown


def test_quiet_progress_shows_warnings_only(capsys):
    progress = Progress(total=4, done=2, quiet=True)
    progress.phase("updating")
    progress.iteration({"reward": "0.250"})
    progress.note("iteration 3: avg@16 heldout 0.200")
    progress.say("every group was dropped")
    progress.close()
    assert capsys.readouterr() == ("", "every group was dropped\n")


def test_progress_that_reaches_a_count(capsys):
    progress = Progress(total=8, done=2, unit="problems")
    progress.reach(5, "math500: 12 responses")
    assert progress.done == 5
    progress.close()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("problems:") and "5/8" in last and "math500: 12 responses" in last


def test_a_log_file_gets_a_line_a_minute(capsys, monkeypatch):
    """Also after the wall clock was set back."""
    monkeypatch.setattr("tqdm.std.time", iter(range(10**9, 0, -3600)).__next__)
    now = standins.clock(monkeypatch, progress_lib)
    progress = Progress(total=20, done=0)
    for number in range(13):
        now.seconds += 10.0
        progress.phase("updating")
        progress.iteration({"reward": f"0.{number}"})
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" [")[0] for line in lines] == [
        "iteration: 0/20", "iteration: 5/20", "iteration: 11/20", "iteration: 13/20"
    ]  # fmt: skip
    assert "[01:00<" in lines[1] and "updating" in lines[1] and "reward 0.12" in lines[3]


@pytest.mark.parametrize(("seconds", "shown"), [(0.1, []), (30.0, ["layers read: 2/8", "layers read: 4/8"])])
def test_only_slow_items_are_counted(capsys, monkeypatch, seconds, shown):
    now = standins.clock(monkeypatch, progress_lib)
    for number, item in enumerate(watched(range(8), "layers read")):
        assert item == number
        now.seconds += seconds
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" [")[0] for line in lines][:2] == shown

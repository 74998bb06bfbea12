import json

import jax
import jax.numpy as jnp
import pytest

from reinforce_ada_jax import metrics
from reinforce_ada_jax.metrics import CompileCounter, MetricsWriter, Progress


def writer(workdir, last_iteration, tensorboard=False):
    return MetricsWriter(workdir, last_iteration=last_iteration, tensorboard=tensorboard)


def test_lines_are_read_back_as_written(tmp_path):
    assert metrics.read(tmp_path) == []
    lines = writer(tmp_path, 0)
    lines.write(1, {"update/loss": 0.1, "collection/responses": 3})
    lines.write(2, {"update/loss": 1 / 3})
    lines.close()
    # Bitwise: a third comes back as the same float.
    assert metrics.read(tmp_path) == [
        {"iteration": 1, "update/loss": 0.1, "collection/responses": 3},
        {"iteration": 2, "update/loss": 1 / 3},
    ]


@pytest.mark.parametrize("ending", ["", '{"iteration": 5, "upd'])
def test_a_resume_cuts_off_what_the_dead_run_wrote_later(tmp_path, ending):
    lines = writer(tmp_path, 0)
    for iteration in range(1, 5):
        lines.write(iteration, {"update/loss": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(ending)
    writer(tmp_path, 2).write(3, {"update/loss": 0.7})
    assert [(line["iteration"], line["update/loss"]) for line in metrics.read(tmp_path)] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.7),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2')
    assert metrics.read(tmp_path) == [{"iteration": 1}]


def test_a_file_is_written_whole(tmp_path):
    file = tmp_path / "config.json"
    metrics.write_whole(file, "old")
    metrics.write_whole(file, "new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_the_same_numbers_reach_tensorboard(tmp_path):
    lines = writer(tmp_path, 0, tensorboard=True)
    lines.plot(0, {"evaluation/heldout/avg": 0.2})
    lines.write(1, {"update/loss": 0.1})
    lines.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    recorded = events.read_bytes()
    assert b"evaluation/heldout/avg" in recorded and b"update/loss" in recorded
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"iteration": 1, "update/loss": 0.1}


def test_compilations_are_counted_once():
    counter = CompileCounter()
    double, three, four = jax.jit(lambda x: 2 * x + 1), jnp.ones(3), jnp.ones(4)
    counter.since_last()
    double(three)
    assert counter.since_last() == 1
    double(three)
    assert counter.since_last() == 0
    double(four)  # another shape, another program
    assert counter.since_last() == 1


def test_progress_shows_iterations_phase_and_figures(capsys):
    progress = Progress(total=4, done=2)
    progress.iteration({"reward": "0.250"})
    progress.say("iteration 3: avg@16 heldout 0.200")
    progress.iteration({"reward": "0.500"})
    progress.close()
    shown = capsys.readouterr().err
    assert "iteration 3: avg@16 heldout 0.200" in shown
    assert "4/4" in shown and "reward 0.500" in shown


def test_progress_that_reaches_a_count(capsys):
    progress = Progress(total=8, done=2, unit="problems")
    progress.reach(5, "math500: 12 responses")
    assert progress.done == 5
    progress.close()
    last = capsys.readouterr().err.split("\r")[-1]
    assert last.startswith("problems:") and "5/8" in last and "math500: 12 responses" in last

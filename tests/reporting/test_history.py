"""Metrics of a run as curves: smoothing, lines that are being written, and files that no run writes."""

import json

import numpy as np
import pytest

from reinforce_ada_jax.reporting import curves
from reinforce_ada_jax.reporting import history as history_lib
from tests.plotted import make_run

NO_UPDATE = '{"collection": {"prompts_per_iteration": 8}, "learning": {"prompts_per_update": 0}}'


def test_smooth():
    # The mean over the last three, over fewer at the beginning.
    np.testing.assert_allclose(history_lib.smooth(np.array([1.0, 3.0, 5.0, 10.0]), window=3), [1.0, 2.0, 3.0, 6.0])
    np.testing.assert_allclose(history_lib.smooth(np.array([4.0])), [4.0])
    # A value that is far larger is in the means of its window alone.
    np.testing.assert_allclose(history_lib.smooth(np.array([1.0, 3e18, 1.0, 1.0, 2.0]), window=2)[-2:], [1.0, 1.5])


def test_load(tmp_path):
    """A history has updates, tokens, metrics and evaluations of a run."""
    history = history_lib.load(make_run(tmp_path / "run", [100, 50, 150], {0: 0.2, 3: 0.6}, updates_per_iteration=2))
    assert history.name == "run" and history.samples == 16
    np.testing.assert_array_equal(history.updates, [2, 4, 6])
    np.testing.assert_array_equal(history.tokens, [100, 150, 300])
    np.testing.assert_array_equal(history.metrics["reward/first_round"], [0.1, 0.2, 0.3])
    updates, tokens, average, error = history.evaluations["heldout"]
    np.testing.assert_array_equal([updates, tokens, average, error], [[0, 6], [0, 300], [0.2, 0.6], [0.01, 0.01]])


def test_discarded_draws_are_generated_tokens_too(tmp_path):
    metrics = {"collection/discarded_tokens": [None, 20, 7]}
    history = history_lib.load(make_run(tmp_path / "run", [100, 50, 150], {3: 0.6}, metrics=metrics))
    np.testing.assert_array_equal(history.tokens, [100, 170, 327])
    assert history.evaluations["heldout"].tokens == 327


def test_totals_after_an_iteration_without_a_line_are_not_known(tmp_path):
    """Without the line of iteration 2 the tokens of iteration 3 would be 500, and are 700."""
    times = {"time/collect_s": [1.0, 1.0, 1.0]}
    workdir = make_run(tmp_path / "run", tokens=[100, 200, 400], averages={0: 0.1, 3: 0.5}, metrics=times)
    file = workdir / "metrics.jsonl"
    first, _, last = file.read_text().splitlines(keepends=True)
    file.write_text(first + last)
    run = history_lib.load(workdir)
    assert run.updates.tolist() == [1.0, 3.0]
    np.testing.assert_array_equal(run.tokens, [100.0, np.nan])
    np.testing.assert_array_equal(run.seconds, [1.0, np.nan])
    assert history_lib.at_tokens(run, "heldout", 100.0) == 0.1


def test_a_run_that_is_writing_a_line_can_be_plotted(tmp_path):
    workdir = make_run(tmp_path / "run", [100, 100], {2: 0.6})
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "rew')
    np.testing.assert_array_equal(history_lib.load(workdir).updates, [1, 2])


def test_seconds_are_those_of_phases_that_follow_one_another(tmp_path):
    metrics = {
        "time/collect_s": [3.0, 2.0],
        "time/update_s": [1.0, 1.5],
        # A part of collecting, beside it, and not of training.
        "time/host_between_windows_s": [0.5, 0.5],
        "time/reshard_s": [0.25, 0.25],
        "time/verify_s": [2.0, 2.0],
        "time/evaluate_s": [None, 7.0],
    }
    history = history_lib.load(make_run(tmp_path / "run", [100, 100], {}, metrics=metrics))
    np.testing.assert_allclose(history.seconds, [4.0, 7.5])
    # Between the ends of iterations by a straight line, from the beginning on.
    np.testing.assert_allclose(history.at(np.array([0.0, 0.5, 2.0]), history.seconds), [0.0, 2.0, 7.5])


def test_a_collection_during_the_updates_is_time_only_where_it_is_waited_for(tmp_path):
    metrics = {"time/collect_s": [3.0, 2.0], "time/wait_s": [3.0, 0.5], "time/update_s": [1.0, 1.5]}
    history = history_lib.load(make_run(tmp_path / "run", [100, 100], {}, metrics=metrics))
    np.testing.assert_allclose(history.seconds, [4.0, 6.0])
    assert curves.time([history]).panels[0].bars["run"]["collect: decode"] == 1.75


def test_a_key_that_some_lines_lack_is_not_lost(tmp_path):
    history = history_lib.load(
        make_run(tmp_path / "run", [1, 1, 1], {}, metrics={"estimator/brier": [None, 0.2, None]})
    )
    np.testing.assert_array_equal(history.metrics["estimator/brier"], [np.nan, 0.2, np.nan])


def test_pass_curves(tmp_path):
    """Curves over numbers of draws are those of the evaluations."""
    workdir = make_run(tmp_path / "run", [100, 100], {0: 0.2}, updates_per_iteration=3)
    result = {"evaluation/math500/pass_at_1": 0.5, "evaluation/math500/pass_at_16": 0.9}
    together = {"iteration": 2, "evaluation/math500/all_correct_at_2": 0.25, **result}
    (workdir / "evaluations" / "000002.json").write_text(json.dumps(together))
    assert history_lib.load(workdir).curves == {
        "math500": {"pass": {6.0: {1: 0.5, 16: 0.9}}, "all_correct": {6.0: {2: 0.25}}}
    }


def test_runs_of_one_name_get_unique_names(tmp_path):
    names = ("a/seed0/grpo", "a/seed1/grpo", "b/seed1/grpo")
    histories = [history_lib.load(make_run(tmp_path / name, [1], {})) for name in names]
    assert [history.name for history in history_lib.with_unique_names(histories[:2])] == ["seed0/grpo", "seed1/grpo"]
    assert [history.name for history in history_lib.with_unique_names(histories)] == list(names)
    assert [history.name for history in history_lib.with_unique_names(histories[:1])] == ["grpo"]
    with pytest.raises(ValueError, match="a/seed0/grpo is named twice: name each once"):
        history_lib.with_unique_names([histories[0], histories[0]])


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "holds a list, not an object"),
        ("config.json", "{}", "is no run of train: its config.json or metrics.jsonl lacks 'collection'"),
        # As of supervised training.
        ("metrics.jsonl", '{"iteration": 1, "update/loss": 0.5}\n', "is no run of train: .* lacks 'collection/tokens'"),
        ("config.json", NO_UPDATE, "config.json is damaged: its learning.prompts_per_update is 0"),
        ("evaluations/000001.json", '{"iteration"', "000001.json is not JSON"),
        ("evaluations/000001.json", '{"evaluation/heldout/pass_at_1": 0.5}', "000001.json is damaged: it has no"),
    ],
)
def test_a_file_that_no_run_writes_is_named(tmp_path, file, content, said):
    workdir = make_run(tmp_path / "run", [1], {})
    (workdir / file).write_text(content)
    with pytest.raises(ValueError, match=said):
        history_lib.load(workdir)

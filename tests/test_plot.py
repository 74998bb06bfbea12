import json

import numpy as np
import pytest

from reinforce_ada_jax import plot


def make_run(workdir, tokens, averages, updates_per_iteration=1):
    """A work directory of len(tokens) iterations; `averages` of an evaluation by iteration, 0 among them or not."""
    workdir.mkdir(parents=True)
    config = {
        "collection": {"prompts_per_iteration": 8 * updates_per_iteration},
        "learning": {"prompts_per_update": 8},
        "evaluation": {"samples": 16},
    }
    (workdir / "config.json").write_text(json.dumps(config))
    evaluations = {
        iteration: {"evaluation/heldout/avg": average, "evaluation/heldout/avg_standard_error": 0.01}
        for iteration, average in averages.items()
    }
    (workdir / "evaluations").mkdir()
    for iteration, result in evaluations.items():
        (workdir / "evaluations" / f"{iteration:06d}.json").write_text(json.dumps({"iteration": iteration} | result))
    lines = [
        {"iteration": i, "reward/first_round": i / 10, "collection/tokens": count,
         "collection/zero_signal_share": 0.5 if i == 1 else 0.25, **evaluations.get(i, {})}
        for i, count in enumerate(tokens, start=1)
    ]  # fmt: skip
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workdir


@pytest.fixture
def runs(tmp_path):
    grpo = make_run(tmp_path / "grpo", tokens=[100, 100], averages={0: 0.2, 2: 0.6})
    balance = make_run(tmp_path / "balance", tokens=[400, 400], averages={0: 0.2, 2: 0.8})
    return [grpo, balance]


def test_smooth():
    # The mean over the last three, over fewer at the beginning.
    np.testing.assert_allclose(plot.smooth(np.array([1.0, 3.0, 5.0, 10.0]), window=3), [1.0, 2.0, 3.0, 6.0])
    np.testing.assert_allclose(plot.smooth(np.array([4.0])), [4.0])


def test_load(tmp_path):
    history = plot.load(make_run(tmp_path / "run", [100, 50, 150], {0: 0.2, 3: 0.6}, updates_per_iteration=2))
    assert history.name == "run" and history.samples == 16
    np.testing.assert_array_equal(history.updates, [2, 4, 6])
    np.testing.assert_array_equal(history.tokens, [100, 150, 300])
    np.testing.assert_array_equal(history.metrics["reward/first_round"], [0.1, 0.2, 0.3])
    updates, tokens, average, error = history.evaluations["heldout"]
    np.testing.assert_array_equal([updates, tokens, average, error], [[0, 6], [0, 300], [0.2, 0.6], [0.01, 0.01]])


def test_a_run_that_is_writing_a_line_can_be_plotted(tmp_path):
    workdir = make_run(tmp_path / "run", [100, 100], {2: 0.6})
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "rew')
    np.testing.assert_array_equal(plot.load(workdir).updates, [1, 2])


def test_table(tmp_path, runs):
    late = make_run(tmp_path / "late", tokens=[10_000, 20_000], averages={1: 0.3})
    assert plot.table([plot.load(workdir) for workdir in (*runs, late)], "heldout").splitlines() == [
        "heldout avg@16 after      0      1      2  updates  zero-signal 1-25  tokens  tokens/update",
        "grpo                  0.200         0.600                       0.38     200            100",
        "balance               0.200         0.800                       0.38     800            400",
        "late                         0.300                              0.38  30,000         15,000",
    ]


def test_what_was_spent(runs):
    # balance spent 800 / 200 = 4 times the tokens. With 200 tokens it had gone a quarter of its way: 0.2 + 0.6 / 4.
    assert plot.what_was_spent(*map(plot.load, runs), "heldout") == (
        "After 2 updates balance stands at 0.800 and grpo at 0.600, and balance generated 4.0 times the tokens to get "
        "there; when both have generated 200 tokens, balance stands at 0.350 and grpo at 0.600."
    )


def test_what_was_spent_compares_where_both_have_been(tmp_path, runs):
    # balance ended after 2 updates. By then the longer run was half way from 0.2 to 0.6 and had spent 200 tokens.
    longer = make_run(tmp_path / "longer", tokens=[100] * 4, averages={0: 0.2, 4: 0.6})
    sentence = plot.what_was_spent(plot.load(longer), plot.load(runs[1]), "heldout")
    assert sentence.startswith("After 2 updates balance stands at 0.800 and longer at 0.400, and balance generated 4.0")


def test_the_figure_is_written(tmp_path, runs, capsys):
    plot.main(runs, tmp_path / "figures")
    file = tmp_path / "figures" / "comparison.png"
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000
    shown = capsys.readouterr().out
    assert "zero-signal 1-25" in shown and "After 2 updates" in shown and f"figure: {file}" in shown


def test_a_run_without_evaluations_has_a_figure_too(tmp_path, capsys):
    plot.main([make_run(tmp_path / "run", [100, 100], {})], tmp_path)
    assert (tmp_path / "comparison.png").exists()
    assert "After" not in capsys.readouterr().out


def test_runs_on_several_benchmarks_have_a_figure_each(tmp_path, runs, capsys):
    file = runs[0] / "metrics.jsonl"
    file.write_text(file.read_text().replace('"evaluation/heldout/avg', '"evaluation/other/avg'))
    plot.main(runs, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"comparison_heldout.png", "comparison_other.png"}
    capsys.readouterr()


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_without_a_run_is_an_error(tmp_path, capsys, exists):
    workdir = tmp_path / "empty"
    if exists:
        workdir.mkdir()
        (workdir / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="2"):
        plot.main([workdir], tmp_path / "figures")
    assert f"error: {workdir} has no metrics.jsonl with a finished iteration" in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()


def test_no_folder_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        plot.main([], tmp_path / "figures")
    assert "name at least one work directory" in capsys.readouterr().err

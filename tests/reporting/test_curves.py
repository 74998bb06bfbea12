"""Panels of runs; drawing takes any name and any number."""

import json

import numpy as np
import pytest

from reinforce_ada_jax.reporting import curves, plotting
from reinforce_ada_jax.reporting import history as history_lib
from reinforce_ada_jax.reporting.panels import Curve, Panel
from reinforce_ada_jax.reporting.plotting import DARK, LIGHT, LINES, MARKERS
from tests.plotted import make_run


def history(workdir, num_iterations=2, averages=None, **metrics):
    return history_lib.load(make_run(workdir, [100] * num_iterations, averages or {}, metrics=metrics))


def titles(figure):
    return [panel.title for panel in figure.panels]


# ---- which panels ----------------------------------------------------------------------------------------------------


def test_learning_by_updates_tokens_and_time(tmp_path):
    slow = history(tmp_path / "slow", 2, {0: 0.1, 2: 0.5}, **{"time/collect_s": [1, 1], "time/update_s": [3, 5]})
    made = curves.learning([slow, history(tmp_path / "untimed", 2, {2: 0.3})])
    assert titles(made) == [
        *(f"heldout: accuracy by {budget}" for budget in ("updates", "tokens", "time")),
        *(f"Reward by {budget}" for budget in ("updates", "tokens", "time")),
    ]
    for panel, ends in zip(made.panels[:3], ([0, 2], [0, 200], [0, 10]), strict=True):
        np.testing.assert_allclose(panel.curves[0].x, ends)
        np.testing.assert_allclose(panel.curves[0].y, [0.1, 0.5])
        np.testing.assert_allclose(panel.curves[0].error, [0.01, 0.01])
    assert all(panel.x_label and panel.y_label for panel in made.panels)
    # Both by updates and by tokens; the one whose metrics have no seconds not by time.
    assert [len(panel.curves) for panel in made.panels] == [2, 2, 1, 2, 2, 1]
    assert made.missing == [
        f"“{name} by time” is without untimed: no {metric}, or no time/*_s, or no line of an earlier iteration."
        for name, metric in (("heldout: accuracy", "evaluation of heldout"), ("Reward", "reward/first_round"))
    ]


def test_a_run_without_a_key_is_left_out_and_said(tmp_path):
    new = history(tmp_path / "new", **{"collection/extra_samples": [8, 4]})
    made = curves.sampling([new, history(tmp_path / "old")])
    assert titles(made) == ["Extra samples"]
    assert [curve.label for curve in made.panels[0].curves] == ["new"]
    assert "“Extra samples” is without old: no collection/extra_samples." in made.missing
    assert "“Draws for a prompt” is not drawn: no collection/draws_*." in made.missing
    assert len(made.missing) == 8


def test_prompts_active_in_each_round(tmp_path):
    # Early and late are the same two iterations. The second needed one round less: no key, no prompt.
    adaptive = {"active_round_1": [4, 4], "active_round_2": [2, 4], "active_round_3": [2, None]}
    adaptive = {f"collection/{name}": values for name, values in adaptive.items()}
    runs = [history(tmp_path / "ada", **adaptive), history(tmp_path / "grpo", **{"collection/active_round_1": [4, 4]})]
    early, late = curves.sampling(runs).panels
    assert (early.title, late.title) == tuple(f"Prompts that draw a round, {part}" for part in ("early", "late"))
    for curve, shares in zip(early.curves, ([1, 6 / 8, 2 / 8], [1, 0, 0]), strict=True):
        np.testing.assert_array_equal(curve.x, [1, 2, 3])
        np.testing.assert_allclose(curve.y, shares)


def test_thresholds_met_within_two_rounds(tmp_path):
    # Of 4 and of 8 prompts (with replacements). The second iteration drew one round: its count stands for two.
    metrics = {
        "active_round_1": [4, 8], "active_round_2": [3, None], "active_round_3": [2, None],
        "met_round_1": [1, 6], "met_round_2": [2, None], "met_round_3": [4, None],
        "met_k_pos_round_1": [2, 8], "met_k_pos_round_2": [3, None], "met_k_pos_round_3": [4, None],
        "below_k_pos_share": [0.5, 0.25], "below_k_neg_share": [0.0, 0.5], "extra_samples": [-4, 8],
    }  # fmt: skip
    run = history(tmp_path / "ada", **{f"collection/{name}": values for name, values in metrics.items()})
    panels = {panel.title: panel for panel in curves.sampling([run]).panels}
    # Means over the iterations so far: 2/4, 6/8 and 3/4, 8/8.
    np.testing.assert_allclose(panels["Rule met within two rounds"].curves[0].y, [0.5, 0.625])
    np.testing.assert_allclose(panels["k_pos correct within two rounds"].curves[0].y, [0.75, 0.875])
    np.testing.assert_allclose(panels["Fewer than k_pos correct at the end"].curves[0].y, [0.5, 0.375])
    np.testing.assert_allclose(panels["Fewer than k_neg wrong at the end"].curves[0].y, [0.0, 0.25])
    # Fewer samples than GRPO's are below the axis, not cut off at 0.
    np.testing.assert_allclose(panels["Extra samples"].curves[0].y, [-4, 2])
    assert panels["Extra samples"].limits == (None, None)


def test_early_and_late_rounds_are_of_25_iterations(tmp_path):
    rounds = {"collection/active_round_1": [10] * 60, "collection/active_round_2": [5] * 25 + [0] * 35}
    early, late = curves.sampling([history(tmp_path / "run", 60, **rounds)]).panels
    assert (early.curves[0].y[1], late.curves[0].y[1]) == (0.5, 0.0)


def test_draws_have_a_band(tmp_path):
    names = ("mean", "p10", "p90")
    metrics = {
        f"collection/draws_{name}": values for name, values in zip(names, ([8, 6], [4, 4], [32, 8]), strict=True)
    }
    (panel,) = curves.sampling([history(tmp_path / "run", **metrics)]).panels
    np.testing.assert_allclose(panel.curves[0].y, [8, 7])  # means over the last iterations
    np.testing.assert_allclose(panel.curves[0].band, [[4, 4], [32, 20]])


def test_pass_and_all_correct_at_k_first_and_last(tmp_path):
    workdir = make_run(tmp_path / "run", [1, 1], {})
    for iteration, value in ((0, 0.1), (1, 0.2), (2, 0.3)):
        result = {f"evaluation/math500/{kind}_at_{k}": value * k for kind in ("pass", "all_correct") for k in (2, 1)}
        (workdir / "evaluations" / f"{iteration:06d}.json").write_text(json.dumps({"iteration": iteration} | result))
    made = curves.pass_at_k([history_lib.load(workdir)])
    assert [panel.y_label for panel in made.panels] == ["pass@k", "all-correct@k"] and not made.missing
    for panel in made.panels:
        first, last = panel.curves
        assert (first.faint, last.faint) == (True, False)
        np.testing.assert_allclose([first.x, first.y, last.x, last.y], [[1, 2], [0.1, 0.2], [1, 2], [0.3, 0.6]])


def test_accuracy_by_initial_difficulty(tmp_path):
    workdir = make_run(tmp_path / "run", [1, 1], {}, updates_per_iteration=4)
    for iteration, gain in ((0, 0.0), (1, 0.1), (2, 0.2)):
        result = {"0": 0.05 + gain, "0.25_0.5": 0.375 + gain, "1": 0.8}
        keys = {f"evaluation/math500/avg_initial_{name}": value for name, value in result.items()}
        keys |= {"evaluation/math500/problems_initial_0": 9, "evaluation/math500/tokens_mean": 5}
        (workdir / "evaluations" / f"{iteration:06d}.json").write_text(json.dumps({"iteration": iteration} | keys))
    found = history_lib.load(workdir)
    assert found.curves["math500"]["initial"][4.0] == {0.0: pytest.approx(0.15), 0.375: pytest.approx(0.475), 1.0: 0.8}
    made = curves.difficulty([history(tmp_path / "other"), found])
    (panel,) = made.panels
    assert panel.diagonal and [curve.label for curve in panel.curves] == ["run", "run"]
    first, last = panel.curves
    assert (first.faint, last.faint) == (True, False)
    np.testing.assert_allclose([first.x, last.x], [[0.0, 0.375, 1.0]] * 2)
    np.testing.assert_allclose([first.y, last.y], [[0.05, 0.375, 0.8], [0.25, 0.575, 0.8]])
    assert made.missing == [f"“{panel.title}” is without other: no avg_initial_<range> in evaluations/."]
    nothing = curves.difficulty([history(tmp_path / "third")])
    assert not nothing.panels and "evaluate --initial" in nothing.missing[0]


def test_where_time_goes(tmp_path):
    """Bars have the time of each phase of an iteration."""
    timed = history(
        tmp_path / "run", 3,
        **{"time/collect_s": [50, 6, 6], "time/reshard_s": [9, 2, 2], "time/host_between_windows_s": [1, 1, 1],
           "time/score_s": [9, 1, 1], "time/update_s": [30, 2, 3], "time/evaluate_s": [None, None, 6]},
    )  # fmt: skip
    bars = curves.time([timed]).panels[0].bars
    # Medians, as the first iteration compiles; an evaluation of 6 s in three iterations.
    collecting = {"collect: weights to decoding": 2, "collect: decode": 3, "collect: host between windows": 1}
    assert bars == {"run": collecting | {"score and update": 4, "evaluate": 2}}


def test_calibration_of_the_runs_that_estimate(tmp_path):
    metrics = {
        "estimator/brier": [0.2, 0.1], "estimator/calibration_error": [0.3, 0.1],
        "estimator/bin_1_estimate": [0.3, 0.2], "estimator/bin_1_outcome": [0.5, 0.1],
        "estimator/bin_1_share": [0.25, 0.75], "estimator/bin_4_estimate": [0.9, None],
        "estimator/bin_4_outcome": [1.0, None], "estimator/bin_4_share": [0.75, None],
    }  # fmt: skip
    made = curves.calibration([history(tmp_path / "grpo"), history(tmp_path / "estimate", **metrics)])
    assert made.missing == ["Without grpo: no draws planned with estimates."]
    (curve,) = made.panels[0].curves
    # Weighed by share: 0.25 * 0.3 + 0.75 * 0.2; the second bin was used once.
    np.testing.assert_allclose([curve.x, curve.y], [[0.225, 0.9], [0.2, 1.0]])
    assert curve.style == 1  # as in all other figures
    nothing = curves.calibration([history(tmp_path / "other")])
    assert not nothing.panels and "no run plans its draws" in nothing.missing[0]


# ---- drawing ---------------------------------------------------------------------------------------------------------


def test_equal_panels_are_equal_files(tmp_path):
    panel = Panel(
        "A", "updates", "reward", [Curve(name, i, np.arange(3), np.arange(3) * i) for i, name in enumerate("ab")]
    )
    plotting.draw([panel], tmp_path / "one" / "learning")
    plotting.draw([panel], tmp_path / "two" / "learning")
    names = {"learning.png", "learning.svg", "learning-dark.svg"}
    assert {file.name for file in (tmp_path / "one").iterdir()} == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_any_name_can_be_drawn(tmp_path):
    # Warnings are errors here: a formula that is none, or a letter that the font lacks.
    names = ("a$b", "_hidden", "$\\frac$", "中文", "line\nbreak", "\u2028\u202e\x00", "x" * 200, "\ud800", "<b>&")
    panels = [Panel("", "s", "", bars={name: {"a": 1.0} for name in names})]
    for name in names:
        curves = [Curve(name, 0, np.array([0.0, 1.0]), np.array([1.0, np.nan])), Curve("b", 1, np.zeros(1), np.ones(1))]
        panels.append(Panel(name, "updates", "", curves))
    plotting.draw(panels, tmp_path / "f")
    assert (tmp_path / "f.svg").stat().st_size > 1000 * len(names)


def test_more_runs_than_styles_have_a_legend(tmp_path):
    # matplotlib leaves labels out that begin with an underscore, unless their handles are given.
    names = [f"run {i}" for i in range(8)] + ["_hidden"]
    curves = [Curve(name, i, np.arange(2), np.full(2, i)) for i, name in enumerate(names)]
    plotting.draw([Panel("many", "updates", "reward", curves)], tmp_path / "many")
    assert (tmp_path / "many.png").exists()
    text = (tmp_path / "many.svg").read_text()  # each text is a comment beside its outlines
    assert [name for name in names if f"<!-- {name} -->" in text] == names


def luminance(color):
    """WCAG 2's relative luminance of #rrggbb."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_lines_stand_out_and_differ_without_colour(theme):
    paper = luminance(theme["paper"])
    for color in (*theme["colors"], theme["ink"]):
        light, dark = sorted((luminance(color), paper), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3.0, color  # WCAG 2.2, 1.4.11
    assert len({str(line) for line in LINES}) == len(theme["colors"]) == 6
    assert len(set(MARKERS)) == len(MARKERS) >= 6

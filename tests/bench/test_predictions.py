"""`bench.predictions`: pass rates from counts, what an update is expected to do, and the table beside outcomes."""

import dataclasses
import math
import subprocess

import numpy as np
import pytest

from bench import predictions
from reinforce_ada_jax import cli
from reinforce_ada_jax.analysis.enumeration import binomial
from reinforce_ada_jax.config import CollectionConfig
from tests.bench.test_learning import history


def test_rates_behind_counts_are_found():
    """Half of the problems have the rate 0.05, and half 0.9; 22 % of all have no correct response of 16."""
    counts = np.rint(100_000 * binomial(16, np.array([0.05, 0.9])).mean(axis=1)).astype(int)
    rates = predictions.fitted_rates(counts)
    assert len(rates) == predictions.PROMPTS
    low, high = rates[rates < 0.5], rates[rates > 0.5]
    assert len(low) == pytest.approx(len(high), rel=0.02)
    assert low.mean() == pytest.approx(0.05, rel=0.05) and high.mean() == pytest.approx(0.9, rel=0.01)
    assert ((1.0 - rates) ** 16).mean() == pytest.approx(counts[0] / 100_000, rel=0.02)
    # A count of 0 is not a rate of 0.
    assert 0.01 < rates.min()


def test_a_stored_measurement_is_compared_with_model_and_problems(tmp_path, monkeypatch):
    """`prepare` finds that a stored measurement is of another model, and the predictions stop with its message."""
    (tmp_path / "problems.manifest.json").write_text('{"histogram": [1, 0, 1]}')
    said = "error: problems.draws/responses.jsonl holds responses that were drawn with other settings"
    results = iter([subprocess.CompletedProcess([], 0), subprocess.CompletedProcess([], cli.BAD_INPUT, "", said)])
    monkeypatch.setattr(predictions.subprocess, "run", lambda *_, **__: next(results))
    settings = {"data.prompts": "words.jsonl"}
    assert len(predictions.measured_rates("tiny", settings, tmp_path)) == predictions.PROMPTS
    with pytest.raises(ValueError, match=said):
        predictions.measured_rates("tiny", settings, tmp_path)


def test_a_prediction_has_means_over_prompts():
    section = dataclasses.replace(CollectionConfig(), strategy="grpo", group_size=2)
    found = predictions.predicted(section, np.array([0.5, 0.0]))
    assert (found.draws, found.zero_signal) == (2.0, pytest.approx((0.5 + 1.0) / 2))
    assert found.progress > 0.0


def test_the_table():
    """Draws are those of the first ten updates; a method that did not get so far has no rank."""
    run = history(320, 0.4)
    draws, zero = np.where(run.updates <= 10, 4.0, 8.0), np.where(run.updates <= 10, 0.5, 0.1)
    run.metrics.update({"collection/draws_mean": draws, "collection/zero_signal_share": zero})
    found = {
        "grpo-8": predictions.Prediction(8.0, 0.25, 2.0, 30.0),
        "second": predictions.Prediction(4.0, 0.5, 1.0, 60.0),
        "best": predictions.Prediction(2.5, 0.125, 0.5, 90.0),
        "short": predictions.Prediction(1.0, 0.0, 9.0, 9.0),
    }
    outcomes = {"grpo-8": 0.5, "second": 0.7, "best": 0.9, "short": math.nan}
    lines = predictions.table(found, {name: [run, run] for name in found}, outcomes, "avg@16").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:6]]
    assert rows == [
        ["best", "2.50", "4.00", "0.12", "0.50", "0.25", "3.00", "0.900"],
        ["second", "4.00", "4.00", "0.50", "0.50", "0.50", "2.00", "0.700"],
        ["grpo-8", "8.00", "4.00", "0.25", "0.50", "1.00", "1.00", "0.500"],
        ["short", "1.00", "4.00", "0.00", "0.50", "4.50", "0.30", "not reached"],
    ]
    assert lines[-1] == "Rank correlation with the outcome, 3 methods: progress of p -1.00, of log p 1.00."


def test_progress_that_differs_by_rounding_has_equal_ranks():
    """0.1 + 0.2 is 0.30000000000000004: with ranks 2, 1, 3 the correlation would be 0.5."""
    found = {
        "grpo-4": predictions.Prediction(4.0, 0.5, 0.3, 0.3),
        "dapo": predictions.Prediction(4.0, 0.5, 0.1 + 0.2, 0.1 + 0.2),
        "grpo-8": predictions.Prediction(8.0, 0.25, 0.2, 0.2),
    }
    outcomes = {"grpo-4": 0.7, "dapo": 0.6, "grpo-8": 0.5}
    text = predictions.table(found, {name: [history(320, 0.4)] for name in found}, outcomes, "avg@16")
    # Ranks 2.5, 2.5, 1 and 3, 2, 1: 1.5 / sqrt(1.5 * 2).
    assert text.endswith("Rank correlation with the outcome, 3 methods: progress of p 0.87, of log p 0.87.")

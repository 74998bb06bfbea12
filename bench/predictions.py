"""Compares predictions of `simulate` for methods with the results of their runs: a part of `bench.learning`."""

import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import spearmanr

from reinforce_ada_jax import cli
from reinforce_ada_jax.analysis.enumeration import binomial, expectations, progress
from reinforce_ada_jax.analysis.tables import markdown
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.reporting.history import History

SAMPLES = 16  # responses that measure the pass rate of a problem
FIRST = 10  # updates whose draws are compared: later ones have other pass rates
PROMPTS = 512  # of the fitted distribution of pass rates
GRID = 1.0 / (1.0 + np.exp(-np.linspace(-9.0, 9.0, 181)))
EM_STEPS = 2_000
BASE = "grpo-8"  # progress is relative to that of this method, or of the first one


def fitted_rates(histogram: Int[np.ndarray, " K"]) -> Float[np.ndarray, " P"]:
    """Returns pass rates of PROMPTS prompts, with the distribution of the problems' pass rates (maximum likelihood).

    `histogram[k]` is the number of problems with k correct responses of K - 1. The observed shares are not the pass
    rates: of the problems with a pass rate of 0.05, 44 % have no correct response of 16. The distribution is on GRID,
    and is found by expectation maximisation.
    """
    likelihood = binomial(len(histogram) - 1, GRID)
    weights = np.full(len(GRID), 1.0 / len(GRID))
    for _ in range(EM_STEPS):
        weights *= (histogram / (likelihood @ weights)) @ likelihood / histogram.sum()
    ranks = (np.arange(PROMPTS) + 0.5) / PROMPTS
    return GRID[np.searchsorted(np.cumsum(weights) / weights.sum(), ranks)]


def measured_rates(config: str, settings: Mapping[str, Any], folder: pathlib.Path) -> Float[np.ndarray, " P"]:
    """Returns the fitted pass rates of a configuration's model on its problems; `folder` keeps the measurement.

    `settings` are those that differ from the configuration, with `data.prompts`, the source of the problems. `prepare`
    draws only the responses that `folder` lacks, and compares model, problems and settings with those of the others.

    Raises:
      ValueError: `folder` has responses of another model, to other problems or with other settings.
      RuntimeError: `prepare` failed; the message has the end of its output.
    """
    command = [
        sys.executable, "-m", "reinforce_ada_jax.prepare", f"--config={config}", f"--input={settings['data.prompts']}",
        f"--output={folder}/problems.jsonl", f"--samples={SAMPLES}", "--max_pass_rate=1",
        *(f"--config.{key}={value}" for key, value in settings.items()),
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        kind = ValueError if result.returncode == cli.BAD_INPUT else RuntimeError
        raise kind(f"prepare ended with code {result.returncode}:\n{result.stderr[-2000:]}")
    return fitted_rates(np.array(json.loads((folder / "problems.manifest.json").read_text())["histogram"]))


class Prediction(NamedTuple):
    """Means over prompts, and the results of `analysis.enumeration.progress`."""

    draws: float  # responses a prompt
    zero_signal: float  # share of prompts without a gradient
    progress: float  # of the mean of p
    progress_log: float  # of the mean of log p


def predicted(section: CollectionConfig, rates: Float[np.ndarray, " P"]) -> Prediction:
    """Returns the expected results of a method for prompts with these pass rates."""
    found = expectations(section, rates)
    return Prediction(float(found.draws.mean()), float(found.zero_signal.mean()), *progress(found))


def measured(histories: Sequence[History]) -> tuple[float, float]:
    """Returns responses a prompt and the share of prompts without a gradient, in the first updates of the runs."""
    keys = "collection/draws_mean", "collection/zero_signal_share"
    draws, zero = (float(np.mean([run.metrics[key][run.updates <= FIRST] for run in histories])) for key in keys)
    return draws, zero


def table(
    predictions: Mapping[str, Prediction],
    histories: Mapping[str, Sequence[History]],
    outcomes: Mapping[str, float],
    outcome: str,
) -> str:
    """Returns a Markdown table of predictions and outcomes, best outcome first, and their rank correlation.

    Args:
      predictions: of the methods whose draws depend on pass rates alone.
      histories: runs of each method.
      outcomes: the mean result of each method; nan where it has none.
      outcome: what that result is, for the header.
    """
    base = predictions.get(BASE, next(iter(predictions.values())))
    rows = []
    for name in sorted(predictions, key=lambda name: -np.nan_to_num(outcomes[name])):
        each, (draws, zero) = predictions[name], measured(histories[name])
        rows.append([
            name, f"{each.draws:.2f}", f"{draws:.2f}", f"{each.zero_signal:.2f}", f"{zero:.2f}",
            f"{each.progress / base.progress:.2f}", f"{each.progress_log / base.progress_log:.2f}",
            "not reached" if math.isnan(outcomes[name]) else f"{outcomes[name]:.3f}",
        ])  # fmt: skip
    first = f"first {FIRST} updates"
    header = [
        "", "draws a prompt, predicted", first, "zero signal, predicted", first, "progress of p a draw, predicted",
        "of log p", outcome,
    ]  # fmt: skip
    text = markdown(header, rows)
    reached = [name for name in predictions if not math.isnan(outcomes[name])]
    if len(reached) < 3:
        return text
    reached_by = [outcomes[name] for name in reached]
    # Equal progress has equal ranks: that of dapo and of grpo-4 differs by rounding alone, in the 16th digit.
    values = (
        [float(f"{getattr(predictions[name], key):.9g}") for name in reached] for key in ("progress", "progress_log")
    )
    by_p, by_log = (f"{spearmanr(of_key, reached_by)[0]:.2f}" for of_key in values)
    return (
        f"{text}\n\nRank correlation with the outcome, {len(reached)} methods: progress of p {by_p}, of log p {by_log}."
    )

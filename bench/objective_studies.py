"""Studies of objectives: f, f' and the draws that pay f', and which objective each strategy climbs.

bench/studies.py has the other studies, and the list of all.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from reinforce_ada_jax.analysis.enumeration import Expectations, expectations, planned_draws
from reinforce_ada_jax.analysis.inputs import Inputs
from reinforce_ada_jax.analysis.tables import markdown, rate_panel, rate_table, write
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.objectives import Objective
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.config.values import ALLOCATIONS
from reinforce_ada_jax.reporting.panels import Panel

# Objectives of the study `objectives`, with the constants of the first strategy.
SHOWN = ("identity", "log", "power", "pass_at_k")
# What the study `signal` shows of each strategy: title, and the numbers at each pass rate.
COLUMNS = {
    "signal(p)": lambda found: found.signal,
    "expected draws": lambda found: found.draws,
    "variance x draws": lambda found: found.variance_draws,
    "score noise x draws": lambda found: found.score_noise * found.draws,
}
# The strategies of the study `signal` where the user names none: without and with corrections, by objective.
SIGNAL_STRATEGIES = (
    "grpo@4", "grpo@8", "positive", "balance", "balance+stratified", "ngu", "dapo", "positive+exact",
    "balance+log+none", "grpo@8+maxrl", "estimate+log", "balance+log+stratified", "balance+log+exact",
    "positive/4x8+log+exact", "positive/1x32+log+exact", "ngu+log+exact",
    "balance+power+none", "estimate+power", "balance+power+stratified", "positive/4x8+power+exact",
)  # fmt: skip
LIMIT_OF_BALANCE = "balance, many draws"


def objective_of(section: CollectionConfig, name: str | None = None) -> Objective:
    """Returns the objective of a `collection` section, or another one with its constants."""
    return Objective(name or section.objective, section.objective_alpha, section.objective_k)


def label(objective: Objective) -> str:
    """Returns the name of an objective with its constant."""
    constants = {"power": f"power({objective.alpha:g})", "pass_at_k": f"pass_at_k({objective.k})"}
    return constants.get(objective.name, objective.name)


# ---- f, f', and who pays f' ------------------------------------------------------------------------------------------


def allocations(section: CollectionConfig, pass_rates: Float[np.ndarray, " P"]) -> dict[str, Float[np.ndarray, " P"]]:
    """Returns the draws that the strategy `estimate` plans for P prompts under each allocation, at one budget."""
    result = {}
    for allocation in ALLOCATIONS:
        strategy = strategies.build(dataclasses.replace(section, allocation=allocation))
        planned = planned_draws(strategy, pass_rates)
        if planned is None:
            raise ValueError(
                f"--study=objectives shows the draws that a strategy plans, and {section.strategy} plans none: use "
                "estimate+log or estimate+power."
            )
        result[allocation] = planned.astype(np.float64)
    return result


def value(objective: Objective, p: Float[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """Computes f(p); p is above 0 and below 1."""
    if objective.name in ("log", "maxrl"):
        return np.log(p)
    if objective.name == "power":
        return p**objective.alpha
    if objective.name == "pass_at_k":
        return -np.expm1(objective.k * np.log1p(-p))
    return p


def objectives(inputs: Inputs) -> None:
    """Reports f and f' of the objectives, and the draws that each allocation gives a prompt of pass rate p."""
    rates = inputs.pass_rates
    if not ((rates > 0) & (rates < 1)).all():
        raise ValueError("--study=objectives needs pass rates above 0 and below 1, where log p has a slope.")
    first = next(iter(inputs.sections.values()))
    shown = {label(each): each for each in (objective_of(first, name) for name in SHOWN)}
    values = {name: np.asarray(value(each, rates)) for name, each in shown.items()}
    weights = {name: np.asarray(each.weight(rates)) for name, each in shown.items()}
    draws = {entry: allocations(section, rates) for entry, section in inputs.sections.items()}
    print(f"f(p) of E[f(p)]\n{rate_table(rates, values)}\n")
    print(f"f'(p), the weight of a prompt\n{rate_table(rates, weights)}\n")
    panels = [rate_panel("objective f(p)", rates, values), rate_panel("weight f'(p)", rates, weights, "log")]
    for entry, section in inputs.sections.items():
        title = f"{entry}: draws by allocation, {section.samples_per_round} a prompt"
        print(f"{title}\n{rate_table(rates, draws[entry])}\n")
        panels.append(rate_panel(title, rates, draws[entry]))
    write(inputs.output, "objectives", panels, {"pass_rates": rates, "f": values, "weight": weights, "draws": draws})


# ---- what strategies climb -------------------------------------------------------------------------------------------


def balance_limit(pass_rates: Float[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """Computes the signal of the published `balance` for many draws: ((1 - p) / p + p / (1 - p)) / 2.

    Half of the group is correct, and each advantage is r - p: E[A+] = (1 - p) / 2, E[A-] = -p / 2. The signal is the
    derivative of log(p / (1 - p)) / 2 - p.
    """
    return ((1.0 - pass_rates) / pass_rates + pass_rates / (1.0 - pass_rates)) / 2.0


def signal(inputs: Inputs) -> None:
    """Reports the objective that each strategy climbs: signal(p) next to f'(p), draws, and noise."""
    rates = inputs.pass_rates
    if not ((rates > 0) & (rates < 1)).all():
        raise ValueError("--study=signal needs pass rates above 0 and below 1.")
    found = {entry: expectations(section, rates) for entry, section in inputs.sections.items()}
    targets = {entry: objective_of(section) for entry, section in inputs.sections.items()}
    panels: list[Panel] = []
    for title, column in COLUMNS.items():
        rows = _rows(title, rates, {entry: column(each) for entry, each in found.items()}, targets)
        header = [title, *(f"p = {rate:.3g}" for rate in rates)]
        print(markdown(header, [[name, *map(_three_digits, row)] for name, row in rows]) + "\n")
    print(
        "Rows in bold are f' of the objective of the strategies below them. "
        f"{LIMIT_OF_BALANCE!r} is what the published balance climbs: log(p / (1 - p)) / 2 - p."
    )
    for slope in dict.fromkeys(map(_slope, targets.values())):
        of = {entry: each for entry, each in found.items() if _slope(targets[entry]) == slope}
        panels += _panels(slope, rates, of)
    write(inputs.output, "signal", panels, {"exact": found})


def _rows(
    title: str,
    rates: Float[np.ndarray, " P"],
    values: Mapping[str, Float[np.ndarray, " P"]],
    targets: Mapping[str, Objective],
) -> Sequence[tuple[str, Float[np.ndarray, " P"]]]:
    """Returns the named rows of one table: each strategy; in the table of signals also f', for comparison.

    The f' of an objective is above its first strategy, and the limit of `balance` is below this strategy.
    """
    rows: list[tuple[str, Any]] = []
    seen: set[str] = set()
    for entry, row in values.items():
        slope = _slope(targets[entry])
        if title == "signal(p)" and slope not in seen:
            seen.add(slope)
            rows.append((f"**{slope}**", targets[entry].weight(rates)))
        rows.append((f"`{entry}`", row))
        if title == "signal(p)" and entry == "balance" and targets[entry].name == "identity":
            rows.append((LIMIT_OF_BALANCE, balance_limit(rates)))
    return rows


def _slope(objective: Objective) -> str:
    """Returns the name of f' for the table."""
    return f"f' of {label(Objective('log') if objective.name == 'maxrl' else objective)}"


def _three_digits(x: float) -> str:
    if 0 < abs(x) < 1e-3:
        return "< 0.001"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def _panels(slope: str, rates: Float[np.ndarray, " P"], found: Mapping[str, Expectations]) -> list[Panel]:
    relative = {entry: each.relative_signal for entry, each in found.items()}
    noise = {entry: each.variance_draws for entry, each in found.items()}
    return [
        rate_panel(f"signal / {slope}", rates, relative, "log"),
        rate_panel("variance x draws", rates, noise, "log"),
    ]

"""Strategies side by side: their expectations at each pass rate, and the cost of one pass over a prompt set."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from reinforce_ada_jax.analysis.enumeration import Expectations, expectations, progress
from reinforce_ada_jax.analysis.inputs import Inputs
from reinforce_ada_jax.analysis.tables import number, rate_panel, rate_table, table, write
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import CollectionConfig, collection_rules
from reinforce_ada_jax.reporting.panels import Panel

TITLES = {
    "draws": "draws", "draws_std": "+-", "rounds": "rounds", "unmet": "unmet", "zero_signal": "zero signal",
    "zero_variance": "one-sided pool", "kept_correct": "kept correct", "kept_wrong": "kept wrong",
    "pool_mean": "pool mean", "signal": "signal", "relative_signal": "signal / f'", "variance": "variance",
    "variance_draws": "variance x draws",
}  # fmt: skip


def describe(section: CollectionConfig) -> str:
    """Returns one line on the settings that decide what is drawn and kept."""
    most = "any number of" if (most := strategies.build(section).max_draws) is None else f"at most {most}"
    text = f"{section.strategy}: groups of {section.group_size}, {most} draws, objective {section.objective}"
    if section.strategy in ("positive", "balance"):
        k_pos, k_neg = collection_rules.goals(section)
        return f"{text}; rounds of {section.samples_per_round} until {k_pos} correct and {k_neg} wrong"
    if section.strategy == "estimate":
        least, allocation = collection_rules.MIN_DRAWS, collection_rules.allocation(section)
        return f"{text}; {section.samples_per_round} a prompt on average, at least {least}, by {allocation}"
    return text


def _print_expectations(inputs: Inputs, found: Mapping[str, Expectations]) -> None:
    """Prints all columns of one strategy, or several strategies side by side, column by column."""
    titles = dict(TITLES)
    if all(section.objective == "identity" for section in inputs.sections.values()):  # f' is 1
        del titles["relative_signal"]
    columns = {title: {entry: getattr(each, name) for entry, each in found.items()} for name, title in titles.items()}
    if inputs.tokens_per_response:
        columns["tokens"] = {entry: each.draws * inputs.tokens_per_response for entry, each in found.items()}
    if len(found) == 1:
        print(rate_table(inputs.pass_rates, {title: next(iter(column.values())) for title, column in columns.items()}))
        return
    for title, column in columns.items():
        if title not in ("+-", "rounds", "pool mean"):  # details, which only the table of a single strategy has
            print(f"\n{title}\n{rate_table(inputs.pass_rates, column)}")


def _prompt_set(
    sections: Mapping[str, CollectionConfig], rates: Float[np.ndarray, " N"], tokens: int | None
) -> dict[str, Any]:
    """Prints and returns costs and results of one pass over a prompt set, in total and by tenths of the pass rate.

    Progress is relative to that of the first strategy.
    """
    tenth = np.minimum((rates * 10).astype(int), 9)
    counts = np.bincount(tenth, minlength=10)
    header = ["all prompts", "draws", "draws a prompt", "unmet", "zero signal", "rows", "draws a row"]
    header += ["progress of p a draw", "of log p"]
    rows, by_bin = [], {"prompts": [f"{count:,}" for count in counts]}
    first: tuple[float, float] | None = None
    result: dict[str, Any] = {"prompts": len(rates), "bins": counts}
    for entry, section in sections.items():
        found = expectations(section, rates)
        total, kept = float(found.draws.sum()), found.rows * len(rates)
        first, own = first or progress(found), progress(found)
        of_p, of_log = (now / base if base else math.nan for now, base in zip(own, first, strict=True))
        summary: dict[str, Any] = {
            "draws": total, "draws_per_prompt": total / len(rates), "unmet": float(found.unmet.mean()),
            "zero_signal": float(found.zero_signal.mean()), "rows": kept, "draws_per_row": total / max(kept, 1e-12),
            "progress": of_p, "progress_log": of_log,
        }  # fmt: skip
        if tokens:
            summary["tokens"] = total * tokens
        rows.append([entry, *map(number, summary.values())])
        for name in ("draws", "zero_signal"):
            sums = np.bincount(tenth, getattr(found, name), minlength=10)
            mean = np.divide(sums, counts, out=np.full(10, np.nan), where=counts > 0)
            summary[f"{name}_by_bin"] = mean
            by_bin[f"{entry} {TITLES[name]}"] = [number(x) for x in mean]
        result[entry] = summary
    print("\n" + table([*header, "tokens"] if tokens else header, rows))
    edges = [f"{low / 10:.1f}-{(low + 1) / 10:.1f}" for low in range(10)]
    print("\n" + table(["pass rate", *by_bin], list(zip(edges, *by_bin.values(), strict=True))))
    return result


def _panels(found: Mapping[str, Expectations]) -> list[Panel]:
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = {entry: x.kept_correct / (x.kept_correct + x.kept_wrong) for entry, x in found.items()}
    rates = next(iter(found.values())).pass_rates

    def panel(title: str, name: str, y_scale: str = "linear") -> Panel:
        return rate_panel(title, rates, {entry: getattr(x, name) for entry, x in found.items()}, y_scale)

    return [
        panel("expected draws", "draws"),
        panel("probability that the rule is unmet", "unmet"),
        panel("probability of zero signal", "zero_signal"),
        rate_panel("correct share of kept rows", rates, shares),
        panel("variance", "variance", "log"),
        panel("variance x draws", "variance_draws", "log"),
    ]


def compare(inputs: Inputs) -> None:
    """Prints and writes the expectations of the strategies, by pass rate and for the prompt set."""
    found = {entry: expectations(section, inputs.pass_rates) for entry, section in inputs.sections.items()}
    print("\n".join(map(describe, inputs.sections.values())) + "\n")
    _print_expectations(inputs, found)
    settings = {entry: dataclasses.asdict(section) for entry, section in inputs.sections.items()}
    result: dict[str, Any] = {"exact": found, "settings": settings}
    if inputs.prompts is not None:
        result["prompt_set"] = _prompt_set(inputs.sections, inputs.prompts, inputs.tokens_per_response)
    write(inputs.output, "simulate", _panels(found), result)

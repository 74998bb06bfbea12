"""What a collection strategy comes to before any model runs: draws, unmet rules, lost signal, noise; by pass rate.

    python -m reinforce_ada_jax.simulate --strategy=balance --pass_rates=0.01:0.99
    python -m reinforce_ada_jax.simulate --strategy=grpo@8,positive,balance --max_rounds=8 --output=figures
    python -m reinforce_ada_jax.simulate --config=configs/qwen_1p5b.py --histogram=prompts.jsonl
    python -m reinforce_ada_jax.simulate --question=zero_variance
    python -m reinforce_ada_jax.simulate --question=epsilon
    python -m reinforce_ada_jax.simulate --question=learning --strategy=grpo@4,grpo@16,balance,estimate+log

The table is exact (analysis/enumeration.py defines its columns). A strategy is written NAME, NAME@n for groups of n,
and NAME+log for another objective; NAME may be file.py:function. For `estimate` the pass rates given are the prompts
that share the budget. A --histogram is a JSONL file whose lines have a "pass_rate", as `prepare` writes them.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict, config_flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.analysis import enumeration, study_reports
from reinforce_ada_jax.analysis.enumeration import COLUMNS, Expectations
from reinforce_ada_jax.analysis.tables import Panel, by_rate, number, rate_scale, table, write
from reinforce_ada_jax.config import CollectionConfig, collection_rules, defaults, resolve

POINTS = 11
# Which strategies a question is answered for when none is named; else the configuration's.
ASKED = {
    "epsilon": ("balance", "estimate"),
    "learning": ("grpo@4", "grpo@8", "grpo@16", "positive", "balance", "estimate+log", "dapo", "ngu"),
}
TITLES = {
    "draws": "draws", "draws_std": "+-", "rounds": "rounds", "unmet": "unmet", "zero_signal": "zero signal",
    "zero_variance": "one-sided pool", "kept_correct": "kept correct", "kept_wrong": "kept wrong",
    "pool_mean": "pool mean", "signal": "signal", "variance": "variance", "variance_draws": "variance x draws",
}  # fmt: skip


def get_config() -> ConfigDict:
    """Returns the configuration where --config names no file: every setting at its default."""
    return defaults()


def define_flags(values: flags.FlagValues = flags.FLAGS) -> flags.FlagValues:
    """--config, and a flag for each setting of its `collection` section that decides what is drawn and kept."""
    config_flags.DEFINE_config_file("config", __file__, "The configuration to begin with.", flag_values=values)
    texts = {
        "pass_rates": ("0.01:0.99", f"LOW:HIGH, evenly spaced in logits, LOW:HIGH:COUNT ({POINTS}), or a comma list."),
        "histogram": (None, "A JSONL file of prompts with pass rates."),
        "output": (None, "A folder for figure and numbers."),
    }
    for name, (default, text) in texts.items():
        flags.DEFINE_string(name, default, text, flag_values=values)
    flags.DEFINE_list("strategy", [], "One or several: NAME, NAME@n, NAME+objective.", flag_values=values)
    flags.DEFINE_enum("question", None, [*QUESTIONS], "In place of the table.", flag_values=values)
    flags.DEFINE_integer("tokens_per_response", None, "Mean length of a response.", 1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Seed of --question=learning.", 0, flag_values=values)
    for name in SETTINGS[int]:
        flags.DEFINE_integer(name, None, "As in the configuration.", flag_values=values)
    for name in SETTINGS[float]:
        flags.DEFINE_float(name, None, "As in the configuration.", flag_values=values)
    for name in SETTINGS[str]:
        flags.DEFINE_string(name, None, "As in the configuration.", flag_values=values)
    flags.DEFINE_bool("normalize_by_std", None, "As in the configuration.", flag_values=values)
    return values


QUESTIONS = {
    "zero_variance": study_reports.zero_variance,
    "epsilon": study_reports.epsilon,
    "learning": study_reports.learning,
}


# ---- what the user gave ----------------------------------------------------------------------------------------------

SETTINGS = {
    int: ("group_size", "samples_per_round", "max_rounds", "k_pos", "k_neg", "min_draws", "max_draws"),
    float: ("budget", "retry_probability", "objective_alpha", "objective_epsilon"),
    str: ("objective", "baseline", "keep", "allocation"),
    bool: ("normalize_by_std",),
}


def collection_settings(options: flags.FlagValues) -> CollectionConfig:
    """Returns the `collection` section of --config with the values of the flags that were given."""
    names = [name for names in SETTINGS.values() for name in names if options[name].value is not None]
    return dataclasses.replace(resolve(options.config).collection, **{name: options[name].value for name in names})


def strategy_settings(entry: str, section: CollectionConfig) -> CollectionConfig:
    """`section` with the strategy, group size and objective of an entry "NAME@n+objective", the last two optional.

    Raises:
      ValueError: a rule is broken (config/collection_rules.py).
    """
    name, size, objective = re.fullmatch(r"(.*?)(?:@(\d+))?(?:\+(\w+))?", entry.strip()).groups()
    section = dataclasses.replace(
        section,
        strategy=name,
        group_size=int(size) if size else section.group_size,
        objective=objective or section.objective,
    )
    collection_rules.check_collection(section)
    if not section.objective_alpha > 0:
        raise ValueError(f"collection.objective_alpha is {section.objective_alpha}; it must be above 0.")
    return section


def parse_pass_rates(text: str) -> np.ndarray:
    """Pass rates of "LOW:HIGH", "LOW:HIGH:COUNT" or "P,P,...".

    Raises:
      ValueError: it is neither, or a number is out of range.
    """
    try:
        numbers = [float(part) for part in re.split("[:,]", text)]
    except ValueError:
        numbers = []
    if numbers and ":" not in text:
        return enumeration.check_pass_rates(numbers)
    low, high, count = [*numbers, POINTS][:3] if len(numbers) in (2, 3) and "," not in text else (0, 0, 0)
    if not (0 < low < high < 1 and count >= 2 and count == int(count)):
        raise ValueError(
            f"--pass_rates is {text!r}; it must be LOW:HIGH or LOW:HIGH:COUNT with 0 < LOW < HIGH < 1 and at least 2 "
            "points, or a comma list of numbers in [0, 1], such as 0,0.1,0.5."
        )
    ends = np.log([low, high]) - np.log1p([-low, -high])
    return 1.0 / (1.0 + np.exp(-np.linspace(*ends, int(count))))


def read_histogram(file: pathlib.Path) -> tuple[np.ndarray, list[int]]:
    """(pass rates of a prompt file's lines, numbers of the lines that have none).

    Raises:
      ValueError: there is no such file, a line is no JSON object or its pass rate no number in [0, 1], or none has one.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}: --histogram names a JSONL file of prompts with pass_rate.")
    rates, lacking = [], []
    for place, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {place}: not valid JSON ({error}). One object a line.") from error
        rate = row.get("pass_rate") if isinstance(row, dict) else None
        if rate is None:
            lacking.append(place)
        elif isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise ValueError(f"{file}, line {place}: pass_rate is {rate!r}; it must be a number in [0, 1].")
        else:
            rates.append(float(rate))
    if not rates:
        raise ValueError(
            f"none of the {len(lacking)} lines of {file} has a pass_rate: `prepare` adds it, from responses of a model."
        )
    return np.array(rates), lacking


# ---- the table -------------------------------------------------------------------------------------------------------


def describe(section: CollectionConfig) -> str:
    """One line on the settings that decide."""
    most = "any number of" if (most := collection_rules.max_draws(section)) is None else f"at most {most}"
    text = f"{section.strategy}: groups of {section.group_size}, {most} draws, objective {section.objective}"
    if section.strategy in ("positive", "balance"):
        k_pos, k_neg = collection_rules.goals(section)
        return f"{text}; rounds of {section.samples_per_round} until {k_pos} correct and {k_neg} wrong"
    if section.strategy == "estimate":
        budget = collection_rules.draw_budget(section)
        return f"{text}; {budget:g} a prompt on average, at least {section.min_draws}, by {section.allocation}"
    return text


def print_table(pass_rates: np.ndarray, exact: Mapping[str, Expectations], tokens: int | None) -> None:
    """All columns of one strategy, or the strategies side by side, quantity by quantity."""
    columns = {name: {entry: getattr(found, name) for entry, found in exact.items()} for name in COLUMNS}
    titles = dict(TITLES)
    if tokens:
        columns["tokens"] = {entry: found.draws * tokens for entry, found in exact.items()}
        titles["tokens"] = "tokens"
    if len(exact) == 1:
        print(by_rate(pass_rates, {titles[name]: next(iter(column.values())) for name, column in columns.items()}))
        return
    for name, column in columns.items():
        if name not in ("draws_std", "rounds", "pool_mean"):
            print(f"\n{titles[name]}\n{by_rate(pass_rates, column)}")


def prompt_set(rates: np.ndarray, sections: Mapping[str, CollectionConfig], tokens: int | None) -> dict[str, Any]:
    """What one pass over a prompt set costs and brings, all prompts together and by tenths of the pass rate."""
    tenth = np.minimum((rates * 10).astype(int), 9)
    counts = np.bincount(tenth, minlength=10)
    header = ["all prompts", "draws", "draws a prompt", "unmet", "zero signal", "rows", "draws a row"]
    rows, by_bin, result = [], {"prompts": [f"{count:,}" for count in counts]}, {"prompts": len(rates), "bins": counts}
    for entry, section in sections.items():
        found = enumeration.expectations(section, rates)
        total, kept = float(found.draws.sum()), found.rows * len(rates)
        summary = {
            "draws": total, "draws_per_prompt": total / len(rates), "unmet": float(found.unmet.mean()),
            "zero_signal": float(found.zero_signal.mean()), "rows": kept, "draws_per_row": total / max(kept, 1e-12),
        }  # fmt: skip
        if tokens:
            summary["tokens"] = total * tokens
        rows.append([entry, *map(number, summary.values())])
        for name, title in (("draws", "draws"), ("zero_signal", "zero signal")):
            sums = np.bincount(tenth, getattr(found, name), minlength=10)
            summary[f"{name}_by_bin"] = mean = np.divide(sums, counts, out=np.full(10, np.nan), where=counts > 0)
            by_bin[f"{entry} {title}"] = [number(x) for x in mean]
        result[entry] = summary
    print("\n" + table([*header, "tokens"] if tokens else header, rows))
    edges = [f"{low / 10:.1f}-{(low + 1) / 10:.1f}" for low in range(10)]
    print("\n" + table(["pass rate", *by_bin], list(zip(edges, *by_bin.values(), strict=True))))
    return result


def compare(
    options: flags.FlagValues,
    sections: Mapping[str, CollectionConfig],
    pass_rates: np.ndarray,
    prompts: np.ndarray | None,
) -> None:
    """The table of the strategies, by pass rate and for the prompt set."""
    tokens = options.tokens_per_response
    exact = {entry: enumeration.expectations(part, pass_rates) for entry, part in sections.items()}
    print("\n".join(describe(part) for part in sections.values()) + "\n")
    print_table(pass_rates, exact, tokens)
    result: dict[str, Any] = {"exact": exact, "settings": {e: dataclasses.asdict(part) for e, part in sections.items()}}
    if prompts is not None:
        result["prompt_set"] = prompt_set(prompts, sections, tokens)
    scale = rate_scale(pass_rates)

    def panel(title: str, values: Mapping[str, np.ndarray], y_scale: str = "linear") -> Panel:
        lines = {entry: (pass_rates, y) for entry, y in values.items()}
        return Panel(title, "pass rate", lines, x_scale=scale, y_scale=y_scale)

    with np.errstate(invalid="ignore", divide="ignore"):
        shares = {entry: x.kept_correct / (x.kept_correct + x.kept_wrong) for entry, x in exact.items()}
    panels = [
        panel("expected draws", {entry: x.draws for entry, x in exact.items()}),
        panel("chance that the rule is unmet", {entry: x.unmet for entry, x in exact.items()}),
        panel("chance of zero signal", {entry: x.zero_signal for entry, x in exact.items()}),
        panel("correct share of kept rows", shares),
        panel("variance", {entry: x.variance for entry, x in exact.items()}, "log"),
        panel("variance x draws", {entry: x.variance_draws for entry, x in exact.items()}, "log"),
    ]
    write(options.output, "simulate", panels, result)


def main(options: flags.FlagValues) -> None:
    """Answers what the flags ask."""
    with cli.user_input():
        section = collection_settings(options)
        pass_rates, prompts = parse_pass_rates(options.pass_rates), None
        entries = list(dict.fromkeys(options.strategy)) or ASKED.get(options.question, [section.strategy])
        sections = {entry: strategy_settings(entry, section) for entry in entries}
        if options.histogram:
            prompts, lacking = read_histogram(pathlib.Path(options.histogram))
    if options.histogram:
        print(f"{options.histogram}: {len(prompts):,} prompts of mean pass rate {prompts.mean():.3f}")
        if lacking:
            shown = ", ".join(map(str, lacking[:5])) + (", ..." if len(lacking) > 5 else "")
            print(f"{len(lacking):,} lines without a pass_rate are left out: {shown}")
        print()
    with cli.user_input():
        if options.question:
            QUESTIONS[options.question](sections, pass_rates, prompts, options.output, options.seed)
        else:
            compare(options, sections, pass_rates, prompts)


if __name__ == "__main__":
    define_flags()
    cli.run(lambda: main(flags.FLAGS))

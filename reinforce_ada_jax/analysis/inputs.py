"""Inputs of an analysis: strategies by their short names, pass rates, and the pass rates of a prompt set."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from reinforce_ada_jax.analysis import enumeration
from reinforce_ada_jax.config import CollectionConfig, collection_rules
from reinforce_ada_jax.config.values import CORRECTIONS

NUM_RATES, MOST_RATES = 11, 10_000
# After n draws a prompt is in one of n + 1 states: 8,192 draws of a prompt take 26 seconds.
MOST_DRAWS = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    sections: Mapping[str, CollectionConfig]  # `collection` section of each strategy, by its name
    pass_rates: Float[np.ndarray, " P"]  # pass rates to analyse
    prompts: Float[np.ndarray, " N"] | None = None  # pass rates of a prompt set, where there is one
    output: str | None = None  # folder for the figure and its numbers; None: no files
    tokens_per_response: int | None = None  # mean length of a response, where it is known


def strategy_settings(entry: str, section: CollectionConfig) -> CollectionConfig:
    """Returns `section` with the settings that an entry "NAME@n/MxN+WORD+WORD" names; all but NAME are optional.

    n is the group size, M and N are draws of a round and most rounds; a WORD is a correction or an objective. Raises
    ValueError where a rule is broken (config/collection_rules.py), or a prompt may get more than MOST_DRAWS.
    """
    match = re.fullmatch(r"(?s)(.*?)(?:@(\d+))?(?:/(\d+)x(\d+))?((?:\+\w+)*)", entry.strip())
    assert match is not None  # the first part matches any text
    name, *sizes, words = match.groups()
    if ":" not in name and re.search("[@/]", name):
        raise ValueError(
            f"the strategy {entry!r} does not have the form NAME@n/MxN+WORD, such as balance@4/8x4+log, in which all "
            "but NAME may be left out."
        )
    changes: dict[str, str | int] = {"strategy": name}
    for key, size in zip(("group_size", "samples_per_round", "max_rounds"), sizes, strict=True):
        changes |= {key: int(size)} if size else {}
    for word in words.split("+")[1:]:
        changes["correction" if word in CORRECTIONS else "objective"] = word
    section = dataclasses.replace(section, **changes)
    collection_rules.check_collection(section)
    if not section.objective_alpha > 0:
        raise ValueError(f"collection.objective_alpha is {section.objective_alpha}; it must be above 0.")
    most = collection_rules.max_draws(section)
    if most is not None and most > MOST_DRAWS:
        raise ValueError(
            f"{entry} draws up to {most:,} responses of a prompt; the exact table follows at most {MOST_DRAWS:,}. "
            "Lower --group_size, or --samples_per_round and --max_rounds."
        )
    return section


def parse_pass_rates(text: str) -> Float[np.ndarray, " P"]:
    """Returns the pass rates of "LOW:HIGH[:COUNT]" (even in logits) or "P,P,..."; ValueError for other texts."""
    try:
        numbers = [float(part) for part in re.split("[:,]", text)]
    except ValueError:
        numbers = []
    if numbers and ":" not in text:
        return enumeration.check_pass_rates(numbers)
    low, high, count = [*numbers, NUM_RATES][:3] if len(numbers) in (2, 3) and "," not in text else (0, 0, 0)
    if not (0 < low < high < 1 and 2 <= count <= MOST_RATES and count == int(count)):
        raise ValueError(
            f"--pass_rates is {text!r}; it must be LOW:HIGH or LOW:HIGH:COUNT with 0 < LOW < HIGH < 1 and 2 to "
            f"{MOST_RATES:,} points, or a comma list of numbers in [0, 1], such as 0,0.1,0.5."
        )
    logits = np.linspace(np.log(low) - np.log1p(-low), np.log(high) - np.log1p(-high), int(count))
    return 1.0 / (1.0 + np.exp(-logits))


def read_histogram(file: pathlib.Path) -> tuple[Float[np.ndarray, " N"], list[int]]:
    """Returns (pass rates of the lines of a prompt file, numbers of the lines that have none).

    Raises ValueError where the file is missing or damaged, a pass rate is not in [0, 1], or no line has one.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}: --histogram names a JSONL file of prompts with pass_rate.")
    rates, lacking = [], []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number}: not valid JSON ({error}). One object a line.") from error
        rate = row.get("pass_rate") if isinstance(row, dict) else None
        if rate is None:
            lacking.append(number)
        elif isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise ValueError(f"{file}, line {number}: pass_rate is {rate!r}; it must be a number in [0, 1].")
        else:
            rates.append(float(rate))
    if not rates:
        raise ValueError(
            f"none of the {len(lacking)} lines of {file} has a pass_rate: `prepare` adds it, from responses of a model."
        )
    return np.array(rates), lacking

"""Allowed values of a single setting: choices, ranges and forms of text. Rules between settings are in rules.py."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
ALLOCATIONS = ("hybrid", "sampling", "variance")
CORRECTIONS = ("none", "stratified", "exact")
LOSSES = ("ppo", "cispo", "sapo")
DTYPES = ("float32", "bfloat16")
DECODE_DTYPES = ("model", "int8")
OBJECTIVES = ("identity", "log", "power", "maxrl", "pass_at_k")
OVERLAPS = ("none", "finish", "in_flight")
REWARDS = (
    "cipher", "math", "minerva", "gsm8k", "reference", "reference_evaluation", "reference_minerva", "code", "judge",
)  # fmt: skip
# The data sets that the paper evaluates (hf:weqweasdas/NAME) are graded by its rules, files by ours.
DEFAULT_GRADERS = (
    "minerva_math=minerva",
    "gsm8k_test=gsm8k",
    "weqweasdas_math500=reference_evaluation",
    "weqweasdas_minerva_math=reference_minerva",
    "weqweasdas_olympiadbench=reference_evaluation",
    "weqweasdas_aime_hmmt_brumo_cmimc_amc23=reference_evaluation",
)
SELECTIONS = ("shuffled", "proportional")
STRATEGIES = ("grpo", "positive", "balance", "estimate", "dapo", "ngu")
# The projections of a layer, by their names in Hugging Face folders and in PEFT; "all-linear" is all of them.
ALL_LINEAR = "all-linear"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# A project may have the characters that its tracker allows: for trackio it is the name of a file.
TRACKER = re.compile(r"(tensorboard)|(wandb):[^/\\#?%:,]{1,128}|(trackio):[\w-]{1,64}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The values that a setting may have."""

    text: str  # completes "it must ..."
    holds: Callable[[Any], bool]  # returns True for an allowed value

    def check(self, key: str, value: Any) -> None:
        """Raises ValueError unless `value` is allowed for the setting `key`."""
        if not self.holds(value):
            shown = repr(value) if isinstance(value, str) else value
            raise ValueError(f"{key} is {shown}; it must {self.text}.")


def check_values(section: Any, prefix: str = "") -> None:
    """Raises ValueError for the first setting of a section, or a whole configuration, whose value is not allowed."""
    for field in dataclasses.fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            check_values(value, f"{key}.")
        elif field.metadata["allowed"] is not None:
            field.metadata["allowed"].check(key, value)


def one_of(names: Sequence[str]) -> Allowed:
    """Allows the given names."""
    return Allowed(f"be one of {', '.join(names)}", lambda value: value in names)


def empty_or_one_of(names: Sequence[str]) -> Allowed:
    """Allows the given names, and "": then the program chooses."""
    return Allowed(f"be one of {', '.join(names)}, or empty", lambda value: value in ("", *names))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def one_of_or_yours(names: Sequence[str], yours: str) -> Allowed:
    """Allows the given names, and a function or a class in a file of the user's."""
    text = f"be one of {', '.join(names)}, or name a {yours}"
    return Allowed(text, lambda value: ":" in value or value in names)


STRATEGY = one_of_or_yours(STRATEGIES, "function of yours as file.py:function")
LOSS = one_of_or_yours(LOSSES, "function of yours as file.py:function")
SELECTION = one_of_or_yours(SELECTIONS, "class of yours as file.py:Class")
CONTROL_VARIATE = Allowed(
    "be none, noise, or a number as text, such as '0.03'",
    lambda value: value in ("none", "noise") or _is_number(value),
)


def whole(least: int, most: int, *, optional: bool = False, why: str = "") -> Allowed:
    """Allows numbers from `least` to `most`, and None if `optional`; `why` explains the lower bound."""
    bound = f"be at least {least}{why} and" if least else "not be negative, and it must be"
    text = f"{bound} at most {most:,}" + "; None chooses" * optional
    return Allowed(text, lambda value: optional if value is None else least <= value <= most)


# Every whole number has a largest value: above what a run can use, and below sizes of arrays that overflow in 32 bits.
AT_LEAST_1, NOT_NEGATIVE = whole(1, 10**9), whole(0, 10**9)
TOKENS, TOKENS_OR_0 = whole(1, 2**20), whole(0, 2**20)
DRAWS, DRAWS_OR_NONE = whole(1, 4_096), whole(0, 4_096**2, optional=True)  # of a round; also rounds
GROUP = whole(2, 4_096, why=" (a group of one has no baseline to differ from)")
MANY, MANY_OR_0 = whole(1, 65_536), whole(0, 65_536)  # devices, slots, responses to a problem
DRAFTS_OR_NONE = whole(0, 64, optional=True)
PAGES, RANK, WORKERS = whole(0, 2**24), whole(0, 4_096), whole(0, 1_024)
STALENESS = whole(0, 16)
WINDOW = whole(1, 4_096)  # tokens of a dispatch, or of a page
FINITE = Allowed("be finite", math.isfinite)
NOT_NEGATIVE_FINITE = Allowed("not be negative, and it must be finite", lambda value: 0 <= value < math.inf)
POSITIVE = Allowed("be above 0 and finite", lambda value: 0 < value < math.inf)
SECONDS = Allowed("be above 0 and finite, at most 1,000,000", lambda value: 0 < value <= 1_000_000)
# The sampler raises smaller temperatures above 0 to this one. Logits / temperature are rounded to 24 bits: at 1e-6
# log-probabilities were off by 0.4, and at 1e-10 exponentials of the error were infinite, and token 0 was drawn.
LEAST_TEMPERATURE = 1e-3
TRAINING_TEMPERATURE = Allowed(  # the learner scores at the temperature of the draws
    f"be at least {LEAST_TEMPERATURE} and finite", lambda value: LEAST_TEMPERATURE <= value < math.inf
)
RATE = Allowed("be above 0 and finite, at most 100", lambda value: 0 < value <= 100)
POSITIVE_OR_NONE = Allowed("be above 0, or None", lambda value: value is None or value > 0)
BELOW_1 = Allowed("be at least 0 and below 1", lambda value: 0 <= value < 1)
PROBABILITY = Allowed("be in [0, 1]", lambda value: 0 <= value <= 1)
SHARE = Allowed("be above 0 and at most 1", lambda value: 0 < value <= 1)
ABOVE_1 = Allowed("be above 1: it bounds the loss at |A|", lambda value: value > 1)
TEMPERATURE = Allowed("be at least 0 (0: the most probable token) and finite", lambda value: 0 <= value < math.inf)
SEED = Allowed(
    "not be negative, and it must be below 2**31: devices count in 32 bits", lambda value: 0 <= value < 2**31
)


def _are_functions(text: str) -> bool:
    entries = [re.fullmatch(r".+\.py:[^\W\d]\w*(?:=(.+))?", entry.strip()) for entry in text.split(",")]
    return not text or all(entry and _is_number(entry[1] or "1") for entry in entries)


USER_FUNCTIONS = Allowed(
    "have the form file.py:function or file.py:function=WEIGHT (several with commas between them, so no file's name "
    "has one), or be empty",
    _are_functions,
)
ENVIRONMENT = Allowed(
    "have the form file.py:Class or verifiers:NAME, or be empty",
    lambda value: not value or bool(re.fullmatch(r".+\.py:[^\W\d]\w*|verifiers:[\w./@-]+", value)),
)
FINITE_NUMBERS = Allowed("be finite numbers", lambda entries: all(map(math.isfinite, entries)))


def _are_trackers(text: str) -> bool:
    found = [TRACKER.fullmatch(entry.strip()) for entry in text.split(",")] if text else []
    names = {match.lastindex for match in found if match}
    return len(names) == len(found)


TRACKERS = Allowed(
    "name each of tensorboard, wandb:PROJECT and trackio:PROJECT at most once, with commas between them; a project of "
    "wandb has at most 128 characters and none of / \\ # ? % :, one of trackio at most 64 letters, digits, - and _",
    _are_trackers,
)
TARGETS = Allowed(
    f"name one or more of {', '.join((ALL_LINEAR, *PROJECTIONS))}",
    lambda value: bool(value) and all(target in (ALL_LINEAR, *PROJECTIONS) for target in value),
)


def _is_grader(entry: str) -> bool:
    benchmark, separator, kind = entry.rpartition("=")
    return bool(benchmark and separator) and kind in REWARDS


GRADERS = Allowed(
    f"have entries of the form BENCHMARK=KIND, with KIND one of {', '.join(REWARDS)}",
    lambda entries: all(_is_grader(entry) for entry in entries),
)

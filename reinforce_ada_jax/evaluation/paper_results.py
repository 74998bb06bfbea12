"""Results of the paper, for comparison with a user's results: avg@32 at temperature 1 and 4,096 tokens.

Source: arXiv 2510.04996. Its AIME-like set has 230 problems, and the weighted average is over all 1,677. The paper's
results are shown next to those of a run only if the run has the paper's settings (`differences`), and for a benchmark
only if it has the paper's grader (`GRADERS`).
"""

import dataclasses
import operator
import pathlib
from collections.abc import Mapping

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config, collection_rules
from reinforce_ada_jax.training import components as components_lib

# Number of problems of each set, by the name of its benchmark file.
SETS = {"math500": 500, "minerva_math": 272, "olympiadbench": 675, "aime_like": 230}
WEIGHTED = "weighted average"
# Number of problems in the average of each column.
PROBLEMS = SETS | {WEIGHTED: sum(SETS.values())}
SAMPLES, TEMPERATURE, MAX_RESPONSE_TOKENS = 32, 1.0, 4096
# Kind of reward that has the paper's rules of grading, for each set.
GRADERS = dict.fromkeys(SETS, "reference_evaluation") | {"minerva_math": "reference_minerva"}
# The data sets that were evaluated: hf:weqweasdas/NAME.
_PUBLISHER = "weqweasdas_"
_AIME_LIKE = "aime_hmmt_brumo_cmimc_amc23"

EASY, HARD = "paper", "paper, hard prompts"
# Prompt sets of the main table and of the table of hard prompts. For two models the main table is of hard ones.
PROMPT_SETS = {
    "Qwen2.5-Math-1.5B": {
        "hf:RLHFlow/reinforce_ada_simple_prompt_1-5b": EASY,
        "hf:RLHFlow/reinforce_ada_hard_prompt_1-5b": HARD,
    },
    "Qwen2.5-Math-7B": {"hf:RLHFlow/reinforce_ada_easy_prompt": EASY, "hf:RLHFlow/reinforce_ada_hard_prompt": HARD},
    "Llama-3.2-3B-Instruct": {"hf:RLHFlow/reinforce_ada_hard_prompt_llama": EASY},
    "Qwen3-4B-Instruct-2507": {"hf:RLHFlow/reinforce_ada_hard_prompt": EASY},
}

# (model's folder, strategy, group size): MATH-500, Minerva Math, OlympiadBench, AIME-like, weighted, in percent.
AVERAGES = {
    ("Qwen2.5-Math-1.5B", "grpo", 4): (74.2, 34.4, 38.4, 16.2, 45.3),
    ("Qwen2.5-Math-1.5B", "grpo", 8): (75.3, 34.3, 39.2, 17.3, 46.1),
    ("Qwen2.5-Math-1.5B", "grpo", 16): (76.9, 35.1, 40.4, 17.9, 47.3),
    ("Qwen2.5-Math-1.5B", "dapo", 4): (75.2, 34.7, 38.5, 17.5, 45.9),
    ("Qwen2.5-Math-1.5B", "positive", 4): (75.8, 35.7, 38.6, 16.5, 46.1),
    ("Qwen2.5-Math-1.5B", "balance", 4): (77.4, 36.5, 40.5, 17.5, 47.6),
    ("Qwen2.5-Math-1.5B", "estimate", 4): (76.1, 34.8, 39.1, 18.5, 46.5),
    ("Qwen2.5-Math-7B", "grpo", 4): (82.2, 44.7, 45.6, 23.2, 53.3),
    ("Qwen2.5-Math-7B", "positive", 4): (82.7, 45.1, 46.7, 23.7, 54.2),
    ("Qwen2.5-Math-7B", "balance", 4): (84.0, 45.2, 47.1, 23.7, 54.6),
    ("Qwen2.5-Math-7B", "estimate", 4): (83.6, 42.1, 46.6, 24.1, 53.7),
    ("Llama-3.2-3B-Instruct", "grpo", 4): (51.7, 20.5, 20.4, 7.2, 27.9),
    ("Llama-3.2-3B-Instruct", "positive", 4): (52.6, 22.2, 21.0, 7.5, 28.8),
    ("Llama-3.2-3B-Instruct", "balance", 4): (53.2, 22.4, 21.2, 8.0, 29.1),
    ("Qwen3-4B-Instruct-2507", "grpo", 4): (90.4, 51.2, 64.9, 38.5, 66.5),
    ("Qwen3-4B-Instruct-2507", "positive", 4): (91.6, 50.4, 66.3, 38.8, 67.4),
    ("Qwen3-4B-Instruct-2507", "balance", 4): (91.7, 53.0, 65.7, 38.8, 67.6),
}
ON_HARD_PROMPTS = {
    ("Qwen2.5-Math-1.5B", "grpo", 4): (71.0, 31.8, 34.3, 13.8, 41.9),
    ("Qwen2.5-Math-1.5B", "positive", 4): (73.9, 33.1, 36.4, 16.4, 44.6),
    ("Qwen2.5-Math-1.5B", "balance", 4): (74.7, 33.7, 38.7, 17.6, 45.5),
    ("Qwen2.5-Math-7B", "grpo", 4): (80.7, 42.8, 42.9, 21.8, 51.3),
    ("Qwen2.5-Math-7B", "positive", 4): (82.4, 43.1, 45.0, 22.2, 52.8),
    ("Qwen2.5-Math-7B", "balance", 4): (83.1, 43.4, 46.4, 24.9, 53.9),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The paper's run that a run may be compared with."""

    name: str = ""  # `EASY` or `HARD`
    # In [0, 1], by the names in `PROBLEMS`; empty if the paper has no such run, or a setting differs.
    averages: Mapping[str, float] = dataclasses.field(default_factory=dict)
    differences: tuple[str, ...] = ()  # from the settings of the paper's run of the same model and strategy


# Allowed values of the settings that decide the objective, by strategy. "" and None are the default of the strategy.
_ADAPTIVE: dict[str, tuple[object, ...]] = {
    "collection.samples_per_round": (8,),
    "collection.max_rounds": (4,),
    "collection.keep": ("", "group"),
    "collection.baseline": ("", "pool"),
    "collection.normalize_by_std": (False,),
}
_BY_STRATEGY: dict[str, dict[str, tuple[object, ...]]] = {
    "grpo": {"collection.baseline": ("", "group")},
    "dapo": {"collection.baseline": ("", "group")},
    "positive": _ADAPTIVE | {"collection.k_pos": (None, 1), "collection.k_neg": (None, 0)},
    "balance": _ADAPTIVE | {"collection.k_pos": (None, 2), "collection.k_neg": (None, 2)},
    "estimate": _ADAPTIVE
    | {
        "collection.objective": ("log",),
        "collection.keep": ("", "pool"),
        "collection.allocation": ("", "hybrid"),
        "collection.max_draws": (None, 32),
        "estimator.kind": ("ema",),
    },
}
_ALL: dict[str, tuple[object, ...]] = {
    "collection.objective": ("identity",),
    "reward.kind": ("reference",),
    "reward.path": ("",),
    "reward.overlong_tokens": (0,),
    "data.template": ("qwen_math",),
    "lora.rank": (0,),
}


def differences(config: Config, model: str) -> tuple[str, ...]:
    """Returns the settings in which a run of a model differs from the paper's run of the same strategy."""
    expected = _ALL | _BY_STRATEGY[config.collection.strategy] | {"data.prompts": tuple(PROMPT_SETS[model])}
    found: dict[str, object] = {key: operator.attrgetter(key)(config) for key in expected}
    found["data.prompts"] = config.data.prompts.removesuffix(":train")
    expected["collection.correction"] = ("none",)
    found["collection.correction"] = collection_rules.correction(config.collection)
    return tuple(
        # The last allowed value is the explicit one; a value before it means the default.
        f"{key} is {found[key]!r}, the paper's {allowed[-1]!r}"
        for key, allowed in expected.items()
        if found[key] not in allowed
    )


def comparison(config: Config) -> Comparison:
    """Returns the paper's run that a run with this configuration may be compared with; without averages if none."""
    model, collection = components_lib.local_folder(config.model.path).name.partition("@")[0], config.collection
    key = (model, collection.strategy, collection.group_size)
    if key not in AVERAGES:
        return Comparison()
    if different := differences(config, model):
        return Comparison(differences=different)
    name = PROMPT_SETS[model][config.data.prompts.removesuffix(":train")]
    percents = {EASY: AVERAGES, HARD: ON_HARD_PROMPTS}[name].get(key)
    if percents is None:
        return Comparison()
    return Comparison(name, {column: percent / 100 for column, percent in zip(PROBLEMS, percents, strict=True)})


def comparison_of_run(workdir: pathlib.Path | None) -> Comparison:
    """Returns the `comparison` of the configuration in a run's config.json, if there is one."""
    config = None if workdir is None else config_lib.read(workdir)
    return Comparison() if config is None else comparison(config)


def column(benchmark: str) -> str | None:
    """Returns the column for a benchmark named after its file or the paper's data set; None if there is none."""
    name = benchmark.removeprefix(_PUBLISHER)
    return "aime_like" if name.startswith(("aime_like", _AIME_LIKE)) else name if name in SETS else None

"""What a configuration's values may be, one key at a time; config.py has the rules between keys."""

import datetime
import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from reinforce_ada_jax.config.collection_rules import check_choice

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
DTYPES = ("float32", "bfloat16")
REWARDS = ("cipher", "math", "minerva", "gsm8k")
# "all-linear" is all the others: the projections of a layer, by their names in Hugging Face folders and in PEFT.
ALL_LINEAR = "all-linear"
LORA_TARGETS = (ALL_LINEAR, "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Which the name of a project of Weights & Biases may not have, and its most characters.
WANDB_FORBIDDEN, WANDB_LONGEST = "/\\#?%:", 128

CHOICES = {
    "model.compute_dtype": DTYPES,
    "model.parameter_dtype": DTYPES,
    "data.template": ("plain", "qwen_math", "chat"),
    "reward.kind": (*REWARDS, "function"),
    "estimator.kind": ("ema", "value"),
    "sampling.attention": ("auto", "jnp", "pallas_tpu", "pallas_gpu"),
    "learning.attention": ("auto", "jnp", "splash"),
    "learning.remat": ("auto", "full", "dots"),
    "learning.first_moment_dtype": ("auto", *DTYPES),
    "learning.aggregation": AGGREGATIONS,
    "learning.ratio": ("token", "sequence"),
    "learning.kl_kind": ("k1", "k2", "k3"),
    "learning.non_finite": ("stop", "skip"),
}
# By what is said of a value outside: it must ...
RANGES: dict[str, tuple[Callable[[Any], bool], Sequence[str]]] = {
    "be at least 1": (
        lambda value: value >= 1,
        """
            data.max_prompt_tokens checkpoint.keep estimator.steps collection.group_size
            collection.samples_per_round collection.max_rounds collection.min_draws collection.prompts_per_iteration
            learning.prompts_per_update learning.micro_batches learning.responses_per_row
            sampling.max_response_tokens sampling.slots sampling.window sampling.page_size sampling.prefill_rows
            evaluation.samples evaluation.max_response_tokens mesh.data mesh.fsdp mesh.tensor
        """.split(),
    ),
    "not be negative": (
        lambda value: value >= 0,
        """
            seed iterations reward.workers reward.overlong_tokens reward.overlong_penalty
            collection.max_extra_batches collection.max_age collection.objective_epsilon sampling.pages
            sampling.open_prompts lora.rank learning.kl_coefficient learning.warmup_updates learning.max_skipped
            learning.weight_decay checkpoint.every checkpoint.keep_best checkpoint.keep_every evaluation.every
            evaluation.top_k logging.sampled_prompts
        """.split(),
    ),
    "be below 2**31: the devices count in 32 bits": (lambda value: value < 2**31, ("seed",)),
    "be at least 0 and below 1": (
        lambda value: 0 <= value < 1,
        ("learning.b1", "learning.b2", "learning.clip_low", "estimator.decay"),
    ),
    "be above 0 and finite": (
        lambda value: 0 < value < math.inf,
        """
            sampling.temperature reward.time_limit_s collection.objective_alpha lora.alpha learning.learning_rate
            learning.clip_norm learning.epsilon learning.clip_high estimator.prior_correct estimator.prior_wrong
            estimator.learning_rate
        """.split(),
    ),
    "be finite": (
        math.isfinite,
        """
            reward.positive_threshold reward.overlong_penalty learning.entropy_coefficient learning.kl_coefficient
            learning.weight_decay
        """.split(),
    ),
    "be above 0 and at most 1": (lambda value: 0 < value <= 1, ("evaluation.top_p",)),
    "be above 0, or None": (lambda value: value is None or value > 0, ("learning.truncated_is_cap",)),
    "be above 1: it bounds the loss at |A|": (lambda value: value > 1, ("learning.dual_clip",)),
    "be at least 0 (the most probable token) and finite": (
        lambda value: 0 <= value < math.inf,
        ("evaluation.temperature",),
    ),
    "be 0 or 1": (lambda value: value in (0, 1), ("collection.overlap_iterations",)),
}


def check_values(config: Any) -> None:
    """Raises ValueError for the first value that is none of those which its key may have."""
    for key, allowed in CHOICES.items():
        check_choice(key, _value(config, key), allowed)
    for what, (holds, keys) in RANGES.items():
        for key in keys:
            if not holds(_value(config, key)):
                raise ValueError(f"{key} is {_value(config, key)}; it must {what}.")
    _check_names(config)


def _value(config: Any, key: str) -> Any:
    return functools.reduce(operator.getitem, key.split("."), config)


def _check_names(config: Any) -> None:
    """Values that are written in a form of their own."""
    if config.reward.path and not re.fullmatch(r".+\.py:[^\W\d]\w*", config.reward.path):
        raise ValueError(f"reward.path is {config.reward.path!r}; it must have the form file.py:function.")
    for entry in config.evaluation.graders:
        benchmark, separator, kind = entry.rpartition("=")
        if not benchmark or not separator or kind not in REWARDS:
            raise ValueError(
                f"evaluation.graders has {entry!r}; it must be BENCHMARK=KIND, with a kind out of {', '.join(REWARDS)}."
            )
    try:
        datetime.date.fromisoformat(config.data.date)
    except ValueError as error:
        raise ValueError(f"data.date is {config.data.date!r}; it must be a day as 2024-07-26 ({error}).") from error
    project = config.logging.wandb
    if len(project) > WANDB_LONGEST or set(project) & set(WANDB_FORBIDDEN):
        raise ValueError(
            f"logging.wandb is {project!r}; a project's name has at most {WANDB_LONGEST} characters and none of "
            f"{' '.join(WANDB_FORBIDDEN)}."
        )
    for target in config.lora.targets:
        check_choice("lora.targets", target, LORA_TARGETS)
    if not config.lora.targets:
        raise ValueError(f"lora.targets is empty; name some of {', '.join(LORA_TARGETS)}.")

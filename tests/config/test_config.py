"""Settings: their defaults, their allowed values, and the rules between them, each with its message."""

import ast
import dataclasses
import json
import math
import os
import pathlib
import re

import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import Config, collection_rules, resume, rules, values
from tests import running

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(running.CONFIGS.glob("*.py"))


def valid() -> Config:
    return changed()


def changed(**changes) -> Config:
    """A valid configuration with some keys set: changed(**{"seed": 1, "mesh.data": 2})."""
    return config_lib.replaced(Config(), {"model.path": "models/some", "data.prompts": "some.jsonl"} | changes)


# ---- validate -----------------------------------------------------------------------------------------------------


def test_the_defaults_are_valid_once_model_and_prompts_are_named():
    config_lib.check(valid())
    for key in ("model.path", "data.prompts"):
        with pytest.raises(ValueError, match=f"{key} is empty.*--config.{key}="):
            config_lib.check(changed(**{key: ""}))


AT_LEAST_ONE = """
    data.max_prompt_tokens evaluation.samples evaluation.max_response_tokens checkpoint.keep
    collection.samples_per_round collection.max_rounds collection.prompts_per_iteration sampling.max_response_tokens
    sampling.window sampling.page_size learning.prompts_per_update
    learning.responses_per_row mesh.data mesh.fsdp mesh.tensor
""".split()
AT_LEAST_ZERO = """
    seed iterations reward.workers sampling.pages learning.warmup_updates checkpoint.every
    evaluation.every learning.micro_batches logging.sampled_prompts sampling.slots
""".split()
POSITIVE = """
    learning.learning_rate learning.clip_norm learning.epsilon learning.clip_high
    reward.time_limit_s
""".split()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *[(key, 0, "it must be at least 1") for key in AT_LEAST_ONE],
        *[(key, -1, "it must not be negative") for key in AT_LEAST_ZERO],
        *[
            (key, value, "it must be above 0 and finite")
            for key in POSITIVE
            for value in (0.0, -0.5, math.nan, math.inf)
        ],
        *[("sampling.temperature", value, "it must be at least 0.001 and finite") for value in (0.0, 5e-4, math.nan)],
        ("learning.weight_decay", -0.1, "it must not be negative"),
        ("checkpoint.minutes", -0.5, "it must not be negative"),
        ("learning.entropy_coefficient", math.nan, "it must be finite"),
        ("reward.positive_threshold", math.inf, "it must be finite"),
        ("seed", 2**31, r"it must be below 2\*\*31"),
        ("learning.b1", 1.0, "below 1"),
        ("learning.b2", -0.1, "at least 0"),
        ("learning.clip_low", 1.5, "below 1"),
        ("learning.dual_clip", 1.0, "above 1"),
        ("learning.truncated_is_cap", 0.0, "above 0, or None"),
        ("collection.strategy", "best", "it must be one of grpo, positive, balance"),
        ("learning.aggregation", "mean", "it must be one of token-mean, seq-mean-token-sum, seq-mean-token-sum-norm"),
        ("model.compute_dtype", "float16", "it must be one of auto, float32, bfloat16"),
        ("learning.kl_coefficient", math.inf, "it must be finite"),
        ("reward.kind", "best", "it must be one of cipher, math, minerva, gsm8k, reference, .*, judge"),
        ("reward.path", "mine.py", "must have the form file.py:function"),
        ("reward.path", "mine:grade", "must have the form file.py:function"),
        ("reward.path", "mine.py:grade,yours", "must have the form file.py:function"),
        *[("reward.path", f"mine.py:f,yours.py:g={each}", "=WEIGHT") for each in ("", "half", "nan", "0.5=0.5")],
        ("judge.range", (0.0, math.nan), "must be finite numbers"),
        ("reward.completions", "messages", "must be one of auto, text, chat"),
        ("data.template", "chatml", "it must be one of plain, qwen_math"),
        ("collection.group_size", 1, r"at least 2 \(a group of one has no baseline"),
        ("collection.overlap", "ahead", "it must be one of none, finish, in_flight"),
        ("learning.attention", "pallas_tpu", "one of auto, jnp, blocks, splash, cudnn"),
        ("sampling.attention", "flash", "it must be one of auto, jnp, pallas_tpu, pallas_gpu"),
        *[
            ("logging.trackers", text, "name each of tensorboard, wandb:PROJECT and trackio:PROJECT at most once")
            for text in f"""
                wandb wandb: wandb:team/project wandb:{"p" * 129} trackio:a/b tensorboard:x mlflow tensorboard,
                wandb:a,wandb:b
            """.split()
        ],
        ("evaluation.temperature", -1.0, "at least 0"),
        ("evaluation.temperature", math.nan, "at least 0"),
        ("evaluation.top_k", -1, "it must not be negative"),
        ("evaluation.top_p", 0.0, "above 0 and at most 1"),
        ("evaluation.top_p", 1.1, "above 0 and at most 1"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_it_must_be(key, value, message):
    shown = repr(value) if isinstance(value, str) else value
    with pytest.raises(ValueError, match=f"{re.escape(f'{key} is {shown}')}[;:] .*{message}"):
        config_lib.check(changed(**{key: value}))


WHOLE_NUMBERS = [key for key, field in config_lib.settings() if str(field.type) in (str(int), "int | None")]


@pytest.mark.parametrize("key", WHOLE_NUMBERS)
def test_every_whole_number_has_a_largest_value(key):
    # 10^12 is beyond 32 bits, in which devices count; loops over that many draws or devices would not end.
    with pytest.raises(ValueError, match=rf"{key}\b.* {10**12}\b.*(at most|below|0 or 1)"):
        config_lib.check(changed(**{key: 10**12}))


@pytest.mark.parametrize("key", ["learning.learning_rate", "reward.time_limit_s"])
def test_a_number_that_float32_or_a_clock_cannot_hold(key):
    with pytest.raises(ValueError, match=rf"{key} is 1e\+300; it must be above 0 and finite, at most 1"):
        config_lib.check(changed(**{key: 1e300}))


def test_every_number_has_a_range():
    elsewhere = {"collection.k_pos", "collection.k_neg"}
    numbers = {
        key for key, field in config_lib.settings()
        if str(field.type).partition(" ")[0] in ("int", "float", "<class") and field.type is not bool
        and not isinstance(field.default, str | tuple) and field.metadata["allowed"] is None
    }  # fmt: skip
    bools = {f"collection.{name}" for name in ("normalize_by_std", "barrier", "deterministic", "speculative")}
    bools |= {"sampling.check_invariants"}
    assert numbers - bools == elsewhere


def test_each_setting_has_a_text_and_each_rule_a_setting():
    named = {field.metadata["rule"] for _, field in config_lib.settings()} - {""}
    assert named == {rule.__name__ for rule in (*rules.FIRST, *rules.RULES, *collection_rules.RULES)}
    for key, field in config_lib.settings():
        text = field.metadata["text"]
        assert text.endswith("."), key


def test_there_are_no_more_settings_than_a_reader_takes_in():
    """A new setting takes the place of one that nobody changes."""
    assert sum(1 for _ in config_lib.settings()) <= 125


@pytest.mark.parametrize("cut", ["top_k", "top_p"])
def test_training_samples_the_policy_as_it_is(cut):
    config = config_lib.SamplingConfig()
    assert (config.top_k, config.top_p) == (0, 1.0)
    with pytest.raises(ValueError, match=f"sampling.{cut}. .*whole distribution.* evaluation.{cut} is for evaluations"):
        config_lib.resolve({"sampling": {cut: 1}})


def test_a_barrier_needs_pages_for_every_prompt_and_forbids_overlap():
    barrier = {"collection.barrier": True}
    with pytest.raises(ValueError, match="choose one of them"):
        config_lib.check(changed(**barrier, **{"collection.overlap": "finish"}))
    # 512 prompts of 16 pages, 48 of one with its response, and the one that is never handed out.
    with pytest.raises(ValueError, match="pages is 8240: with collection.barrier all 512 prompts .* are 8241 of 64"):
        config_lib.check(changed(**barrier, **{"sampling.pages": 8240}))
    config_lib.check(changed(**barrier, **{"sampling.pages": 8241}))
    config_lib.check(changed(**barrier))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0),  # 4,096 tokens are drawn again
        ({"sampling.max_response_tokens": 4097}, 4096),
        ({"collection.overlap": "in_flight"}, 4095),
        ({"sampling.max_response_tokens": 65_536, "environment.path": "mine.py"}, 0),
        # Pages of 64 tokens: 1,024 of the prompt and 8,191 of the response, beside 16 and 128.
        ({"sampling.max_response_tokens": 8192, "sampling.pages": 144 + 144 + 1}, 8191),
        ({"sampling.max_response_tokens": 8192, "sampling.pages": 144 + 144}, 0),
    ],
)
def test_long_responses_go_on_after_the_run_was_told_to_end(changes, expected):
    config = changed(**{"sampling.max_response_tokens": 4096, "data.max_prompt_tokens": 1024} | changes)
    assert rules.begun_tokens(config) == expected
    if changes.get("sampling.pages"):
        config_lib.check(config)  # fewer pages are no mistake


@pytest.mark.parametrize("strategy", ["positive", "balance"])
def test_a_group_must_fit_into_one_round(strategy):
    sizes = {"collection.strategy": strategy, "collection.group_size": 16, "collection.samples_per_round": 8}
    with pytest.raises(
        ValueError, match="group_size is 16, collection.samples_per_round is 8.*Lower group_size, raise"
    ):
        config_lib.check(changed(**sizes))
    # grpo draws group_size responses and ignores samples_per_round.
    config_lib.check(changed(**sizes | {"collection.strategy": "grpo"}))


# Settings of the collection section that can't be meant, and what is said of them.
COLLECTION_MISTAKES = [
    ({"correction": "some"}, "collection.correction is 'some'; it must be one of none, stratified, exact"),
    ({"strategy": "ngu", "objective": "log", "correction": "none"}, "w\\(p\\) counts twice.*exact or stratified"),
    ({"strategy": "positive", "keep": "pool", "objective": "power", "correction": "none"}, "counts twice"),
    (
        {"strategy": "estimate", "objective": "log", "correction": "exact"},
        "derived for grpo, positive, balance and ngu",
    ),
    ({"strategy": "dapo", "correction": "stratified"}, "'stratified' with the strategy dapo"),
    ({"correction": "exact", "baseline": "pool"}, "leave collection.baseline empty"),
    ({"correction": "stratified", "normalize_by_std": True}, "collection.normalize_by_std off"),
    ({"objective": "log", "k_pos": 0, "k_neg": 1}, "k_pos is 0 with the correction exact"),
    ({"strategy": "estimate", "objective": "pass_at_k"}, "'pass_at_k' with the strategy estimate.* Use the"),
    ({"objective": "pass_at_k", "objective_k": 33}, "objective_k is 33, but a prompt gets at most 32 draws"),
    ({"strategy": "ngu", "objective": "log", "retry_probability": 0.0}, "which divides by it"),
    ({"objective": "maxrl"}, "'maxrl' with the strategy balance.*the objective log with the correction exact"),
    (
        {"strategy": "grpo", "objective": "maxrl", "normalize_by_std": True},
        "without keep, baseline, normalize_by_std and correction",
    ),
    ({"control_variate": "0.03"}, "it belongs to the correction exact"),
    *[({"control_variate": text}, f"is '{text}'; it must be none, noise, or a number") for text in ("constant", "nan")],
    ({"strategy": "best"}, "'best'; it must be one of grpo, positive, balance, .*, or name a function"),
    ({"keep": "all"}, "collection.keep is 'all'; it must be one of group, pool"),
    ({"baseline": "mean"}, "collection.baseline is 'mean'; it must be one of group, pool, leave_one_out, anchored"),
    ({"objective": "exp"}, "collection.objective is 'exp'; it must be one of identity, log, power"),
    ({"allocation": "even"}, "collection.allocation is 'even'; it must be one of hybrid, sampling, variance"),
    ({"group_size": 1}, r"group_size is 1; it must be at least 2 \(a group of one has no baseline"),
    # 20 + 13 of at most 4 * 8 = 32 draws; 20 + 12 can be met.
    (
        {"k_pos": 20, "k_neg": 13},
        r"20 \+ 13, but a prompt gets at most 32 draws \(4 rounds of 8\).*or raise .*max_rounds",
    ),
    ({"k_pos": -1}, "k_pos is -1 and collection.k_neg 2: neither may be negative"),
    ({"k_pos": 0, "k_neg": 0}, "together they must be at least 1"),
    ({"strategy": "positive", "k_neg": 1}, "k_neg is 1 with the strategy positive.*use balance"),
    ({"strategy": "positive", "k_pos": 33}, r"33 \+ 0, but a prompt gets at most 32"),
    (
        {"group_size": 16},
        "group_size is 16, collection.samples_per_round is 8: balance may stop .*Lower group_size, raise",
    ),
    ({"strategy": "estimate", "samples_per_round": 1}, "samples_per_round is 1, .* at least 2 and at most 4. Use at"),
    ({"strategy": "estimate", "max_draws": 6}, "samples_per_round is 8, the mean draws of a prompt .* at most 6"),
    # w is 1 (or alpha) for every prompt: the mean of 8 is a fixed number of draws, and not what was asked for.
    *[
        ({"strategy": "estimate", "allocation": allocation} | objective, "every prompt would get 8 draws.*Use .* grpo")
        for allocation in ("hybrid", "sampling")
        for objective in ({}, {"objective": "power", "objective_alpha": 1.0})
    ],
    ({"unmet": "skip"}, "collection.unmet is 'skip'; it must be one of keep, drop, replace"),
    *[
        ({"strategy": strategy, "unmet": "replace"}, f"unmet is 'replace' with the strategy {strategy}, but only pos")
        for strategy in ("grpo", "estimate", "dapo", "ngu")
    ],
    ({"strategy": "estimate", "keep": "group"}, "keep is 'group' with the strategy estimate, which"),
    *[
        (
            {"strategy": strategy, "objective": "log", "objective_epsilon": 0.0},
            "objective_epsilon is 0.0.*set it above 0",
        )
        for strategy in values.STRATEGIES
    ],
    ({"objective": "power", "objective_epsilon": 0.0}, "objective_epsilon is 0.0 with the objective power.*above 0"),
    ({"objective_epsilon": 1.0}, "objective_epsilon is 1.0; it must be at least 0 and below 1"),
    # An observed pass rate of 1 would get w sqrt(p (1 - p)) = 0 draws, and advantages of 1 / 0.
    ({"strategy": "estimate", "allocation": "variance", "objective_epsilon": 0.0}, "allocation variance.*above 0"),
    # w(0) = 2 * 0: nothing is drawn and nothing weighs, 0 / 0.
    (
        {"strategy": "estimate", "objective": "power", "objective_alpha": 2.0, "objective_epsilon": 0.0},
        "the objective power.*above 0",
    ),
    ({"strategy": "ngu", "retry_probability": 1.0, "max_draws": 0}, "retried forever.*Lower the probability, or set a"),
    ({"strategy": "ngu", "retry_probability": 1.1}, r"retry_probability is 1.1; it must be in \[0, 1\]"),
    ({"strategy": "ngu", "max_draws": 3}, "max_draws is 3, less than one round of 4"),
    *[
        ({"strategy": strategy, "keep": keep}, f"keep is '{keep}' with the strategy {strategy}.*leave it empty")
        for strategy in ("dapo", "ngu")
        for keep in ("group", "pool")
    ],
]


@pytest.mark.parametrize(("settings", "message"), COLLECTION_MISTAKES)
def test_collection_settings_that_cannot_be_meant(settings, message):
    config = changed(**{f"collection.{key}": value for key, value in settings.items()})
    with pytest.raises(ValueError, match=message):
        config_lib.check(config)
    # Another trainer that builds a strategy gets the same error.
    with pytest.raises(ValueError, match=message):
        strategies.build(config.collection)


@pytest.mark.parametrize(
    "settings",
    [
        {"k_pos": 20, "k_neg": 12},
        {"k_pos": 0, "k_neg": 1},
        {"group_size": 8, "keep": "pool"},
        {"strategy": "estimate", "samples_per_round": 2},
        {"strategy": "estimate", "samples_per_round": 32, "max_rounds": 1},
        {"strategy": "estimate", "keep": "pool"},
        {"strategy": "estimate", "objective": "power", "allocation": "hybrid"},
        {"strategy": "estimate", "allocation": "variance"},
        {"strategy": "positive", "unmet": "drop"},
        {"unmet": "replace", "keep": "pool", "overlap": "finish"},
        {"strategy": "dapo", "overlap": "finish"},
        {"objective": "power", "objective_alpha": 2.0, "objective_epsilon": 0.0},
        {"strategy": "ngu", "retry_probability": 1.0},
        {"strategy": "ngu", "retry_probability": 0.99, "max_draws": 0},
        {"strategy": "ngu", "overlap": "finish"},
    ],
)
def test_collection_settings_at_their_limits(settings):
    config = changed(**{f"collection.{key}": value for key, value in settings.items()})
    config_lib.check(config)
    strategies.build(config.collection)


def test_no_overlap_where_the_next_prompts_draws_are_unknown():
    overlap = {"collection.strategy": "estimate", "collection.overlap": "finish"}
    with pytest.raises(ValueError, match="before it is known how many draws estimate will allot .*set it to 'none'"):
        config_lib.check(changed(**overlap))


def test_no_overlap_where_the_last_verdicts_choose_the_prompts():
    chosen = {"collection.selection": "mine.py:Mine"}
    config_lib.check(changed(**chosen))
    with pytest.raises(ValueError, match="selection is 'mine.py:Mine', which chooses .* after the last .*shuffled"):
        config_lib.check(changed(**chosen, **{"collection.overlap": "finish"}))


def test_where_prompts_can_be_drawn_with_probabilities():
    proportional = {"collection.selection": "proportional"}
    for settings in ({"correction": "stratified"}, {"objective": "log"}, {"strategy": "grpo", "objective": "maxrl"}):
        config_lib.check(changed(**proportional, **{f"collection.{key}": value for key, value in settings.items()}))
    with pytest.raises(ValueError, match="without a correction: the update is a mean over rows.* exact or stratified"):
        config_lib.check(changed(**proportional, **{"collection.correction": "none"}))
    with pytest.raises(ValueError, match="chooses prompts after the last"):
        config_lib.check(changed(**proportional, **{"collection.correction": "exact", "collection.overlap": "finish"}))


def test_exact_takes_no_negative_rewards_as_correct():
    # It multiplies weights by rewards, so a correct response with the reward -0.1 would become less probable.
    settings = {"reward.positive_threshold": -0.5, "collection.objective": "log"}
    for correction in ("", "exact"):
        with pytest.raises(ValueError, match="positive_threshold is -0.5 with the correction exact.* at least 0"):
            config_lib.check(changed(**settings, **{"collection.correction": correction}))
    for correction, threshold in (("stratified", -0.5), ("none", -0.5), ("exact", 0.0)):
        allowed = settings | {"collection.correction": correction, "reward.positive_threshold": threshold}
        config_lib.check(changed(**allowed))


def test_responses_drawn_ahead_are_young_enough_to_be_trained_on():
    # 512 / 64 = 8 updates between the weights that draw and those that learn; default: at most 4.
    sizes = {"collection.strategy": "ngu", "learning.prompts_per_update": 64}
    config_lib.check(changed(**sizes))
    split = {"mesh.sampler": 1}
    for ahead, cause in ((split, "mesh.sampler"), ({"collection.overlap": "finish"}, "collection.overlap")):
        with pytest.raises(ValueError, match=f"max_age is 4, but .*{cause}.* 8 updates old.* at least 8"):
            config_lib.check(changed(**sizes, **ahead))
        config_lib.check(changed(**sizes, **ahead, **{"collection.max_age": 8}))
        config_lib.check(changed(**sizes | {"collection.strategy": "grpo"}, **ahead))
    config_lib.check(changed(**sizes, **split, **{"collection.max_staleness": 0}))


def test_a_users_strategy_is_checked_when_it_is_built():
    # 8 updates between the weights that draw and those that learn.
    mine = {"collection.strategy": "mine.py:f", "learning.prompts_per_update": 64, "estimator.kind": "value"}
    split = changed(**mine, **{"mesh.sampler": 1})
    config_lib.check_strategy(split, max_age=8, estimates=False)
    with pytest.raises(ValueError, match="max_age of mine.py:f is 7, but with mesh.sampler .* at least 8"):
        config_lib.check_strategy(split, max_age=7, estimates=False)
    with pytest.raises(ValueError, match="estimator.kind is 'value', .* use 'ema'"):
        config_lib.check_strategy(split, max_age=None, estimates=True)
    config_lib.check_strategy(changed(**mine), max_age=7, estimates=True)
    by_length = changed(**mine, **{"learning.aggregation": "seq-mean-token-mean"})
    config_lib.check_strategy(by_length, max_age=None, estimates=False)
    with pytest.raises(ValueError, match="with the coefficients of mine.py:f: it divides the weight of a response"):
        config_lib.check_strategy(by_length, max_age=None, estimates=False, weighs=True)


def test_a_users_strategy_is_looked_for_when_it_is_built():
    config = changed(**{"collection.strategy": "absent.py:mine"})
    config_lib.check(config)  # touches no file
    with pytest.raises(ValueError, match=r"there is no file 'absent\.py'"):
        strategies.build(config.collection)


def test_iterations_consist_of_whole_updates_and_updates_of_whole_micro_batches():
    sizes = {"collection.prompts_per_iteration": 100, "learning.prompts_per_update": 32}
    with pytest.raises(ValueError, match="prompts_per_iteration is 100, .* which is 32. Use 96 or 128"):
        config_lib.check(changed(**sizes))
    # 128 prompts of 4 rows are 512 rows; 3 micro-batches on 2 * 4 row shards are 24 at a time: 504 or 528.
    sizes = {"learning.micro_batches": 3, "mesh.data": 2, "mesh.fsdp": 4}
    with pytest.raises(
        ValueError, match="is 512, .*micro_batches .* mesh.data .* mesh.fsdp, which is 24. Use 504 or 528"
    ):
        config_lib.check(changed(**sizes))
    config_lib.check(changed(**sizes | {"learning.micro_batches": 4}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.sampler": 3, "mesh.tensor": 2}, "mesh.sampler is 3, and must be a multiple of mesh.tensor, which is 2"),
        ({"mesh.sampler": 1, "collection.overlap": "finish"}, "Set collection.overlap to 'none'"),
        ({"mesh.sampler": 1, "collection.max_staleness": 2}, "draw one iteration ahead. Set max_staleness to 1 or 0"),
        ({"collection.overlap": "in_flight", "collection.max_staleness": 0}, "Set max_staleness to 1, or overlap to"),
        (
            {"mesh.sampler": 1, "collection.strategy": "estimate", "estimator.kind": "value"}
            | {"collection.objective": "log"},
            "estimator.kind is 'value', .* use 'ema'",
        ),
        (
            {"mesh.sampler": 1, "collection.strategy": "positive", "estimator.kind": "value"}
            | {"collection.objective": "log", "collection.control_variate": "noise"},
            "estimator.kind is 'value', .* use 'ema'",
        ),
        ({"collection.max_staleness": 17}, "must be at most 16"),
    ],
)
def test_devices_that_cannot_be_split(changes, message):
    with pytest.raises(ValueError, match=message):
        config_lib.check(changed(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.max_prompt_tokens": 1022},
            "is 3070, and must be a multiple of mesh.context, which is 4. Use 3068 or 3072",
        ),
        ({"learning.attention": "jnp"}, "mesh.context is 4, and learning.attention is 'jnp', .* to 'auto', or"),
        ({"learning.attention": "cudnn"}, "mesh.context is 4, and learning.attention is 'cudnn'"),
        ({"model.numerics": "invariant"}, "mesh.context is 4: it is made for one device. Set mesh.context to 1"),
    ],
)
def test_rows_that_cannot_be_cut(changes, message):
    split = changed(**{"mesh.context": 4, "learning.attention": "splash"})
    assert config_lib.check(split).mesh.learner == 4
    with pytest.raises(ValueError, match=message):
        config_lib.check(changed(**{"mesh.context": 4} | changes))
    config_lib.check(changed(**changes))


def test_trajectories_of_the_next_iteration_are_refused():
    turns = {"environment.path": "mine.py:Game", "data.template": "chat"}
    with pytest.raises(ValueError, match="overlap is 'finish': .* without their environments. Set it to 'none'"):
        config_lib.check(changed(**turns, **{"collection.overlap": "finish"}))
    config_lib.check(changed(**turns))


def test_devices_are_split():
    """A run draws ahead where devices of its own draw and staleness is allowed."""
    split = changed(**{"mesh.sampler": 4, "mesh.fsdp": 2, "mesh.tensor": 2})
    assert config_lib.check(split).draws_ahead
    assert not changed(**{"mesh.sampler": 1, "collection.max_staleness": 0}).draws_ahead
    assert not changed().draws_ahead  # there is nothing to draw ahead on


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.compute_dtype": "bfloat16"}, "compute_dtype is 'bfloat16': .* Set model.compute_dtype to 'float32'"),
        ({"sampling.kv_dtype": "int8"}, "sampling.kv_dtype is 'int8': the learner has no .* to 'model'"),
        ({"sampling.weight_dtype": "int8"}, "sampling.weight_dtype is 'int8': the learner has no .* to 'model'"),
        ({"sampling.attention": "jnp"}, "sampling.attention is 'jnp': .* Set sampling.attention to 'auto'"),
        ({"mesh.tensor": 2}, "mesh.tensor is 2: it is made for one device. Set mesh.tensor to 1"),
        ({"mesh.data": 2}, "mesh.data is 2: .* model.numerics to 'fast'"),
        ({"mesh.sampler": 2}, "mesh.sampler is 2: .* Set mesh.sampler to 1"),
    ],
)
def test_invariant_numerics_that_are_not_possible(changes, message):
    possible = {"model.numerics": "invariant", "model.compute_dtype": "float32"}
    config_lib.check(changed(**possible, **{"mesh.sampler": 1}))
    with pytest.raises(ValueError, match=f"model.numerics is 'invariant', and .*{message}"):
        config_lib.check(changed(**possible | changes))
    config_lib.check(changed(**changes | {"model.numerics": "fast"}))


def test_the_cache_holds_at_least_one_response():
    # A prompt of 1,024 tokens fills 16 pages of 64, the prompt and 2,048 tokens fill 48, one is never handed out: 65.
    config_lib.check(changed(**{"sampling.pages": 65}))
    with pytest.raises(ValueError, match="sampling.pages is 64: .*1024 tokens .* 2048 needs 65 pages of 64 .* or 0"):
        config_lib.check(changed(**{"sampling.pages": 64}))
    # A response that goes on is a prompt of up to 1,024 + 2,047 tokens: 48 + 48 + 1.
    with pytest.raises(ValueError, match="sampling.pages is 96: .* 2048 needs 97 pages"):
        config_lib.check(changed(**{"sampling.pages": 96, "collection.overlap": "in_flight"}))
    # An evaluation with up to 4,096 tokens needs 16 + 80 + 1.
    longer = {"sampling.pages": 65, "evaluation.benchmarks": ("some.jsonl",)}
    with pytest.raises(ValueError, match="4096 needs 97 pages"):
        config_lib.check(changed(**longer))


# ---- the files in configs/ ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_files_in_configs_are_valid_and_say_how_to_run_them(file):
    module = running.load(file)
    config_lib.validate(module.get_config())
    command = rf"python -m reinforce_ada_jax\.(train|sft) --config=configs/{re.escape(file.name)} --workdir="
    for part in (command, "Hardware: ", "Source of the numbers: "):
        assert re.search(part, module.__doc__)


def test_a_misspelt_key_in_a_file_names_the_nearest():
    with pytest.raises((AttributeError, KeyError), match='Did you mean "strategy" instead of "stratgy"'):
        config_lib.defaults().collection.stratgy = "grpo"


# ---- every key is read --------------------------------------------------------------------------------------------


def reads() -> set[str]:
    """Names of all attributes that the package reads, the room of the configuration left out."""
    found = set()
    for file in (ROOT / "reinforce_ada_jax").rglob("*.py"):
        if file.parent.name == "config":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)  # getattr(config.data, key)
    return found


def test_every_setting_is_read_by_something():
    found = reads() | {"max_staleness"}  # by properties of the configuration
    assert [key for key, _ in config_lib.settings() if key.split(".")[-1] not in found] == []
    assert "planted" not in found


# ---- saved and compared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_json_and_back(file):
    """A configuration comes back from its JSON text as it was."""
    config = config_lib.replaced(config_lib.validate(running.load(file).get_config()), {"learning.truncated_is_cap": 2})
    again = config_lib.from_json(config_lib.to_json(config))
    assert again == config
    assert again.evaluation.benchmarks == config.evaluation.benchmarks
    assert type(again.evaluation.benchmarks) is tuple
    assert config_lib.from_json(config_lib.to_json(valid())) == valid()


def test_a_setting_without_a_bound_is_written_as_strict_json(tmp_path):
    unbounded = config_lib.replaced(valid(), {"learning.dual_clip": math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    saved = json.loads(config_lib.to_json(unbounded), parse_constant=refuse)
    assert saved["learning"]["dual_clip"] == "inf" and config_lib.resolve(saved) == unbounded
    (tmp_path / "config.json").write_text(config_lib.to_json(unbounded))
    config_lib.check_workdir(unbounded, tmp_path)
    with pytest.raises(ValueError, match="dual_clip: inf -> 10.0"):
        config_lib.check_workdir(valid(), tmp_path)


def test_several_texts_have_commas_between_them():
    untouched = [
        "--config.reward.path=a.py:f,b.py:g",
        "--config.evaluation.graders=('a=math', 'b=gsm8k')",
        "--workdir=a,b",
    ]
    given = ["--config.lora.targets=q_proj, v_proj,", "--config.evaluation.benchmarks=a.jsonl,cipher:heldout"]
    expected = [
        "--config.lora.targets=('q_proj', 'v_proj')", "--config.evaluation.benchmarks=('a.jsonl', 'cipher:heldout')",
    ]  # fmt: skip
    assert config_lib.with_tuples(given + untouched) == expected + untouched
    # One empty text would be a benchmark without a name.
    assert config_lib.with_tuples(["--config.evaluation.benchmarks="]) == ["--config.evaluation.benchmarks=()"]


def test_differences_name_exactly_what_differs():
    saved = json.loads(config_lib.to_json(valid()))
    assert resume.differences(valid(), saved) == {}
    now = changed(**{"seed": 3, "learning.truncated_is_cap": 2.0, "collection.strategy": "grpo"})
    assert list(resume.differences(now, saved).values()) == [
        "collection.strategy: balance -> grpo",
        "learning.truncated_is_cap: None -> 2.0",
        "seed: 0 -> 3",
    ]
    del saved["seed"]
    saved["reward"]["scale"] = 2
    assert list(resume.differences(valid(), saved).values()) == ["reward.scale: 2 -> absent", "seed: absent -> 0"]


def test_an_unknown_key_is_an_error():
    for tree in ({"sed": 1}, {"reward": {"scale": 2}}):
        with pytest.raises(ValueError, match="unknown configuration key (sed|reward.scale)"):
            config_lib.from_json(json.dumps(tree))
    with pytest.raises(ValueError, match=r"unknown configuration key reward\.scale"):
        config_lib.replaced(Config(), {"reward.scale": 2})
    with pytest.raises(ValueError, match="unknown configuration key rewards"):
        config_lib.replaced(Config(), {"rewards.workers": 2})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"evaluation": {"benchmarks": "a.jsonl"}}, "benchmarks is 'a.jsonl', of the type str; its type must be tuple"),
        ({"evaluation": {"benchmarks": ("a.jsonl", 5)}}, r"benchmarks\[1\] is 5, .*its type must be str"),
        ({"judge": {"range": [1, "a"]}}, r"judge.range\[1\] is 'a', .*its type must be float"),
        ({"seed": "3"}, "seed is '3', of the type str; its type must be int"),
        ({"seed": 3.0}, "seed is 3.0, of the type float; its type must be int"),
        ({"seed": None}, "seed is None"),
        ({"learning": {"learning_rate": "1e-6"}}, "learning.learning_rate is '1e-6', .*its type must be float"),
        ({"model": "some"}, "model is 'some', of the type str; its type must be mapping"),
    ],
)
def test_a_value_of_another_type_is_an_error(tree, message):
    with pytest.raises(ValueError, match=message):
        config_lib.resolve(tree)


def test_values_of_their_types():
    tree = {"evaluation": {"benchmarks": ["a.jsonl"]}, "collection": {"k_pos": None}, "sampling": {"temperature": 1}}
    config = config_lib.resolve(tree)
    assert config.evaluation.benchmarks == ("a.jsonl",) and config.collection.k_pos is None
    assert type(config.sampling.temperature) is float
    assert type(config_lib.resolve({"seed": np.int64(3)}).seed) is int  # JSON has no numpy


def test_a_resume_may_change_these_and_nothing_else():
    saved = json.loads(config_lib.to_json(valid()))
    allowed = {
        "iterations": 7, "checkpoint.every": 7, "checkpoint.minutes": 7.0, "checkpoint.keep": 7,
        "checkpoint.keep_best": 7, "checkpoint.keep_every": 7, "checkpoint.accept_changed_reward": True,
        "checkpoint.notice_s": 60.0, "learning.max_skipped": 7, "reward.max_failed": 0.9,
        "judge.url": "http://localhost/v1", "evaluation.every": 7, "evaluation.benchmarks": ("x",),
        "sft.validation": "x", "evaluation.graders": ("x=math",), "evaluation.samples": 7,
        "evaluation.temperature": 0.5, "evaluation.top_k": 7, "evaluation.top_p": 0.5,
        "evaluation.max_response_tokens": 7, "logging.trackers": "", "logging.sampled_prompts": 7, "logging.profile": 3,
        "logging.compilation_cache": "", "sampling.check_invariants": True,
    }  # fmt: skip
    assert resume.differences(changed(**allowed), saved) == {}
    for key, value in config_lib.flatten(dataclasses.asdict(valid())).items():
        if key in allowed:
            continue
        if isinstance(value, bool) or key in ("collection.deterministic", "collection.speculative"):  # None by default
            other = not value
        elif isinstance(value, str):
            other = f"{value}x"
        elif isinstance(value, tuple):
            other = (1.0,) if key == "judge.range" else ("x",)
        else:
            other = (value or 0) + 1
        assert len(resume.differences(changed(**{key: other}), saved)) == 1, key


def test_a_workdir_that_no_checkpoint_could_be_written_to(tmp_path):
    """Orbax and mkdir would refuse them after the first iteration, or checkpoints would have no arrays."""
    with pytest.raises(ValueError, match="and not UTF-8: name another path"):
        config_lib.check_workdir(valid(), tmp_path / os.fsdecode(b"run-\xff"))
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(ValueError, match="a link to '.*absent', which is not there: make it"):
        config_lib.check_workdir(valid(), tmp_path / "link")
    (tmp_path / "absent").mkdir()
    config_lib.check_workdir(valid(), tmp_path / "link")
    for name, wild in (("run[1]/a", r"\["), ("run?", r"\?"), ("a*\\b", r"\* \\")):
        with pytest.raises(ValueError, match=f"and {wild} in a path are wildcards .*: name another path"):
            config_lib.check_workdir(valid(), tmp_path / name)
    config_lib.check_workdir(valid(), tmp_path / "seed=1 %41#x] ü")


def test_a_workdir_holds_one_configuration(tmp_path):
    config_lib.check_workdir(valid(), tmp_path / "absent")
    config_lib.check_workdir(valid(), tmp_path)
    (tmp_path / "config.json").write_text(config_lib.to_json(valid()))
    config_lib.check_workdir(changed(iterations=7), tmp_path)
    with pytest.raises(ValueError, match=r"holds a run of another.*\n  seed: 0 -> 1\nResume.*or choose another --work"):
        config_lib.check_workdir(changed(seed=1), tmp_path)

"""Collection strategies: how many responses to draw for a prompt, when to stop, which to keep.

A strategy is data made of plain functions; the loop in collect.py knows none of them by name. To add one, write a
function that returns a `Strategy`, give it a line in `build` and its name in config.STRATEGIES:

    def triple(config):
        def met(record):
            return record.correct >= 3

        return Strategy(
            next_draws=until(met, config.samples_per_round, config.max_rounds),
            max_draws=config.samples_per_round * config.max_rounds,
            met=met,
            keep=lambda correct: balanced_group(correct, config.group_size),
            pool_baseline=True,
        )
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from reinforce_ada_jax.collection.groups import balanced_group
from reinforce_ada_jax.types import Prompt


class CollectionConfig(Protocol):
    """What is read of the `collection` section of a configuration, and nothing else."""

    strategy: str
    group_size: int
    samples_per_round: int
    max_rounds: int


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """What a stopping rule may look at: a prompt's counts after the rounds finished so far.

    Attributes:
      prompt: whose record this is.
      rounds: finished rounds; 0 before the first.
      drawn: responses in them.
      correct: of these, the correct ones.
    """

    prompt: Prompt
    rounds: int
    drawn: int
    correct: int


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """A collection strategy.

    Attributes:
      next_draws: how many more responses to draw for a prompt now; 0 closes it. Asked before the first round, where
        it must be at least 1, and after every finished round, never in the middle of one.
      max_draws: the most that `next_draws` may add up to for one prompt; the loop refuses more.
      met: whether the stopping rule is met; decides nothing, counted as `collection/unmet_share`.
      keep: bool[N] verdicts of a pool -> int[n] draw indices kept for the update, ascending.
      pool_baseline: whether advantages compare with the whole pool's statistics or with the kept group's own.
    """

    next_draws: Callable[[Record], int]
    max_draws: int
    met: Callable[[Record], bool]
    keep: Callable[[np.ndarray], np.ndarray]
    pool_baseline: bool


def until(met: Callable[[Record], bool], samples_per_round: int, max_rounds: int) -> Callable[[Record], int]:
    """The common `next_draws`: rounds of one size until the rule is met, at least one and at most `max_rounds`."""

    def next_draws(record: Record) -> int:
        stop = record.rounds > 0 and (met(record) or record.rounds == max_rounds)
        return 0 if stop else samples_per_round

    return next_draws


def keep_all(correct: np.ndarray) -> np.ndarray:
    """The common `keep` of strategies that drop nothing."""
    return np.arange(len(correct))


def fixed(samples: int) -> Strategy:
    """One round of `samples`, all of them kept: evaluation, and `grpo`."""

    def met(record: Record) -> bool:
        return record.rounds == 1

    return Strategy(until(met, samples, 1), max_draws=samples, met=met, keep=keep_all, pool_baseline=False)


def grpo(config: CollectionConfig) -> Strategy:
    """Group relative policy optimisation: one round of n, compared with its own mean (arXiv 2402.03300)."""
    return fixed(config.group_size)


def _balanced(config: CollectionConfig, met: Callable[[Record], bool]) -> Strategy:
    return Strategy(
        next_draws=until(met, config.samples_per_round, config.max_rounds),
        max_draws=config.samples_per_round * config.max_rounds,
        met=met,
        keep=lambda correct: balanced_group(correct, config.group_size),
        pool_baseline=True,
    )


def positive(config: CollectionConfig) -> Strategy:
    """Ada-Seq-pos: rounds of M until a response is correct; a balanced group (arXiv 2510.04996)."""
    return _balanced(config, lambda record: record.correct >= 1)


def balance(config: CollectionConfig) -> Strategy:
    """Ada-Seq-balance: rounds of M until n // 2 are correct and n - n // 2 wrong; a balanced group (2510.04996)."""
    num_right = config.group_size // 2
    num_wrong = config.group_size - num_right

    def met(record: Record) -> bool:
        return record.correct >= num_right and record.drawn - record.correct >= num_wrong

    return _balanced(config, met)


def build(config: CollectionConfig) -> Strategy:
    """The strategy that the `collection` section of a configuration names; ValueError for an unknown name."""
    if config.strategy == "grpo":
        return grpo(config)
    if config.strategy == "positive":
        return positive(config)
    if config.strategy == "balance":
        return balance(config)
    raise ValueError(f"collection.strategy is {config.strategy!r}; it must be one of grpo, positive, balance.")

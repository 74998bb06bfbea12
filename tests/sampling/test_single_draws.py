"""Rounds of one draw through engines: a chain of requests for each prompt, and one prefill."""

import dataclasses
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CarriedRollouts, CollectOptions, collect
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.types import Prefetch, Prompt, Verdict
from tests.sampling import tiny
from tests.sampling.page_engine import PageEngine, response_to


def until_correct(max_rounds: int, needed: int = 1) -> strategies.Strategy:
    """Single draws until `needed` are correct, at most `max_rounds`."""

    def met(progress):
        return progress.correct >= needed

    return strategies.Strategy(
        strategies.until(met, 1, max_rounds), met, strategies.keep_all, max_draws=max_rounds, max_kept=max_rounds
    )


def draws_needed(verdicts: list[bool], needed: int) -> int:
    """Draws until `needed` verdicts are True, or all of them."""
    enough = np.flatnonzero(np.cumsum(verdicts) >= needed)
    return int(enough[0]) + 1 if enough.size else len(verdicts)


@pytest.mark.parametrize("needed", [1, 9])
@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({}, {}),
        ({}, dict(speculative=True)),
        pytest.param(tiny.MANY, dict(speculative=True), marks=pytest.mark.slow),  # test_rollouts.py has as many slots
        (tiny.REPLICAS, dict(speculative=True)),
        ({}, dict(barrier=True)),
    ],
    ids=["plain", "speculative", "64 slots", "2 replicas", "barrier"],
)
def test_single_draws_are_those_of_one_round(changes, how, needed):
    """The same responses as in one round of 13, as many as the rule asks for, after one prefill of each prompt."""
    tiny.drawn()  # which shares the rollouts of the first case, and their counts
    rollouts = tiny.rollouts(**changes)
    pools = tiny.collect_pools(rollouts, until_correct(tiny.DRAWS, needed), **how)
    for pool in pools:
        responses = [tiny.drawn()[pool.prompt.id, draw] for draw in range(tiny.DRAWS)]
        correct = [verdict.correct for verdict in tiny.verdicts([(pool.prompt, each) for each in responses])]
        assert len(pool.responses) == pool.rounds == draws_needed(correct, needed)
        assert pool.round_sizes == (1,) * pool.rounds
    kept = tiny.samples(pools)
    tiny.assert_same({address: tiny.drawn()[address] for address in kept}, kept)
    assert rollouts.counts.prefills == 5
    # Nothing is drawn that isn't in a pool or counted.
    discarded = sum(sum(pool.discarded) for pool in pools)
    useful = sum(len(response.tokens) for response in kept.values())
    assert rollouts.counts.tokens == useful + discarded + rollouts.counts.redone
    assert (discarded > 0) <= how.get("speculative", False)


N_MAX, LONGEST = 32, 12


def expected(prompt: Prompt, stream: int, draw: int) -> list[int]:
    return response_to(token_lib.address(stream, prompt.id, draw), LONGEST, LONGEST)[0]


def is_correct(tokens) -> bool:
    """True for about one address in eight."""
    return int(tokens[0]) % 8 == 0


SIZES = [(1, 3, 2), (1, 16, 20), (3, 4, 3)]
# Each pair of two settings' values is in one of the fast ones.
CASES = [
    pytest.param(
        *sizes, pages, speculative, marks=[pytest.mark.slow] * (((pages == 40) ^ speculative) != (sizes != SIZES[1]))
    )
    for sizes, pages, speculative in itertools.product(SIZES, (40, 1000), (False, True))
]


@pytest.mark.parametrize(("replicas", "slots", "open_prompts", "pages", "speculative"), CASES)
def test_32_rounds_of_one_under_every_invariant(speculative, pages, replicas, slots, open_prompts):
    """Late verdicts, few rows and pages, the next iteration in idle slots: consistent pages, single prefills."""
    options = dataclasses.replace(
        tiny.OPTIONS, slots=slots, pages=pages, open_prompts=open_prompts, check_invariants=True
    )
    rollouts = Rollouts(PageEngine(options, replicas))
    random = np.random.default_rng(0)
    prompts = [
        Prompt(f"p{row}", "", "", random.integers(0, 24, length).astype(np.int32))
        for row, length in enumerate(random.integers(1, 18, 16).tolist())
    ]
    now, then, graded = prompts[:10], prompts[10:], []

    def grade(pairs):
        time.sleep(0.0005)
        return [Verdict(is_correct(response.tokens), 0.0) for _, response in pairs]

    def verify(pairs):
        graded.append(len(pairs))
        return verifier.submit(grade, pairs)

    prefetch, sampling = Prefetch(then), SamplingParams(LONGEST)
    with ThreadPoolExecutor(1) as verifier:
        strategy, options = until_correct(N_MAX), CollectOptions(deterministic=False, speculative=speculative)
        first = rollouts.sampler(None, stream=4, prefetch_stream=5, sampling=sampling)
        pools = collect(now, first, verify, strategy, options, carried=CarriedRollouts(prefetch=prefetch))
        prefills = rollouts.counts.prefills
        second = rollouts.sampler(None, stream=5, sampling=sampling)
        pools += collect(then, second, verify, strategy, options, carried=CarriedRollouts(partial=prefetch.partial))
    assert len(now) <= prefills <= len(prompts) and rollouts.counts.prefills <= len(then)
    for pool in pools:
        stream = 4 if pool.prompt in now else 5
        drawn = [expected(pool.prompt, stream, draw) for draw in range(N_MAX)]
        count = draws_needed([is_correct(tokens) for tokens in drawn], 1)
        assert [response.tokens.tolist() for response in pool.responses] == drawn[:count]
    assert {len(pool.responses) for pool in pools} >= {1, N_MAX}
    # Verdicts are asked for in batches: one call a window, for all prompts whose round it completed.
    assert sum(graded) == sum(len(pool.responses) for pool in pools)
    if slots * replicas >= 12 and not speculative:
        assert len(graded) < 0.7 * sum(graded)

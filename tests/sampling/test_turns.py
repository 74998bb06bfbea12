"""Trajectories of several turns: the pages of a turn stay for the next one, which is prefilled from there on."""

import dataclasses

import numpy as np
import pytest

from reinforce_ada_jax.sampling.engine import enough_pages
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.token import address
from tests.sampling import tiny
from tests.sampling.page_engine import VOCABULARY, PageEngine, response_to
from tests.sampling.request_streams import TurnStream, random_options
from tests.sampling.test_invariants import PREFETCH_STREAM, STREAM, session


def check_turns(stream: TurnStream, longest: int) -> None:
    """Each turn is that of its own address, under its own limit."""
    for request, response in stream.turns:
        words = address(PREFETCH_STREAM if request.prefetch else STREAM, request.prompt.id, request.draw)
        tokens, truncated = response_to(words, stream.limit(request), longest)
        assert (response.tokens.tolist(), response.truncated) == (tokens, truncated), request


def run_turn_streams(seed: int) -> np.ndarray:
    """Two streams on an engine of random sizes; turns, and tokens redone, continued, prefilled."""
    rng, counts = np.random.default_rng(seed), np.zeros(4, int)
    sizes = dict(max_prompt_tokens=int(rng.integers(1, 60)), open_prompts=int(rng.choice([1, 2, 4, 8, 20, 40])))
    options = random_options(rng, **sizes)
    if rng.random() < 0.5:
        options = dataclasses.replace(options, pages=enough_pages(options))
    rollouts = Rollouts(PageEngine(options, replicas=int(rng.integers(1, 4))))
    for number in range(2):
        stream = TurnStream(rng, options, VOCABULARY, prefix=f"s{number}p")
        broken_off = int(rng.integers(0, 6)) if rng.random() < 0.2 else None
        session(rollouts, stream, broken_off)
        check_turns(stream, options.max_response_tokens)
        done = rollouts.counts
        counts += [len(stream.turns), done.redone, done.continued_tokens, done.prefilled_tokens]
    return counts


def run_seeds(seeds) -> np.ndarray:
    """`run_turn_streams` for each; a failure names its seed."""
    total = np.zeros(4, int)
    for seed in seeds:
        try:
            total += run_turn_streams(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: tests.sampling.test_turns.run_turn_streams({seed}) does it again")
            raise
    return total


def test_random_trajectories():
    turns, _, continued, prefilled = run_seeds(range(25))
    assert turns > 2_000 and continued > 5_000 and prefilled > 5_000


@pytest.mark.slow
def test_two_thousand_random_trajectories():
    turns, redone, continued, prefilled = run_seeds(range(25, 1_025))
    assert turns > 80_000 and redone > 100 and continued > 200_000 and prefilled > 200_000


def test_a_turn_prefills_its_new_tokens_only():
    # Enough rows and pages: of a turn's prompt, less its last token, everything is in the cache up to the last sampled
    # token, which has no keys yet. So as many tokens are left as the environment said.
    options = dataclasses.replace(tiny.OPTIONS, max_prompt_tokens=60, open_prompts=40, check_invariants=True)
    options = dataclasses.replace(options, pages=enough_pages(options))
    rollouts, stream = Rollouts(PageEngine(options)), TurnStream(np.random.default_rng(1), options, VOCABULARY)
    session(rollouts, stream)
    check_turns(stream, options.max_response_tokens)
    environment = sum(sum(response.segments[1::2]) for response in stream.responses.values())
    first = sum(len(each.prompt.tokens) - 1 for each in stream.rounds if each.drawn)
    later = sum(len(request.prompt.tokens) - 1 for request, _ in stream.turns if "#" in request.prompt.id)
    counts = rollouts.counts
    assert environment > 100 and later > 5 * environment
    assert counts.prefilled_tokens + counts.shared_tokens == first + environment
    assert counts.continued_tokens == later - environment

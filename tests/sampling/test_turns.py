"""Trajectories of several turns: the pages of a turn stay for the next one, which is prefilled from there on."""

import dataclasses
import functools
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.collection.trajectories import Trajectories
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.sampling.engine import enough_pages
from reinforce_ada_jax.sampling.rollouts import RolloutCounts, Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.sampling.token import address
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.types import Response, Verdict
from tests.sampling import tiny
from tests.sampling.page_engine import VOCABULARY, PageEngine, given, response_to
from tests.sampling.request_streams import TurnStream, random_options
from tests.sampling.test_invariants import PREFETCH_STREAM, STREAM, recorded, session


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
    """Random trajectories go on from what their pages hold."""
    turns, _, continued, prefilled = run_seeds(range(5, 8))
    assert turns > 300 and continued > 1_000 and prefilled > 1_000


@pytest.mark.slow
def test_two_thousand_random_trajectories():
    turns, redone, continued, prefilled = run_seeds((*range(5), *range(8, 1_008)))
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


# ---- the compiled engine ---------------------------------------------------------------------------------------------


# test_invariants.py has such an engine page for page; a test above has more trajectories, and one below the
# log-probabilities of their turns.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "seeds"),
    [(tiny.PAYING, range(9)), (dict(slots=3, open_prompts=9, pages=70, max_prompt_tokens=40), range(6))],
    ids=["few pages", "enough pages"],
)
def test_the_compiled_engine_parks_page_for_page(sizes, seeds):
    """Every window of both engines leaves the same, all invariants looked after, with enough pages and with few."""
    real = tiny.rollouts(stop_ids=(-1, -1), check_invariants=True, **sizes)
    options, continued = real.engine.options, 0
    for seed in seeds:
        streams = [TurnStream(np.random.default_rng(seed), options, vocabulary=24) for _ in range(2)]
        real.state = None
        compiled, tokens = recorded(real, streams[0])
        continued += real.counts.continued_tokens
        plain, _ = recorded(Rollouts(PageEngine(options, answer=given(tokens))), streams[1])
        assert len(compiled) == len(plain), f"seed {seed}"
        for number, (one, other) in enumerate(zip(compiled, plain, strict=True)):
            assert one == other, f"seed {seed}, window {number}"
    assert continued > 100


TURNS, LIMIT, LONGEST = 4, 8, 50
ENGINES = {
    "8 slots": dict(slots=8, open_prompts=50),
    "64 slots": dict(slots=64, open_prompts=50),
    "1 slot, few rows, drafts": dict(slots=1, window=16, open_prompts=6, drafts=3, draft_rows=3),
}


# Each takes seconds to compile.
MARKED = [pytest.param(name, marks=[pytest.mark.slow] * (name != "8 slots")) for name in ENGINES]


class Teacher:
    """Answers a turn with up to three tokens that follow from it; the draw decides how many turns there are."""

    def begin(self, prompt, draw):
        return [1 + (len(prompt.tokens) + draw) % TURNS, 0]

    def submit(self, trajectory, tokens):
        answer = Future()
        answer.set_result(int(tokens.sum()))
        return answer

    def read(self, trajectory, answer):
        trajectory[1] += 1
        if trajectory[1] == trajectory[0]:
            return Verdict(True, 1.0)
        return ((answer + np.arange(answer % 4)) % 24).astype(np.int32)

    def end(self, trajectory):
        pass


class Unparked(Trajectories):
    """Turns that the sampler is not told to continue: each is prefilled whole."""

    def take(self, limit, *, wait=True):
        return [dataclasses.replace(request, continues="") for request in super().take(limit, wait=wait)]


def trajectories(rollouts: Rollouts, queue=Trajectories) -> dict[tuple[str, int], Response]:
    turns = queue(Teacher(), max_turns=TURNS, max_tokens=LONGEST - 17, max_begun=2**31, deterministic=True)
    sample_fn = rollouts.sampler(tiny.params(), stream=0, sampling=SamplingParams(LIMIT))
    pools = collect(tiny.PROMPTS, sample_fn, turns.verdicts, strategies.fixed(6), turns=turns)
    tiny.assert_idle(rollouts.state, rollouts.engine.options.pages)
    return tiny.samples(pools)


def engine(name: str, **more) -> Rollouts:
    changes = dict(stop_ids=tuple(range(8)), max_prompt_tokens=LONGEST, check_invariants=True) | ENGINES[name]
    return tiny.rollouts(**changes, **more)


@functools.cache
def drawn(name: str) -> tuple[dict[tuple[str, int], Response], RolloutCounts]:
    rollouts = engine(name)
    return trajectories(rollouts), rollouts.counts


@pytest.mark.parametrize("name", MARKED)
def test_logprobs_of_trajectories_are_the_learners(name):
    responses, counts = drawn(name)
    assert sum(len(response.segments) > 1 for response in responses.values()) > 12 and counts.continued_tokens > 10
    prompt_of = {prompt.id: prompt.tokens for prompt in tiny.PROMPTS}
    rows = [Example(prompt_of[response.prompt_id], response) for response in responses.values()]
    batch = make_batch(rows, max_prompt_tokens=17, max_response_tokens=LONGEST - 17)
    gaps = np.abs(tiny._logprobs(tiny.params(), batch, 1.0) - batch.behaviour_logprobs)
    assert gaps[batch.response_mask].max() < 1e-4


@pytest.mark.parametrize("name", MARKED[1:])
def test_slots_and_given_up_turns_decide_nothing(name):
    expected, (found, counts) = drawn("8 slots")[0], drawn(name)
    assert found.keys() == expected.keys()
    for place, response in expected.items():
        assert found[place].segments == response.segments, place
        np.testing.assert_array_equal(found[place].tokens, response.tokens)
        np.testing.assert_allclose(found[place].logprobs, response.logprobs, atol=1e-4)
    parked_all = counts.prefilled_tokens == drawn("8 slots")[1].prefilled_tokens
    assert parked_all == (name == "64 slots") and (counts.accepted > 10) == ("drafts" in name)


def test_a_turn_of_the_compiled_engine_prefills_its_new_tokens():
    responses, counts = drawn("8 slots")
    environment = sum(sum(response.segments[1::2]) for response in responses.values())
    assert environment > 20 and any(0 in response.segments for response in responses.values())
    assert counts.prefilled_tokens + counts.shared_tokens == 0 + 3 + 4 + 15 + 16 + environment


def test_a_second_session_compiles_nothing():
    first = drawn("8 slots")[0]
    compiled = CompileCounter()
    again = trajectories(engine("8 slots"))
    assert compiled.since_last() == 0
    assert jax.tree.all(
        jax.tree.map(np.array_equal, *[[r.logprobs for r in drawn.values()] for drawn in (first, again)])
    )


@pytest.mark.slow  # test_chunks.py has a prefill in int8 beside decode steps
def test_kept_pages_in_int8_are_those_that_a_prefill_writes():
    # Keys and values are rounded when they are written, by a prefill as by a slot, and then read.
    rollouts = engine("8 slots", kv_dtype="int8")
    kept, continued = trajectories(rollouts), rollouts.counts.continued_tokens
    whole = trajectories(rollouts, Unparked)
    assert continued > 100 and rollouts.counts.continued_tokens == 0
    assert sum(len(response.segments) > 1 for response in kept.values()) > 10
    for place, response in kept.items():
        assert whole[place].segments == response.segments, place
        np.testing.assert_array_equal(whole[place].tokens, response.tokens)
        np.testing.assert_allclose(whole[place].logprobs, response.logprobs, atol=1e-4)

"""Responses that are cut at the end of a collection and go on in the next one (`collection.overlap` = in_flight)."""

import contextlib
import dataclasses
import itertools

import jax
import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CarriedRollouts, collect
from reinforce_ada_jax.collection.continuation import following
from reinforce_ada_jax.collection.serialization import partial_from_text, partial_to_text
from reinforce_ada_jax.distributed.signals import Interrupted
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.sampling.scheduler import Scheduler
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.types import PartialRollouts, Prefetch, Prompt, Request, Response, Verdict
from tests.sampling import tiny

NOW, THEN = tiny.PROMPTS[:1], tiny.PROMPTS[3:]
# p1 has 2 draws, so that most slots draw for p16 and p17, whose responses have up to 12 tokens, 2 in a window.
STRATEGY = strategies.Strategy(
    next_draws=lambda record: 0 if record.rounds else (2 if record.prompt.id == "p1" else tiny.DRAWS),
    max_draws=tiny.DRAWS, met=lambda record: True, keep=strategies.keep_all, max_kept=None,
)  # fmt: skip


def collected(rollouts, prompts, params, version, **carried):
    """The samples of a collection in stream `version`, which may begin those of the next stream."""
    sampling = SamplingParams(tiny.LIMIT)
    sample_fn = rollouts.sampler(
        params, stream=version, prefetch_stream=version + 1, policy_version=version, sampling=sampling
    )
    pools = collect(prompts, sample_fn, tiny.verdicts, STRATEGY, carried=CarriedRollouts(**carried))
    tiny.assert_idle(rollouts.state, rollouts.engine.options.pages)
    return tiny.samples(pools)


def in_flight(**changes):
    return tiny.rollouts(slots=6, window=2, open_prompts=12, begun_tokens=tiny.LIMIT - 1, **changes)


def cut_and_continued(rollouts, later):
    """The samples of p16 and p17 of which a collection of p1 drew the first tokens; `later` are the next weights."""
    prefetch = Prefetch(THEN)
    collected(rollouts, NOW, tiny.params(), 0, prefetch=prefetch)
    partial = partial_from_text(partial_to_text(prefetch.partial))  # as a checkpoint has them
    begun = [response for rollouts in partial.values() for response in rollouts.begun]
    assert begun and all(response.is_cut and not response.truncated for response in begun)
    return begun, collected(rollouts, THEN, later, 1, partial=partial)


def test_under_the_same_weights_a_cut_response_is_the_one_that_was_not_cut():
    """The noise of a token has the address of its place in the response, not of its place behind the cut."""
    rollouts = in_flight()
    begun, samples = cut_and_continued(rollouts, tiny.params())
    tiny.assert_same(tiny.draw(tiny.rollouts(), prompts=THEN, stream=1), samples, prompts=THEN, stream=1)
    for response in begun:
        whole = samples[response.prompt_id, response.draw]
        assert len(whole.tokens) > len(response.tokens)
        np.testing.assert_array_equal(whole.tokens[: len(response.tokens)], response.tokens)
        np.testing.assert_array_equal(whole.logprobs[: len(response.tokens)], response.logprobs)
        assert whole.versions == ((0, len(response.tokens)), (1, len(whole.tokens) - len(response.tokens)))


def test_each_token_has_the_log_probability_of_the_weights_that_drew_it():
    """So importance weights can be taken token by token. A cache kept from the old weights would be of neither."""
    later = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(5), x.shape), tiny.params())
    _, samples = cut_and_continued(in_flight(), later)
    prompt_of = {prompt.id: prompt for prompt in THEN}
    rows = [Example(prompt_of[response.prompt_id].tokens, response) for response in samples.values()]
    batch = make_batch(rows, max_prompt_tokens=tiny.OPTIONS.max_prompt_tokens, max_response_tokens=tiny.LIMIT)
    gaps = [np.abs(tiny._logprobs(params, batch, 1.0) - batch.behaviour_logprobs) for params in (tiny.params(), later)]
    of_version = [(batch.policy_version == version) & batch.response_mask for version in (0, 1)]
    assert all(mask.sum() > 10 for mask in of_version)
    for version, mask in enumerate(of_version):
        assert np.asarray(gaps[version])[mask].max() < 1e-4
        assert np.asarray(gaps[1 - version])[mask].mean() > 1e-2


@pytest.mark.parametrize("goes_on", [False, True])
def test_without_it_the_responses_are_waited_for(goes_on):
    """Also where responses of a collection that is broken off go on."""
    prefetch, rollouts = Prefetch(THEN), in_flight(finishes=True) if goes_on else tiny.rollouts()
    collected(rollouts, NOW, tiny.params(), 0, prefetch=prefetch)
    assert prefetch.partial and not any(rollouts.begun for rollouts in prefetch.partial.values())


def test_a_prompt_and_the_most_of_a_response_are_accepted():
    options = in_flight().engine.options
    options.check_prompt(tiny.OPTIONS.max_prompt_tokens + tiny.LIMIT - 1)
    with pytest.raises(ValueError, match="a prompt has 29 tokens, and the engine takes 1 to 28"):
        options.check_prompt(tiny.OPTIONS.max_prompt_tokens + tiny.LIMIT)


# test_train_strategies.py has a run whose numerics are invariant.
@pytest.mark.parametrize("how", ["in flight", "finished", pytest.param("invariant", marks=pytest.mark.slow), "killed"])
def test_a_collection_that_is_broken_off_keeps_the_tokens_of_what_runs(how):
    """As after a request to end: its responses go on, and are those of a collection that was not broken off.

    For a kill the same is stored while the collection goes on.
    """
    numerics = {"attention": "invariant"} if how == "invariant" else {}
    rollouts, sampling = in_flight(finishes=how != "in flight", **numerics), SamplingParams(tiny.LIMIT)
    sample_fn = rollouts.sampler(tiny.params(), stream=1, sampling=sampling)
    windows, stored = itertools.count(1), {}

    def stop(*_):
        if next(windows) == 9 and how != "killed":  # in the middle of the second six responses
            raise Interrupted

    def store(so_far):
        if next(windows) < 18:  # two numbers a window
            stored.clear()
            stored.update(so_far())

    carried = CarriedRollouts(store=store) if how == "killed" else CarriedRollouts()
    with contextlib.nullcontext() if how == "killed" else pytest.raises(Interrupted):
        collect(THEN, sample_fn, tiny.verdicts, STRATEGY, carried=carried, on_progress=stop)
    partial = partial_from_text(partial_to_text(carried.broken_off or stored))
    begun = [response for rollouts in partial.values() for response in rollouts.begun]
    assert len(begun) >= 2 and all(response.is_cut for response in begun)
    sample_fn = rollouts.sampler(tiny.params(), stream=1, sampling=sampling)
    pools = collect(THEN, sample_fn, tiny.verdicts, STRATEGY, carried=CarriedRollouts(partial))
    samples = tiny.samples(pools)
    assert not any(response.versions for response in samples.values())  # of one version throughout
    unbroken = tiny.draw(tiny.rollouts(**numerics), prompts=THEN, stream=1)
    tiny.assert_same(unbroken, samples, prompts=THEN, stream=1)
    if how == "invariant":  # to the bit: a token of a prompt has the products of a drawn one
        for address, response in samples.items():
            np.testing.assert_array_equal(response.logprobs, unbroken[address].logprobs)
    kept = sum(
        len(response.tokens)
        for rollouts in partial.values()
        for response in (*rollouts.responses, *rollouts.begun)
        if response
    )
    assert rollouts.counts.tokens == sum(len(response.tokens) for response in samples.values()) - kept


@pytest.mark.parametrize("finishes", [True, False])
def test_responses_that_go_on_are_expected_to_hold_what_they_lack(finishes):
    """So all slots are busy at once after a resume. In flight, runs keep the order that they had."""
    prompt = tiny.PROMPTS[4]
    # Six prompts of 17 + 10 tokens hold 7 pages each, and one response 8; the null page.
    options = dataclasses.replace(in_flight().engine.options, finishes=finishes, pages=6 * 7 + 8 + 1)
    scheduler = Scheduler(options)
    for draw in range(options.slots):
        begun = Response(prompt.id, draw, np.arange(10, dtype=np.int32), np.zeros(10, np.float32), False, is_cut=True)
        scheduler.add(following(Request(prompt, draw, begun=begun)))
    assert (scheduler.num_unopened == 0) == finishes


@pytest.mark.slow  # test_engine.py has the fewest pages, and the tests above have others
def test_the_longest_response_goes_on_with_the_fewest_pages():
    """`config.least_pages`: 7 of 17 + 11 tokens, 8 of the prompt with its whole response, and the null page."""
    prompt, expected = tiny.PROMPTS[4], tiny.draw(tiny.rollouts(), prompts=THEN, stream=1)
    longest = [expected[prompt.id, draw] for draw in range(2) if len(expected[prompt.id, draw].tokens) == tiny.LIMIT]
    begun = tuple(
        dataclasses.replace(whole, tokens=whole.tokens[:11], logprobs=whole.logprobs[:11], truncated=False, is_cut=True)
        for whole in longest
    )
    assert begun
    scarce = tiny.rollouts(slots=3, window=2, open_prompts=4, begun_tokens=tiny.LIMIT - 1, pages=16)
    partial = {prompt.id: PartialRollouts((None,) * tiny.DRAWS, (), 0, (tiny.DRAWS,), begun)}
    samples = collected(scarce, [prompt], tiny.params(), 1, partial=partial)
    tiny.assert_same({address: expected[address] for address in samples}, samples, prompts=THEN, stream=1)


def test_another_reward_grades_no_round_whose_draws_run():
    """Kept, the draws of a later round that have ended would be its short ones."""
    ended = [Response("p1", draw, np.arange(3), np.zeros(3), False) for draw in range(4)]
    running = Response("p1", 2, np.arange(9), np.zeros(9), False, is_cut=True)
    verdicts = (Verdict(False, 0.0),) * 2
    later = PartialRollouts((*ended[:2], None, ended[3]), verdicts, 1, (2, 2), (running,)).ungraded()
    assert (later.responses, later.verdicts, later.rounds) == (tuple(ended[:2]), (), 0)
    assert (later.round_sizes, later.begun) == ((2,), ())
    first = PartialRollouts((ended[0], None), (), 0, (2,), (running,)).ungraded()
    assert (first.responses, first.begun) == ((ended[0], None), (running,))


def test_draws_that_no_prompt_needs_are_cut_and_count_as_discarded():
    """Single draws until the first success, drawn ahead of verdicts: those that run when it is found end there."""
    prompt = Prompt("p4", "", "", tiny.PROMPTS[1].tokens)
    strategy = strategies.Strategy(
        next_draws=lambda record: int(not record.correct), max_draws=tiny.DRAWS, met=lambda record: True,
        keep=strategies.keep_all, max_kept=None,
    )  # fmt: skip
    pools = tiny.collect_pools(in_flight(), strategy, prompts=[prompt], speculative=True)
    cut = tiny.collect_pools(tiny.rollouts(), strategy, prompts=[prompt], speculative=True)
    tiny.assert_same(tiny.samples(cut), tiny.samples(pools), prompts=[prompt])
    assert sum(pools[0].discarded) < sum(cut[0].discarded)

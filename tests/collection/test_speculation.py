"""Rounds of one draw, and speculative draws: idle slots start them, and no pool depends on it."""

import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CollectOptions, collect
from reinforce_ada_jax.collection.metrics import discarded_metrics
from reinforce_ada_jax.collection.speculation import probability_of_use
from reinforce_ada_jax.types import Response, Verdict
from tests.collection.test_collect import make_prompts

N_MAX = 32


def respond(request) -> Response:
    """A response of 1 + draw % 3 tokens that names its own address."""
    row = int(request.prompt.id[1:])
    tokens = np.array([row, request.draw, 0][: 1 + request.draw % 3], np.int32)
    return Response(request.prompt.id, request.draw, tokens, np.zeros(len(tokens), np.float32), False)


def until_correct(samples_per_round=1, max_rounds=N_MAX, needed=1) -> strategies.Strategy:
    """Draws until `needed` responses are correct."""

    def met(progress):
        return progress.correct >= needed

    most = samples_per_round * max_rounds
    return strategies.Strategy(
        strategies.until(met, samples_per_round, max_rounds), met, strategies.keep_all, max_draws=most, max_kept=most
    )


class Verifier:
    """Scripted verdicts by address, which keeps its calls; as futures, half of which have arrived when asked."""

    def __init__(self, correct, order=None):
        self.correct, self.order, self.calls = correct, order, []

    def __call__(self, pairs):
        self.calls.append([(prompt.id, response.draw) for prompt, response in pairs])
        scripted = [bool(self.correct[int(prompt.id[1:])][response.draw]) for prompt, response in pairs]
        verdicts = [Verdict(correct, float(correct)) for correct in scripted]
        if self.order is None:
            return verdicts
        later = Future()
        later.set_result(verdicts)
        later.done = lambda: self.order.random() < 0.5
        return later


class Sampler:
    """Slots that take speculative draws where they are idle, and return what `choose` names."""

    def __init__(self, slots, choose=lambda in_flight: in_flight, speculates=True):
        self.slots, self.choose, self.speculates = slots, choose, speculates
        self.open, self.taken, self.speculative, self.yields = {}, [], [], []  # `open`: ids, in order

    def __call__(self, queue):
        in_flight = []
        while True:
            self._close(queue.closed(), in_flight)
            in_flight += (taken := queue.take(self.slots - len(in_flight)))
            self.open |= {request.prompt.id: None for request in taken}
            self.taken += taken
            if self.speculates and len(in_flight) < self.slots:
                early = queue.take_speculative(self.slots - len(in_flight), self.open)
                self.speculative += [(request.prompt.id, request.draw) for request in early]
                self.taken += early
                in_flight += early
            if not in_flight:
                self._close(queue.closed(), in_flight)
                assert not self.open
                return
            done = self.choose(in_flight)
            in_flight = [request for request in in_flight if request not in done]
            self.yields.append(len(done))
            yield [respond(request) for request in done]

    def _close(self, prompt_ids, in_flight):
        """Closed prompts give their pages back: nothing of them may be in flight, and each closes once."""
        for prompt_id in prompt_ids:
            assert prompt_id not in [request.prompt.id for request in in_flight]
            del self.open[prompt_id]


def summary(pool):
    drawn = [(response.draw, response.tokens.tolist()) for response in pool.responses]
    return pool.prompt.id, drawn, pool.verdicts, pool.rounds, pool.met, pool.round_sizes


PASS_RATES = np.array([0.0, 0.02, 0.05, 0.1, 0.3, 0.6, 1.0, 0.0])
CORRECT = np.random.default_rng(0).random((len(PASS_RATES), N_MAX)) < PASS_RATES[:, None]


def expected_pools(strategy):
    """Draw by draw, without a queue: rounds of M until the rule is met."""
    pools = []
    for row in range(len(PASS_RATES)):
        drawn = rounds = 0
        while True:
            progress = strategies.PromptProgress(make_prompts(1)[0], rounds, drawn, int(CORRECT[row, :drawn].sum()))
            if not (size := strategy.next_draws(progress)):
                break
            drawn, rounds = drawn + size, rounds + 1
        pools.append((f"p{row}", drawn, rounds, bool(CORRECT[row, :drawn].sum() >= 1)))
    return pools


@pytest.mark.parametrize("samples_per_round", [1, 2, 8])
def test_speculation_and_completion_order_decide_nothing(samples_per_round):
    strategy, prompts = until_correct(samples_per_round, N_MAX // samples_per_round), make_prompts(len(PASS_RATES))
    plain = collect(prompts, Sampler(5, speculates=False), Verifier(CORRECT), strategy)
    assert [(*summary(pool)[:1], len(pool.responses), pool.rounds, pool.met) for pool in plain] == expected_pools(
        strategy
    )
    speculated = 0
    for seed in range(18):
        order = np.random.default_rng(seed)

        def some(in_flight, order=order):
            return [in_flight[index] for index in order.permutation(len(in_flight))[: order.integers(1, 6)]]

        sampler = Sampler(int(order.integers(1, 20)), some)
        verifier = Verifier(CORRECT, order if seed % 3 else None)
        pools = collect(
            prompts, sampler, verifier, strategy, CollectOptions(speculative=True, deterministic=bool(seed % 2))
        )
        assert [summary(pool) for pool in pools] == [summary(pool) for pool in plain]
        speculated += len(sampler.speculative)
        # Every response is in a pool or counted as discarded, by its tokens; and discarded ones are not graded.
        lengths = sorted(1 + request.draw % 3 for request in sampler.taken)
        kept = [len(response.tokens) for pool in pools for response in pool.responses]
        assert lengths == sorted(kept + [length for pool in pools for length in pool.discarded])
        graded = [address for call in verifier.calls for address in call]
        assert sorted(graded) == sorted((pool.prompt.id, r.draw) for pool in pools for r in pool.responses)
    assert speculated > 200


def test_nothing_is_speculative_unless_asked_for_nor_behind_a_barrier_nor_where_draws_are_planned():
    strategy, prompts = until_correct(), make_prompts(len(PASS_RATES))
    planned = dataclasses.replace(
        strategies.fixed(2), next_draws=lambda progress: 0 if progress.rounds else progress.planned,
        plan=lambda estimates, names: np.full(len(names), 2), max_draws=N_MAX,
    )  # fmt: skip
    for config, how in ((strategy, {}), (strategy, {"barrier": True, "speculative": True}), (planned, {})):
        sampler = Sampler(100)
        options = CollectOptions(**{"speculative": True} if config is planned else how)
        collect(prompts, sampler, Verifier(CORRECT), config, options)
        assert sampler.speculative == []


def test_a_chain_of_single_draws_takes_one_yield():
    # p0 is never solved. One slot: 32 responses one after another. 32 slots: all at once, and no more than max_draws.
    for slots, yields in ((1, [1] * 32), (32, [32]), (100, [32])):
        sampler = Sampler(slots)
        (pool,) = collect(
            make_prompts(1), sampler, Verifier(np.zeros((1, 32))), until_correct(), CollectOptions(speculative=True)
        )
        assert sampler.yields == yields and pool.rounds == 32 and pool.discarded == ()


def test_draws_beyond_the_first_success_are_discarded():
    # 8 slots start draws 0 to 7; draw 2 is correct. Draws 3 to 7 have 1, 2, 3, 1, 2 tokens.
    sampler, verifier = Sampler(8), Verifier([[0, 0, 1] + [1] * 29])
    (pool,) = collect(make_prompts(1), sampler, verifier, until_correct(), CollectOptions(speculative=True))
    assert [response.draw for response in pool.responses] == [0, 1, 2]
    assert pool.discarded == (1, 2, 3, 1, 2)
    assert discarded_metrics([pool]) == {"collection/discarded_responses": 5, "collection/discarded_tokens": 9}
    assert verifier.calls == [[("p0", 0)], [("p0", 1)], [("p0", 2)]]


def test_the_draws_that_are_most_probably_needed_go_first():
    assert probability_of_use(0, 1) == 1 / 2 and probability_of_use(3, 1) == 4 / 5 and probability_of_use(3, 4) == 1 / 2
    # After the first yield p0 has 2 wrong draws and p1 none, whose first draw is in flight. 5 slots, 2 of them taken.
    # p0: 3 / (3 + s) after s = 1, 2, 3, ... more: .75, .6, .5; p1: .5, .33: p0's three, the last one by its index.
    taken = []

    def sample(queue):
        (p0,), (p1,) = queue.take(1), queue.take(1)
        yield [respond(p0)]
        (p0,) = queue.take(1)
        yield [respond(p0)]
        (p0,) = queue.take(1)
        taken.extend((each.prompt.id, each.draw) for each in queue.take_speculative(3, ["p0", "p1"]))
        assert [each.prompt.id for each in queue.take_speculative(1, ["p1"])] == ["p1"]
        yield [respond(dataclasses.replace(p0, draw=draw)) for draw in (2, 3, 4, 5)]
        yield [respond(p1), respond(dataclasses.replace(p1, draw=1))]

    correct = np.zeros((2, 32))
    correct[0, 5] = correct[1, 0] = 1
    pools = collect(make_prompts(2), sample, Verifier(correct), until_correct(), CollectOptions(speculative=True))
    assert taken == [("p0", 3), ("p0", 4), ("p0", 5)]
    assert [(len(pool.responses), pool.discarded) for pool in pools] == [(6, ()), (1, (2,))]


def test_rounds_of_one_draw_are_verified_together():
    """One call for all rounds that a yield completes, not one for each prompt."""
    verifier = Verifier(np.zeros((6, 3)))
    collect(make_prompts(6), Sampler(6, speculates=False), verifier, until_correct(max_rounds=3))
    assert verifier.calls == [[(f"p{row}", draw) for row in range(6)] for draw in range(3)]


def test_a_closed_prompt_waits_for_its_speculative_draws():
    """Its pages are in use until they are back; it is reported as closed once."""
    closed = []

    def sample(queue):
        (request,) = queue.take(1)
        early = queue.take_speculative(2, ["p0"])
        yield [respond(request)]
        assert queue.take(1) == []
        for each in early:
            closed.append(queue.closed())
            yield [respond(each)]
        closed.append(queue.closed())

    collect(make_prompts(1), sample, Verifier([[1] * 32]), until_correct(), CollectOptions(speculative=True))
    assert closed == [[], [], ["p0"]]

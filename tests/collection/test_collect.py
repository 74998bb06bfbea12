"""The collection loop under scripted samplers, which take and return in every order that a real one might."""

from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.types import Prompt, Response, Verdict


def make_prompts(num_prompts: int) -> list[Prompt]:
    return [Prompt(f"p{row}", "", "", np.zeros(1, np.int32)) for row in range(num_prompts)]


def respond(request) -> Response:
    """A response that names its own address, so that a mix-up shows."""
    row = int(request.prompt.id[1:])
    return Response(request.prompt.id, request.draw, np.array([row, request.draw]), np.zeros(2, np.float32), False)


def verifier(rewards):
    """Scores by address: `rewards[row][draw]`."""

    def verify(pairs):
        scores = []
        for prompt, response in pairs:
            row, draw = response.tokens
            assert prompt.id == f"p{row}"
            scores.append(float(rewards[row][draw]))
        return [Verdict(score > 0.7, score) for score in scores]

    return verify


def sampler(slots: int, choose, log=None):
    """Fills `slots` and returns those that `choose(requests in flight)` names, until nothing is left."""

    def sample(queue):
        in_flight = []
        while True:
            taken = queue.take(slots - len(in_flight))
            if log is not None:
                log.append([(request.prompt.id, request.draw) for request in taken])
            in_flight += taken
            if not in_flight:
                return
            done = choose(in_flight)
            in_flight = [request for request in in_flight if request not in done]
            yield [respond(request) for request in done]

    return sample


def balance(group_size=4, samples_per_round=8, max_rounds=4) -> strategies.Strategy:
    return strategies.balance(
        SimpleNamespace(group_size=group_size, samples_per_round=samples_per_round, max_rounds=max_rounds)
    )


def first(in_flight):
    return in_flight[:1]


def everything(in_flight):
    return in_flight


def summary(pool, strategy):
    group = make_group(pool, strategy, normalize_by_std=False)
    tokens = [response.tokens.tolist() for response in pool.responses]
    return pool.prompt.id, tokens, pool.verdicts, pool.rounds, pool.met, group.kept.tolist(), group.advantages.tolist()


def test_completion_order_decides_nothing():
    strategy, prompts = balance(), make_prompts(6)
    pass_rates = np.array([0.0, 0.05, 0.1, 0.5, 0.9, 1.0])
    rewards = (np.random.default_rng(0).random((6, 32)) < pass_rates[:, None]).astype(float)

    def run(sample):
        return [summary(pool, strategy) for pool in collect(prompts, sample, verifier(rewards), strategy)]

    expected = run(sampler(slots=1000, choose=everything))
    assert {rounds for _, _, _, rounds, *_ in expected} >= {1, 4}
    assert all(tokens == [[row, draw] for draw in range(len(tokens))] for row, (_, tokens, *_) in enumerate(expected))
    for seed in range(100):
        order = np.random.default_rng(seed)

        def some(in_flight, order=order):
            count = order.integers(0, len(in_flight), endpoint=True)
            return [in_flight[index] for index in order.permutation(len(in_flight))[:count]]

        assert run(sampler(slots=int(order.integers(1, 60)), choose=some)) == expected


def test_rules_wait_for_the_whole_round():
    # The first four draws already balance (2 correct, 2 wrong), and one comes back at a time: a rule looked at early
    # would close the prompt with 4 responses.
    rewards = [[1, 0, 1, 0, 0, 0, 0, 0]]
    (pool,) = collect(make_prompts(1), sampler(1, first), verifier(rewards), balance())
    assert len(pool.responses) == 8
    assert pool.met and pool.rounds == 1


def test_rules_see_finished_rounds_only():
    seen = []

    def next_draws(record):
        seen.append((record.prompt.id, record.rounds, record.drawn, record.correct))
        return 0 if record.rounds == 2 else 3

    strategy = strategies.Strategy(next_draws, 6, lambda record: False, strategies.keep_all, pool_baseline=True)
    collect(make_prompts(1), sampler(1, first), verifier([[1, 0, 1, 0, 0, 1]]), strategy)
    assert seen == [("p0", 0, 0, 0), ("p0", 1, 3, 2), ("p0", 2, 6, 3)]


def test_the_last_to_come_back_keeps_its_place():
    # Longest response first drawn: it returns last and still heads the pool.
    (pool,) = collect(make_prompts(1), sampler(8, lambda f: f[-1:]), verifier([[1, 0, 1, 0, 0, 0, 0, 0]]), balance())
    assert [response.draw for response in pool.responses] == list(range(8))
    assert pool.correct.tolist() == [True, False, True] + [False] * 5


def test_next_rounds_go_ahead_of_prompts_not_begun():
    log = []
    strategy = balance(group_size=2, samples_per_round=2, max_rounds=2)
    collect(make_prompts(3), sampler(2, everything, log), verifier(np.zeros((3, 4))), strategy)
    # A queue that appends would take p0, p1, p2 and then p0 again.
    assert [taken[0] for taken in log if taken] == [("p0", 0), ("p0", 2), ("p1", 0), ("p1", 2), ("p2", 0), ("p2", 2)]


def test_next_rounds_go_behind_prompts_begun():
    log = []
    strategy = balance(group_size=2, samples_per_round=2, max_rounds=2)
    collect(make_prompts(3), sampler(3, lambda f: f[:2], log), verifier(np.zeros((3, 4))), strategy)
    # p1 was begun with draw 0; its draw 1 comes first, then the next round of p0, and p2 waits.
    assert log[:2] == [[("p0", 0), ("p0", 1), ("p1", 0)], [("p1", 1), ("p0", 2)]]


def test_no_barrier_between_prompts():
    # Nothing of p1 comes back before p0 has been through all four of its rounds.
    def p0_first(in_flight):
        return [request for request in in_flight if request.prompt.id == "p0"] or in_flight

    order = []

    def verify(pairs):
        order.extend(prompt.id for prompt, _ in pairs[:1])
        return verifier(np.zeros((2, 32)))(pairs)

    collect(make_prompts(2), sampler(16, p0_first), verify, balance())
    assert order == ["p0"] * 4 + ["p1"] * 4


def test_rounds_completed_by_one_yield_are_verified_together_in_prompt_order():
    calls = []

    def verify(pairs):
        calls.append([(prompt.id, response.draw) for prompt, response in pairs])
        return verifier(np.zeros((2, 4)))(pairs)

    strategy = balance(group_size=2, samples_per_round=2, max_rounds=2)
    collect(make_prompts(2), sampler(4, lambda f: f[::-1]), verify, strategy)
    assert calls == [
        [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)],
        [("p0", 2), ("p0", 3), ("p1", 2), ("p1", 3)],
    ]


def test_closed_prompts_are_reported_once_and_progress_after_every_yield():
    closed, progress = [], []

    def sample(queue):
        while requests := queue.take(2):
            yield [respond(request) for request in requests]
            closed.append(queue.closed())
        closed.append(queue.closed())

    strategy = balance(group_size=2, samples_per_round=2, max_rounds=2)
    # p0 needs both rounds, p1 one.
    rewards = [[0, 0, 1, 0], [1, 0, 0, 0]]
    pools = collect(
        make_prompts(2), sample, verifier(rewards), strategy, on_progress=lambda *numbers: progress.append(numbers)
    )
    assert closed == [[], ["p0"], ["p1"], []]
    assert progress == [(0, 2), (1, 4), (2, 6)]
    assert [pool.rounds for pool in pools] == [2, 1]


def test_an_unmet_rule_is_said():
    pools = collect(make_prompts(2), sampler(8, everything), verifier([[0] * 32, [0, 0, 1, 1] * 8]), balance())
    assert [(pool.met, pool.rounds) for pool in pools] == [(False, 4), (True, 1)]


def unasked(queue):
    yield [respond(SimpleNamespace(prompt=SimpleNamespace(id="p9"), draw=0))]


def never_taken(queue):
    yield [respond(request) for request in queue.take(1)]
    yield [respond(SimpleNamespace(prompt=SimpleNamespace(id="p0"), draw=1))]


def twice(queue):
    responses = [respond(request) for request in queue.take(2)]
    yield responses[:1]
    yield responses[:1]


def after_closing(queue):
    responses = [respond(request) for request in queue.take(2)]
    yield responses
    yield responses[1:]


def loses_one(queue):
    yield [respond(request) for request in queue.take(4)[1:]]


def stops_early(queue):
    yield [respond(request) for request in queue.take(2)]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (unasked, "draw 0 of prompt 'p9' unasked"),
        (never_taken, "draw 1 of prompt 'p0' unasked"),
        (twice, "draw 0 of prompt 'p0' twice"),
        (after_closing, "draw 1 of prompt 'p0' twice"),
        (loses_one, r"1 requests taken and not returned \(first: draw 0 of prompt 'p0'\) and 0 not taken"),
        (stops_early, "0 requests taken and not returned and 2 not taken"),
        (lambda queue: iter(()), "0 requests taken and not returned and 4 not taken"),
    ],
)
def test_a_sampler_that_loses_or_invents_is_refused(sample, message):
    with pytest.raises(RuntimeError, match=message):
        collect(make_prompts(2), sample, verifier(np.zeros((2, 2))), strategies.fixed(2))


@pytest.mark.parametrize("change", [lambda verdicts: verdicts[1:], lambda verdicts: [*verdicts, Verdict(True, 1.0)]])
def test_the_wrong_number_of_verdicts_is_refused(change):
    verify = verifier(np.zeros((1, 2)))
    with pytest.raises(RuntimeError, match=r"returned [13] verdicts for 2 responses"):
        collect(make_prompts(1), sampler(2, everything), lambda pairs: change(verify(pairs)), strategies.fixed(2))


def test_repeated_prompt_ids_are_refused():
    prompts = make_prompts(3)
    with pytest.raises(ValueError, match="2 prompt ids are used more than once, 'p1' first"):
        collect([*prompts, prompts[1], prompts[2]], sampler(1, first), verifier([]), strategies.fixed(2))


@pytest.mark.parametrize("size", [0, -1, 5])
def test_a_strategy_that_breaks_its_bounds_is_refused(size):
    strategy = strategies.Strategy(lambda record: size, 4, lambda record: True, strategies.keep_all, False)
    with pytest.raises(ValueError, match=f"asks for {size} more responses .* max_draws = 4"):
        collect(make_prompts(1), sampler(1, first), verifier([]), strategy)


def test_a_rule_that_never_stops_is_stopped():
    strategy = strategies.Strategy(lambda record: 2, 4, lambda record: False, strategies.keep_all, False)
    with pytest.raises(ValueError, match="2 more responses of prompt 'p0' after 2 rounds and 4 responses"):
        collect(make_prompts(1), sampler(2, everything), verifier(np.zeros((1, 9))), strategy)

"""The collection loop under scripted samplers, which take and return in every order that a real one might."""

import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies, verification
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.collect import CarriedRollouts, CollectOptions, collect
from reinforce_ada_jax.collection.serialization import partial_from_text, partial_to_text
from reinforce_ada_jax.types import Prefetch, Prompt, Response, Verdict
from tests import standins


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


def build(strategy: str, group_size=4, samples_per_round=8, max_rounds=4, **settings) -> strategies.Strategy:
    sizes = {"group_size": group_size, "samples_per_round": samples_per_round, "max_rounds": max_rounds}
    return strategies.build(SimpleNamespace(strategy=strategy, **sizes, **settings))


balance = functools.partial(build, "balance")


def one_by_one(max_rounds):
    """Rounds of one response, until one is right and one wrong."""

    def met(progress):
        return 0 < progress.correct < progress.drawn

    return strategies.Strategy(
        next_draws=strategies.until(met, 1, max_rounds),
        met=met,
        keep=strategies.keep_all,
        max_draws=max_rounds,
        max_kept=max_rounds,
    )


def scripted(prompts, sample, rewards, strategy, on_progress=None, carried=None, **options):
    """The pools of a collection with these rewards; `carried` has fields of CarriedRollouts, `options` the options."""
    carried = CarriedRollouts(**carried or {})
    options = CollectOptions(**options)
    return collect(prompts, sample, verifier(rewards), strategy, options, carried=carried, on_progress=on_progress)


def first(in_flight):
    return in_flight[:1]


def everything(in_flight):
    return in_flight


def summary(pool, strategy):
    group = make_group(pool, strategy)
    tokens = [response.tokens.tolist() for response in pool.responses]
    drawn = pool.prompt.id, tokens, pool.verdicts, pool.rounds, pool.met, pool.estimate, pool.round_sizes
    return *drawn, group.kept.tolist(), group.advantages.tolist()


# Each strategy, and all features: a plan, replacements, a continue probability, weights, a limit that isn't reached.
STRATEGIES = {
    "grpo": build("grpo"),
    "positive": build("positive", objective="power"),
    "balance": build("balance", objective="log", keep="pool"),
    "estimate": build("estimate", objective="log", baseline="leave_one_out"),
    "dapo": build("dapo", normalize_by_std=True),
    "ngu": build("ngu", retry_probability=0.7, max_draws=0),
}
PASS_RATES = np.array([0.0, 0.05, 0.1, 0.5, 0.9, 1.0, 0.3, 0.0, 0.2, 1.0, 0.6, 0.4])


class RandomlyDone(Future):
    """Verdicts whose arrival is random: `done` is True half of the time."""

    def __init__(self, verdicts, order):
        super().__init__()
        self.set_result(verdicts)
        self._order = order

    def done(self):
        return self._order.random() < 0.5


# With a barrier and without one in turn; all others are slow.
@pytest.mark.parametrize(
    ("name", "barrier"),
    [
        pytest.param(name, barrier, marks=[pytest.mark.slow] * (barrier == (number % 2 > 0)))
        for number, name in enumerate(STRATEGIES)
        for barrier in (False, True)
    ],
)
def test_completion_order_decides_nothing(name, barrier):
    strategy, prompts = STRATEGIES[name], make_prompts(12)
    wanted = 3 if strategy.extra_batches else 12
    rewards = (np.random.default_rng(0).random((12, 200)) < PASS_RATES[:, None]).astype(float)
    grade = verifier(rewards)

    def run(sample, verify=grade, **options):
        pools = collect(
            prompts[:wanted],
            sample,
            verify,
            strategy,
            CollectOptions(
                replacements=prompts[wanted:],
                estimate_fn=lambda prompts: PASS_RATES[: len(prompts)],
                seed=3,
                iteration=2,
                **options,
            ),
        )
        return [summary(pool, strategy) for pool in pools]

    expected = run(sampler(slots=1000, choose=everything))
    assert all(tokens == [[row, draw] for draw in range(len(tokens))] for row, (_, tokens, *_) in enumerate(expected))
    # Of groups of four only p2, p3, p10 and p11 are mixed: the third that dapo keeps is p10. A retry makes p8
    # mixed, too.
    assert len(expected) == {"dapo": 11, "ngu": 9}.get(name, 12)
    if name in ("positive", "balance", "ngu"):
        assert {rounds for _, _, _, rounds, *_ in expected} >= {1, 4 if name != "ngu" else 7}
    for seed in range(40):
        order = np.random.default_rng(seed)

        def some(in_flight, order=order):
            count = order.integers(0, len(in_flight), endpoint=True)
            return [in_flight[index] for index in order.permutation(len(in_flight))[:count]]

        slots, deterministic = int(order.integers(1, 60)), bool(seed % 2)
        assert run(sampler(slots, some), barrier=barrier) == expected
        later = lambda pairs, order=order: RandomlyDone(grade(pairs), order)  # noqa: E731
        assert run(sampler(slots, some), later, barrier=barrier, deterministic=deterministic) == expected


@pytest.mark.parametrize("seed", range(20))
def test_replacements_are_the_shortest_beginning_that_keeps_enough(seed):
    # Any prompt may finish first: the same prompts, in their order, no more than needed.
    order = np.random.default_rng(seed)
    strategy, rewards = build("dapo", group_size=2), order.integers(0, 2, (30, 2)).astype(float)
    kept = rewards[:, 0] != rewards[:, 1]
    enough = [count for count in range(8, 31) if kept[:count].sum() >= 8]
    some = lambda in_flight: [in_flight[index] for index in order.permutation(len(in_flight))[:2]]  # noqa: E731
    prompts = make_prompts(30)
    pools = scripted(prompts[:8], sampler(5, some), rewards, strategy, replacements=prompts[8:])
    assert [pool.prompt.id for pool in pools] == [f"p{row}" for row in range(enough[0] if enough else 30)]


def test_replaced_prompts_close_and_others_count_once():
    # p0 is dropped and p2 comes for it; progress counts prompts closed of those asked for and come since.
    progress, closed = [], []

    def sample(queue):
        while requests := queue.take(2):
            yield [respond(request) for request in requests]
            closed.append(queue.closed())

    rewards = [[0, 0], [0, 1], [1, 0], [1, 0]]
    prompts = make_prompts(4)
    strategy, on_progress = build("dapo", group_size=2), lambda *numbers: progress.append(numbers)
    scripted(prompts[:2], sample, rewards, strategy, on_progress, replacements=prompts[2:])
    assert closed == [["p0"], ["p1"], ["p2"]]
    assert progress == [(1, 2), (2, 4), (3, 6)]


def test_rules_wait_for_the_whole_round():
    # The first four draws already balance (2 correct, 2 wrong), and one comes back at a time: a rule looked at early
    # would close the prompt with 4 responses.
    rewards = [[1, 0, 1, 0, 0, 0, 0, 0]]
    (pool,) = collect(make_prompts(1), sampler(1, first), verifier(rewards), balance())
    assert len(pool.responses) == 8
    assert pool.met and pool.rounds == 1


def test_a_failure_improves_on_nothing():
    # Rounds of two: wrong, then failed, then right. With 0 for failures the second round was above the first one's -1.
    script = [Verdict(False, -1.0)] * 2 + [Verdict(False, 0.0, "timeout")] * 2 + [Verdict(True, 1.0)] * 2

    def verify(pairs):
        return [script[response.draw] for _, response in pairs]

    strategy = build("ngu", group_size=2, retry_probability=1.0, max_draws=16)
    (pool,) = collect(make_prompts(1), sampler(2, everything), verify, strategy)
    assert pool.round_sizes == (2, 2, 2) and pool.met
    assert pool.rewards.tolist() == [-1.0, -1.0, -1.0, -1.0, 1.0, 1.0]


def test_rules_see_finished_rounds_only():
    seen = []

    def next_draws(progress):
        seen.append((progress.prompt.id, progress.rounds, progress.drawn, progress.correct))
        return 0 if progress.rounds == 2 else 3

    strategy = strategies.Strategy(next_draws, lambda progress: False, strategies.keep_all, max_draws=6, max_kept=6)
    collect(make_prompts(1), sampler(1, first), verifier([[1, 0, 1, 0, 0, 1]]), strategy)
    assert seen == [("p0", 0, 0, 0), ("p0", 1, 3, 2), ("p0", 2, 6, 3)]


def test_the_last_to_come_back_keeps_its_place():
    # Longest response first drawn: it returns last and still heads the pool.
    (pool,) = collect(make_prompts(1), sampler(8, lambda f: f[-1:]), verifier([[1, 0, 1, 0, 0, 0, 0, 0]]), balance())
    assert [response.draw for response in pool.responses] == list(range(8))
    assert pool.correct.tolist() == [True, False, True] + [False] * 5


def test_prompts_that_have_not_started_go_before_next_rounds():
    log = []
    strategy = balance(group_size=2, samples_per_round=2, max_rounds=3)
    collect(make_prompts(3), sampler(2, everything, log), verifier(np.zeros((3, 6))), strategy)
    # A prompt that has not started has the longest chain of rounds left. Finishing p0 first would leave p2 to go
    # through its three rounds alone.
    rounds = [taken[0] for taken in log if taken]
    assert rounds == [(f"p{row}", draw) for draw in (0, 2, 4) for row in range(3)]


def test_fewer_finished_rounds_go_first_even_if_they_come_later():
    strategy, then = one_by_one(max_rounds=3), []

    def sample(queue):
        (p0,), (p1,) = queue.take(1), queue.take(1)
        yield [respond(p0)]
        yield [respond(p0) for p0 in queue.take(1)]  # the third round of p0 waits
        yield [respond(p1)]  # and the second one of p1
        while taken := queue.take(1):
            then.extend((request.prompt.id, request.draw) for request in taken)
            yield [respond(request) for request in taken]

    collect(make_prompts(2), sample, verifier(np.zeros((2, 3))), strategy)
    assert then == [("p1", 1), ("p0", 2), ("p1", 2)]


def first_prompt(in_flight):
    first_id = min(request.prompt.id for request in in_flight)
    return [request for request in in_flight if request.prompt.id == first_id]


def barrier_and_not(rewards, slots, strategy):
    """Pools of both ways, and the rounds in the order in which they were taken."""
    logs = [], []
    pools = [
        scripted(make_prompts(len(rewards)), sampler(slots, first_prompt, log), rewards, strategy, barrier=barrier)
        for barrier, log in zip((False, True), logs, strict=True)
    ]
    rounds = [[draw // 2 for taken in log for _, draw in taken] for log in logs]
    return pools, rounds


def test_a_barrier_keeps_all_prompts_in_step_and_changes_no_pool():
    rewards = (np.random.default_rng(0).random((6, 8)) < np.linspace(0, 1, 6)[:, None]).astype(float)
    strategy = balance(group_size=2, samples_per_round=2, max_rounds=4)
    # Each prompt's draws come back before the next prompt's: without a barrier its later rounds start meanwhile.
    pools, rounds = barrier_and_not(rewards, 16, strategy)
    assert [summary(pool, strategy) for pool in pools[0]] == [summary(pool, strategy) for pool in pools[1]]
    assert sorted(rounds[0]) == sorted(rounds[1]) == rounds[1] != rounds[0]


def test_behind_the_barrier_nothing_starts_before_everything_is_back():
    in_flight_at_take = []
    strategy = balance(group_size=2, samples_per_round=2, max_rounds=2)

    def sample(queue):
        in_flight = []
        while True:
            taken = queue.take(10)
            if taken:
                in_flight_at_take.append(len(in_flight))
            in_flight += taken
            if not in_flight:
                return
            yield [respond(in_flight.pop(0))]

    collect(make_prompts(2), sample, verifier(np.zeros((2, 4))), strategy, CollectOptions(barrier=True))
    assert in_flight_at_take == [0, 0]
    in_flight_at_take.clear()
    collect(make_prompts(2), sample, verifier(np.zeros((2, 4))), strategy)
    assert in_flight_at_take == [0, 2, 2]


class Later:
    """A verifier whose verdicts arrive when the test decides."""

    def __init__(self, rewards):
        self.verify, self.calls = verifier(rewards), []

    def __call__(self, pairs):
        future = Future()
        self.calls.append((future, pairs))
        return future

    def answer(self, call):
        future, pairs = self.calls[call]
        future.set_result(self.verify(pairs))


def test_verification_beside_sampling_gives_the_same_pools():
    rewards = (np.random.default_rng(0).random((6, 32)) < np.linspace(0, 1, 6)[:, None]).astype(float)
    strategy, grade = balance(), verifier(rewards)
    expected = [summary(pool, strategy) for pool in collect(make_prompts(6), sampler(9, first), grade, strategy)]
    with ThreadPoolExecutor(1) as thread:

        def verify(pairs):
            return thread.submit(lambda: time.sleep(0.001 * (len(pairs) % 3)) or grade(pairs))

        for deterministic in (True, False):
            pools = collect(
                make_prompts(6), sampler(9, first), verify, strategy, CollectOptions(deterministic=deterministic)
            )
            assert [summary(pool, strategy) for pool in pools] == expected


def drive(verify, *, deterministic):
    """A collection of two prompts, one round of one draw after another, and a sampler that stops at every yield."""
    strategy = one_by_one(max_rounds=2)
    log = []

    def sample(queue):
        (one,), (other,) = queue.take(1), queue.take(1)
        yield [respond(one)]
        log.append(len(queue.take(1)))  # p0's verdict has arrived, p1 is in flight
        yield []
        log.append(len(queue.take(1)))
        yield [respond(other)]
        while taken := queue.take(1):
            log.append(len(taken))
            yield [respond(taken[0])]

    return strategy, sample, log


def test_verdicts_are_read_when_they_arrive():
    verify = Later(np.zeros((2, 2)))
    strategy, sample, log = drive(verify, deterministic=False)
    at_once = lambda pairs: (verify(pairs), verify.answer(-1))[0]  # noqa: E731
    with pytest.raises(RuntimeError, match="1 requests taken and not returned"):
        collect(make_prompts(2), sample, at_once, strategy, CollectOptions(deterministic=False))
    assert log[:2] == [1, 0]


def test_deterministic_verdicts_are_read_at_the_next_yield():
    verify = Later(np.zeros((2, 2)))
    strategy, sample, log = drive(verify, deterministic=True)
    at_once = lambda pairs: (verify(pairs), verify.answer(-1))[0]  # noqa: E731
    with pytest.raises(RuntimeError, match="1 requests taken and not returned"):
        collect(make_prompts(2), sample, at_once, strategy)
    # Not at the take after the yield that completed the round, though the verdict had arrived; one yield later.
    assert log[:2] == [0, 1]


def test_a_verifier_that_fails_beside_sampling_ends_the_collection():
    def verify(pairs):
        future = Future()
        future.set_exception(RuntimeError("no worker starts"))
        return future

    with pytest.raises(RuntimeError, match="no worker starts"):
        collect(make_prompts(2), sampler(2, everything), verify, balance())


def filling(slots, log):
    """Fills its slots with the next collection's requests where its own run out; one response a yield."""

    def sample(queue):
        in_flight = []
        while True:
            taken = queue.take(slots - len(in_flight))
            taken += queue.take_prefetch(slots - len(in_flight) - len(taken))
            log.extend((request.prompt.id, request.draw, request.prefetch) for request in taken)
            in_flight += taken
            if not in_flight:
                return
            yield [respond(in_flight.pop(0))]

    return sample


def test_idle_slots_start_the_next_collection_which_resumes_from_there():
    rewards = (np.random.default_rng(1).random((8, 32)) < np.linspace(0, 1, 8)[:, None]).astype(float)
    strategy, prompts, log = balance(), make_prompts(8), []
    expected = collect(prompts, sampler(9, first), verifier(rewards), strategy)
    prefetch = Prefetch(prompts[4:])
    now = scripted(prompts[:4], filling(12, log), rewards, strategy, carried={"prefetch": prefetch})
    drawn = {id: len([1 for response in partial.responses if response]) for id, partial in prefetch.partial.items()}
    assert sum(drawn.values()) == sum(is_prefetch for *_, is_prefetch in log) > 0
    assert all(is_prefetch == (id >= "p4") for id, _, is_prefetch in log)
    again = []
    saved = partial_from_text(partial_to_text(prefetch.partial))
    then = scripted(prompts[4:], filling(12, again), rewards, strategy, carried={"partial": saved})
    assert not {(id, draw) for id, draw, _ in log} & {(id, draw) for id, draw, _ in again}
    assert [summary(pool, strategy) for pool in now + then] == [summary(pool, strategy) for pool in expected]


@pytest.mark.parametrize("deterministic", [False, True])
def test_who_waits_for_verdicts_is_asked_all_the_while(monkeypatch, deterministic):
    standins.constants(monkeypatch, verification, WAIT_S=0.01)
    asked, broken_off = [], {}

    def on_progress(closed, drawn):
        asked.append((closed, drawn))
        if len(asked) == 4:
            raise KeyError("asked to end")

    with pytest.raises(KeyError):
        collect(
            make_prompts(1), sampler(4, everything), lambda pairs: Future(), strategies.fixed(4),
            CollectOptions(deterministic=deterministic), carried=CarriedRollouts(broken_off=broken_off),
            on_progress=on_progress,
        )  # fmt: skip
    assert asked == [(0, 4)] * 4, "once for the yield"
    # Its responses are graded by the collection that goes on.
    rewards, carried = [1.0, 0.0, 0.0, 1.0], {"partial": broken_off}
    (pool,) = scripted(make_prompts(1), sampler(4, everything), [rewards], strategies.fixed(4), carried=carried)
    assert pool.rewards.tolist() == rewards


def breaking_off(sample, yields):
    """The sampler, until it has yielded this many times."""

    def broken(queue):
        for number, responses in enumerate(sample(queue)):
            if number == yields:
                raise KeyError("asked to end")
            yield responses

    return broken


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("name", ["balance", "positive", "estimate", "dapo", "ngu"])
def test_a_collection_that_is_broken_off_goes_on_without_a_response_lost(name, barrier, speculative):
    rewards = (np.random.default_rng(1).random((20, 32)) < np.linspace(0, 1, 20)[:, None]).astype(float)
    strategy, prompts = build(name), make_prompts(20)
    replacements = prompts[12:] if strategy.extra_batches else ()
    drawn = []

    def collected(sample, partial, broken_off):
        carried = {"partial": partial, "broken_off": broken_off}
        options = {"replacements": replacements, "barrier": barrier, "speculative": speculative}
        return scripted(prompts[:12], sample, rewards, strategy, carried=carried, **options)

    expected = collected(sampler(9, first), {}, {})
    partial = {}
    for yields in (0, 5, 7, 11):  # one after the other: each goes on from the one before
        log, broken_off = [], {}
        with pytest.raises(KeyError):
            collected(breaking_off(sampler(9, first, log), yields), partial, broken_off)
        kept = {(id, r.draw) for id, rollouts in broken_off.items() for r in rollouts.responses if r is not None}
        assert len(kept) == sum(drawn) + yields, "everything that was yielded"
        drawn.append(yields)
        partial = partial_from_text(partial_to_text(broken_off))
    log = []
    pools = collected(sampler(9, first, log), partial, {})
    assert not kept & {address for taken in log for address in taken}
    assert [summary(pool, strategy) for pool in pools] == [summary(pool, strategy) for pool in expected]


def test_another_reward_grades_prefetched_draws_again():
    # Wrong for the first reward, so rounds follow each other; for the second one some prompts stop after the first.
    rewards = (np.random.default_rng(2).random((8, 32)) < np.linspace(0, 1, 8)[:, None]).astype(float)
    strategy, prompts, log, again = balance(group_size=2, samples_per_round=2), make_prompts(8), [], []
    prefetch = Prefetch(prompts[4:])
    scripted(prompts[:4], filling(24, log), np.zeros((8, 32)), strategy, carried={"prefetch": prefetch})
    assert any(partial.rounds > 1 for partial in prefetch.partial.values())
    partial = {name: rollouts.ungraded() for name, rollouts in prefetch.partial.items()}
    pools = scripted(prompts[4:], filling(24, again), rewards, strategy, carried={"partial": partial})
    expected = collect(prompts[4:], sampler(9, first), verifier(rewards), strategy)
    assert [summary(pool, strategy) for pool in pools] == [summary(pool, strategy) for pool in expected]
    assert any(pool.discarded for pool in pools)
    assert not {(id, draw) for id, draw, _ in log} & {(id, draw) for id, draw, _ in again}, "no draw is made twice"


def test_nothing_is_prefetched_once_the_last_prompt_is_closed():
    taken = []

    def sample(queue):
        for request in queue.take(10):
            yield [respond(request)]
        taken.extend(queue.take_prefetch(10))

    now, later = make_prompts(1), Prefetch(make_prompts(2)[1:])
    scripted(now, sample, np.zeros((2, 1)), strategies.fixed(1), carried={"prefetch": later})
    assert taken == []


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
    assert calls == [[("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)], [("p0", 2), ("p0", 3), ("p1", 2), ("p1", 3)]]


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
    pools = scripted(make_prompts(2), sample, rewards, strategy, lambda *numbers: progress.append(numbers))
    assert closed == [[], ["p1"], ["p0"], []]
    assert progress == [(0, 2), (1, 4), (2, 6)]
    assert [pool.rounds for pool in pools] == [2, 1]


def test_pools_tell_whether_the_rule_was_met():
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
    with pytest.raises(ValueError, match="1 prompt ids are used more than once, 'p0' first"):
        collect(prompts, sampler(1, first), verifier([]), strategies.fixed(2), CollectOptions(replacements=prompts[:1]))


@pytest.mark.parametrize("size", [0, -1, 5])
def test_a_strategy_that_breaks_its_bounds_is_refused(size):
    strategy = strategies.Strategy(lambda progress: size, lambda progress: True, strategies.keep_all, 4, max_kept=4)
    with pytest.raises(ValueError, match=f"asks for {size} more responses .* max_draws = 4"):
        collect(make_prompts(1), sampler(1, first), verifier([]), strategy)


def test_a_rule_that_never_stops_is_stopped():
    strategy = strategies.Strategy(lambda progress: 2, lambda progress: False, strategies.keep_all, 4, max_kept=4)
    with pytest.raises(ValueError, match="2 more responses of prompt 'p0' after 2 rounds and 4 responses"):
        collect(make_prompts(1), sampler(2, everything), verifier(np.zeros((1, 9))), strategy)

"""Trajectories under scripted samplers and environments: turns in any order, and one response for each draw."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies, trajectories
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.collect import CarriedRollouts, collect
from reinforce_ada_jax.collection.request_queue import CollectionQueue
from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes, to_bytes
from reinforce_ada_jax.collection.trajectories import Trajectories
from reinforce_ada_jax.types import Prompt, Request, Response, Verdict
from tests import standins

PROMPTS = [Prompt(f"p{row}", "", "", np.array([row, row], np.int32)) for row in range(3)]
GRPO = strategies.build(SimpleNamespace(strategy="grpo", group_size=2, samples_per_round=2, max_rounds=1))
BALANCE = strategies.build(SimpleNamespace(strategy="balance", group_size=2, samples_per_round=2, max_rounds=3))


def turn_number(request) -> int:
    """Turn 0 has the prompt's own id, turn k the id "p0#DRAW.k"."""
    turn = request.prompt.id.partition("#")[2]
    return int(turn.split(".")[1]) if turn else 0


def turn_of(request, *, truncated=False) -> Response:
    """A turn whose tokens are its address: row, draw, number."""
    row = int(request.prompt.id[1])
    tokens = np.array([row, request.draw, turn_number(request)], np.int32)
    return Response(request.prompt.id, request.draw, tokens, -1.0 - tokens.astype(np.float32), truncated, 7)


class Countdown:
    """Answers a trajectory with the token 9 until `last_turn(row, draw)`, and gives that number as its reward."""

    def __init__(self, last_turn, *, at_once=True):
        self.last_turn, self.at_once = last_turn, at_once
        self.waiting, self.ended, self.log = [], [], []

    def begin(self, prompt, draw):
        return prompt.id, draw

    def submit(self, trajectory, tokens):
        answer = Future()
        self.waiting.append((answer, tokens))
        if self.at_once:
            self.answer(0)
        return answer

    def answer(self, index):
        answer, tokens = self.waiting.pop(index)
        answer.set_result(tokens)

    def read(self, trajectory, answer):
        row, draw, turn = answer.tolist()
        assert trajectory == (f"p{row}", draw)
        self.log.append((row, draw, turn))
        if turn < self.last_turn(row, draw):
            return np.array([9, 9], np.int32)
        return Verdict(turn > 1, float(turn))

    def end(self, trajectory):
        self.ended.append(trajectory)


def sampler(slots, choose, taken=None, closed=None):
    def sample(queue):
        in_flight = []
        while True:
            requests = queue.take(slots - len(in_flight))
            if closed is not None:
                closed.append(queue.closed())
            if taken is not None:
                found = [(each.prompt.id, each.draw, each.prompt.tokens.tolist(), each.continues) for each in requests]
                taken.extend(found)
            in_flight += requests
            if not in_flight:
                return
            done = choose(in_flight)
            in_flight = [request for request in in_flight if request not in done]
            yield [turn_of(request) for request in done]

    return sample


def draw(environment, sample, strategy=GRPO, prompts=PROMPTS, *, partial=None, broken_off=None, asked=None, **settings):
    """Pools of the prompts; the collection is broken off when it has asked for progress `asked` times."""
    limits = {"max_turns": 4, "max_tokens": 100, "max_begun": 16, "deterministic": True} | settings
    turns, calls = Trajectories(environment, **limits), []

    def on_progress(closed, drawn):
        calls.append((closed, drawn))
        if len(calls) == asked:
            raise KeyError("asked to end")

    return collect(
        prompts, sample, turns.verdicts, strategy,
        carried=CarriedRollouts(partial or {}, broken_off={} if broken_off is None else broken_off), turns=turns,
        on_progress=on_progress,
    )  # fmt: skip


def described(pools):
    return [
        [(each.tokens.tolist(), each.segments, each.truncated, verdict.reward, verdict.reason)
         for each, verdict in zip(pool.responses, pool.verdicts, strict=True)]
        for pool in pools
    ]  # fmt: skip


def first(in_flight):
    return in_flight[:1]


def last(in_flight):
    return in_flight[-1:]


def all_of(in_flight):
    return in_flight


def test_turns_are_one_response_with_the_environments_tokens_between_them():
    taken, closed = [], []
    environment = Countdown(lambda row, draw: 2 * draw)
    (pool,) = draw(environment, sampler(8, all_of, taken, closed), prompts=PROMPTS[1:2])
    one, three = pool.responses
    assert one.tokens.tolist() == [1, 0, 0] and one.segments == ()
    assert three.tokens.tolist() == [1, 1, 0, 9, 9, 1, 1, 1, 9, 9, 1, 1, 2]
    assert three.segments == (3, 2, 3, 2, 3)
    assert three.logprobs.tolist() == [-2, -2, -1, 0, 0, -2, -2, -2, 0, 0, -2, -2, -3]
    assert (three.prompt_id, three.draw, three.policy_version, three.truncated) == ("p1", 1, 7, False)
    assert [verdict.reward for verdict in pool.verdicts] == [0.0, 2.0]
    # The prompt of a turn is all that was said; turns 2 to 4 of at most 4 may be followed, the last one may not.
    assert taken == [
        ("p1", 0, [1, 1], "p1#0.1"),
        ("p1", 1, [1, 1], "p1#1.1"),
        ("p1#1.1", 1, [1, 1, 1, 1, 0, 9, 9], "p1#1.2"),
        ("p1#1.2", 1, [1, 1, 1, 1, 0, 9, 9, 1, 1, 1, 9, 9], "p1#1.3"),
    ]
    assert closed[-1] == ["p1#1.1", "p1#1.2", "p1#1.3", "p1"]
    assert environment.ended == [("p1", 0), ("p1", 1)]


@pytest.mark.parametrize("slots", [1, 2, 16])
@pytest.mark.parametrize("choose", [first, last, all_of])
@pytest.mark.parametrize("strategy", [GRPO, BALANCE])
def test_slots_and_order_change_nothing(slots, choose, strategy):
    def last_turn(row, draw):
        return (row + draw) % 3

    expected = described(draw(Countdown(last_turn), sampler(16, all_of), strategy))
    assert described(draw(Countdown(last_turn), sampler(slots, choose), strategy)) == expected
    assert expected[0][:2] == [
        ([0, 0, 0], (), False, 0.0, ""),
        ([0, 1, 0, 9, 9, 0, 1, 1], (3, 2, 3), False, 1.0, ""),
    ]


def test_a_collection_that_is_broken_off_goes_on_from_its_finished_rounds():
    def last_turn(row, draw):
        return (row + draw) % 3

    expected = described(draw(Countdown(last_turn), sampler(16, all_of), BALANCE))
    kept, taken = {}, []
    with pytest.raises(KeyError):
        draw(Countdown(last_turn), sampler(3, last), BALANCE, broken_off=kept, asked=9)
    assert sum(len(rollouts.responses) for rollouts in kept.values()) == sum(len(r.verdicts) for r in kept.values()) > 0
    kept = from_bytes(to_bytes(CollectedShard([], kept)), ()).partial  # as a file keeps them
    pools = draw(Countdown(last_turn), sampler(3, last, taken), BALANCE, partial=kept)
    assert described(pools) == expected
    drawn = {(name, number) for name, number, *_ in taken}
    assert not {(name, r.draw) for name, rollouts in kept.items() for r in rollouts.responses} & drawn


@pytest.mark.parametrize("deterministic", [False, True])
def test_who_waits_for_answers_is_asked_all_the_while(monkeypatch, deterministic):
    standins.constants(monkeypatch, trajectories, WAIT_S=0.01)
    silent = Countdown(lambda row, draw: 1, at_once=False)
    with pytest.raises(KeyError):
        draw(silent, iter_once, asked=3, deterministic=deterministic)
    assert len(silent.waiting) == 2, "both turns of the first prompt"


def iter_once(queue):
    """Takes two requests, returns both, and waits for what follows."""
    yield [turn_of(request) for request in queue.take(2)]
    queue.wait()


def test_begun_trajectories_precede_new_ones():
    taken = []
    draw(Countdown(lambda row, draw: 1), sampler(2, all_of, taken), prompts=PROMPTS[:2], deterministic=False)
    assert [each[0] for each in taken] == ["p0", "p0", "p0#0.1", "p0#1.1", "p1", "p1", "p1#0.1", "p1#1.1"]


def test_no_more_trajectories_begin_than_there_is_room_for():
    alive = []
    environment = Countdown(lambda row, draw: 1)

    def choose(in_flight):
        alive.append(len({(each.prompt.id.partition("#")[0], each.draw) for each in in_flight}))
        return in_flight[:1]

    pools = draw(environment, sampler(16, choose), max_begun=2)
    assert max(alive) == 2
    assert described(pools) == described(draw(Countdown(lambda row, draw: 1), sampler(16, all_of)))


@pytest.mark.parametrize(
    ("limits", "tokens", "reason", "truncated"),
    [
        ({"max_turns": 2}, 8, "max_turns", False),
        ({"max_turns": 1}, 3, "max_turns", False),
        ({"max_tokens": 9}, 8, "truncated", True),  # 3 + 2 + 3, and 2 more leave no token for the model
        ({"max_tokens": 11}, 13, "", False),  # 10 + 3: the sampler holds the limit of a turn
    ],
)
def test_limits_end_a_trajectory_with_reward_0_and_a_reason(limits, tokens, reason, truncated):
    pools = draw(Countdown(lambda row, draw: 2), sampler(1, first), prompts=PROMPTS[:1], **limits)
    response, verdict = pools[0].responses[0], pools[0].verdicts[0]
    assert (len(response.tokens), verdict.reason, response.truncated) == (tokens, reason, truncated)
    assert verdict.reward == (0.0 if reason else 2.0)


@pytest.mark.parametrize(
    ("limits", "cut", "reason"),
    [({"max_turns": 2}, 9, "max_turns"), ({"max_tokens": 9}, 9, "truncated"), ({}, 1, "truncated")],
)
def test_a_trajectory_that_a_limit_ends_is_no_better_than_a_wrong_one(limits, cut, reason):
    class Strict(Countdown):
        def read(self, trajectory, answer):
            found = super().read(trajectory, answer)
            return Verdict(False, -1.0) if isinstance(found, Verdict) else found

    def sample(queue):
        while requests := queue.take(4):
            yield [turn_of(request, truncated=turn_number(request) == cut) for request in requests]

    # Draw 0 is wrong after one turn, draw 1 would need three. With 0 for the limit their advantages were -1/2 and 1/2.
    pool = draw(Strict(lambda row, draw: 2 * draw), sample, prompts=PROMPTS[:1], **limits)[0]
    assert [verdict.reason for verdict in pool.verdicts] == ["", reason]
    assert make_group(pool, GRPO).advantages.tolist() == [0.0, 0.0]


def test_a_turn_that_is_cut_ends_the_trajectory():
    def sample(queue):
        while requests := queue.take(4):
            yield [turn_of(request, truncated=turn_number(request) == 1) for request in requests]

    environment = Countdown(lambda row, draw: 3)
    pools = draw(environment, sample, prompts=PROMPTS[:1])
    assert described(pools)[0][0] == ([0, 0, 0, 9, 9, 0, 0, 1], (3, 2, 3), True, 0.0, "truncated")
    assert environment.log == [(0, 0, 0), (0, 1, 0)]  # the environment does not see a cut turn


class Queue(CollectionQueue):
    """A collection that wants two draws of one prompt."""

    def __init__(self, *, prefetch=False):
        self.requests, self.received = [Request(PROMPTS[0], draw, prefetch) for draw in range(2)], []

    def take(self, limit, *, wait=True):
        taken, self.requests = self.requests[:limit], self.requests[limit:]
        return taken

    take_prefetch = take_speculative = lambda self, *_: []

    def wait(self):
        return False

    def awaits_verdicts(self):
        return False

    def closed(self):
        return []

    def receive(self, responses):
        self.received += [(each.prompt_id, each.draw) for each in responses]


@pytest.mark.parametrize("prefetch", [False, True])
def test_all_turns_of_a_trajectory_belong_to_the_iteration_of_its_prompt(prefetch):
    """The sampler draws under the addresses of that iteration."""
    queue = Queue(prefetch=prefetch)
    turns = Trajectories(Countdown(lambda row, draw: 1), max_turns=4, max_tokens=100, max_begun=16, deterministic=True)
    turns.attach(queue)
    began = turns.take(2)
    turns.receive([turn_of(request) for request in began])
    turns.receive([])
    followed = turns.take(2)
    assert [request.prompt.id for request in followed] == ["p0#0.1", "p0#1.1"]
    assert [request.prefetch for request in began + followed] == [prefetch] * 4


@pytest.mark.parametrize("deterministic", [True, False])
def test_early_answers_are_read_at_the_next_yield_where_time_must_not_decide(deterministic):
    environment, queue = Countdown(lambda row, draw: draw, at_once=False), Queue()
    turns = Trajectories(environment, max_turns=4, max_tokens=100, max_begun=16, deterministic=deterministic)
    turns.attach(queue)
    one, two = turns.take(2)
    turns.receive([turn_of(one)])
    environment.answer(0)  # ends the first trajectory, while the second one is at the sampler
    assert turns.take(2) == []
    assert queue.received == ([] if deterministic else [("p0", 0)])
    turns.receive([turn_of(two)])
    assert queue.received == [("p0", 0)]
    assert turns.take(2, wait=False) == [] and turns.awaits_verdicts()
    environment.answer(0)
    (following,) = turns.take(2)  # nothing else is at the sampler, so it waits for the answer
    assert following.prompt.id == "p0#1.1"
    turns.receive([turn_of(following)])
    environment.answer(0)
    assert turns.wait() and not turns.wait()
    assert queue.received == [("p0", 0), ("p0", 1)]
    assert turns.closed() == ["p0#0.1", "p0#1.1", "p0#1.2"]  # turns that were drawn, and the next one of each draw


def test_a_response_that_nobody_asked_for_is_an_error():
    def sample(queue):
        (request,) = queue.take(1)
        yield [turn_of(request), turn_of(request)]

    with pytest.raises(RuntimeError, match="draw 0 of prompt 'p0' unasked"):
        draw(Countdown(lambda row, draw: 0), sample, prompts=PROMPTS[:1])

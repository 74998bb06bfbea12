"""Messages of processes that only draw: what they have so far is stored, and is never taken for a reply."""

import collections
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.serialization import CollectedShard, to_bytes
from reinforce_ada_jax.distributed.signals import Interrupted, Stop
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.training import components, drawing_host
from reinforce_ada_jax.training.drawing_hosts import BREAK_OFF, DRAW, REPLY, SO_FAR, DrawingHosts, Order, Reply
from reinforce_ada_jax.training.sharded_collection import Job, collect_shards
from reinforce_ada_jax.types import PartialRollouts, Pool, Prompt, Response, Verdict
from tests import standins
from tests.running import tiny

PROMPTS = [Prompt(name, "", "", np.zeros(1, np.int32)) for name in "abcd"]
ORDER = Order(action=DRAW, iteration=7, policy_version=5)
EVALUATION = Order(action=DRAW, iteration=7, benchmark="heldout", samples=4)
SHARDS = {2: "ab", 3: "cd"}  # prompts of the processes that only draw


def responses(name, count):
    return tuple(
        Response(name, draw, np.arange(2, dtype=np.int32), np.zeros(2, np.float32), False) for draw in range(count)
    )


def so_far(process, count):
    """Message of a process that has this many responses to each of its prompts."""
    partial = {name: PartialRollouts(responses(name, count), (), 0, (4,)) for name in SHARDS[process]}
    return SO_FAR + to_bytes(CollectedShard([], partial, {"tokens": count}))


def reply(process, *, broken_off=False, failure=""):
    """Reply of a process with four responses to each of its prompts."""
    report = json.dumps(dataclasses.asdict(Reply(0.5, failure))).encode() + b"\n"
    if broken_off:
        return REPLY + report + b"b" + so_far(process, 1)[1:]
    pools = [
        Pool(prompt, responses(prompt.id, 4), (Verdict(True, 1.0),) * 4, 1, True, 0.5, (4,))
        for prompt in PROMPTS if prompt.id in SHARDS[process]
    ]  # fmt: skip
    return REPLY + report + b"c" + to_bytes(CollectedShard(pools, {}, {"tokens": 4}))


class Line:
    """Stands in for `processes`: messages that arrive at their second, and a clock that waiting moves."""

    def __init__(self, patch, arrivals, index=0):
        self.now, self.sent, self.index = 0.0, [], index
        self.arrivals = {process: collections.deque() for process in SHARDS}
        for second, process, message in arrivals:
            self.arrivals[process].append((second, message))
        standins.of_processes(
            patch, drawing=lambda: range(2, 4), total=lambda: 4, is_writer=lambda: index == 0,
            send=lambda process, message: self.sent.append((process, json.loads(message)["action"])),
            has_sent=self.has_sent, receive=self.receive,
        )  # fmt: skip

    def has_sent(self, process):
        return bool(self.arrivals[process]) and self.arrivals[process][0][0] <= self.now

    def receive(self, process, waiting=lambda: None):
        while not self.has_sent(process):
            assert self.arrivals[process], f"process {process} sends nothing more"
            self.now += 1
            waiting()
        return self.arrivals[process].popleft()[1]


class NoEngine(Engine):
    """Stands in for an engine that draws nothing."""

    def __init__(self):
        self.hand_over = True


@pytest.fixture
def hosts():
    verifiers = components.no_verifiers(tiny())
    return DrawingHosts(NoEngine(), verifiers, verifiers)


def collected(hosts, line, stop=None):
    """(what `collect_shards` returns, (second, responses by prompt, counts) of each call of its `store`)."""
    looks = []

    def store(get):
        shard = get()
        looks.append((line.now, {name: len(each.responses) for name, each in shard.partial.items()}, shard.counts))

    job = Job(PROMPTS, strategies.fixed(4), store=store)
    return collect_shards(job, hosts.shards(ORDER, stop or Stop())), looks


ARRIVALS = [
    (30, 2, so_far(2, 1)), (31, 3, so_far(3, 2)), (60, 2, so_far(2, 3)), (70, 3, reply(3)), (75, 2, reply(2)),
]  # fmt: skip


def test_what_processes_have_so_far_is_stored_until_all_have_replied(hosts, monkeypatch):
    line = Line(monkeypatch, ARRIVALS)
    (pools, counts), looks = collected(hosts, line)
    assert [(pool.prompt.id, len(pool.responses)) for pool in pools] == [(name, 4) for name in "abcd"]
    assert counts == {"tokens": 8} and hosts._verifiers.busy_s == 0.5
    assert sorted({second for second, *_ in looks}) == list(range(30, 76)), "nothing before the first message"
    by_second = {second: look for second, *look in looks}
    assert by_second[30] == [{"a": 1, "b": 1}, {"tokens": 1}]
    assert by_second[31] == by_second[59] == [{"a": 1, "b": 1, "c": 2, "d": 2}, {"tokens": 3}]
    assert by_second[60] == by_second[69] == [{"a": 3, "b": 3, "c": 2, "d": 2}, {"tokens": 5}]
    assert by_second[70] == [{"a": 3, "b": 3, "c": 4, "d": 4}, {"tokens": 7}], "of a reply, all of it"


def test_learners_other_than_process_0_get_replies_alone(hosts, monkeypatch):
    line = Line(monkeypatch, [(70, 3, reply(3)), (75, 2, reply(2))], index=1)
    (pools, _), looks = collected(hosts, line)
    assert [pool.prompt.id for pool in pools] == list("abcd") and looks == [] and line.sent == []


def test_messages_of_one_order_do_not_reach_the_next(hosts, monkeypatch):
    """A process that is told to stop just as it has sent what it has: that message is read before its reply."""
    arrivals = [(5, 2, so_far(2, 1)), (5, 2, reply(2)), (5, 3, so_far(3, 2)), (5, 3, reply(3))]
    arrivals += [(80, 3, so_far(3, 3)), (90, 2, reply(2)), (90, 3, reply(3))]
    line = Line(monkeypatch, arrivals)
    collected(hosts, line)
    (pools, _), looks = collected(hosts, line)
    assert [pool.prompt.id for pool in pools] == list("abcd")
    assert looks[0] == (80.0, {"c": 3, "d": 3}, {"tokens": 3}), "and nothing of the first order"


def test_a_request_to_end_is_noticed_between_messages_that_never_pause(hosts, monkeypatch):
    arrivals = [(0, process, so_far(process, 1)) for process in (2, 3) for _ in range(3)]
    line = Line(monkeypatch, [*arrivals, *((0, process, reply(process, broken_off=True)) for process in (2, 3))])
    with pytest.raises(Interrupted):
        collected(hosts, line, Stop(asked=lambda: True))
    told = [(process, "draw") for process in (2, 3)] + [(process, BREAK_OFF) for process in (2, 3)]
    assert line.sent == told, "once"


@pytest.mark.parametrize(
    ("order", "numerics", "expected"),
    [(ORDER, "invariant", [31.0, 62.0, 3000.0]), (ORDER, "fast", []), (EVALUATION, "invariant", [])],
)
def test_a_process_that_only_draws_sends_what_it_has_twice_a_minute(monkeypatch, order, numerics, expected):
    """To process 0; where sending takes long, less often: at most 2 % of the time."""
    clock, sent = SimpleNamespace(seconds=0.0), []

    def send(process, message):
        sent.append((clock.seconds, process, message[:1]))
        clock.seconds += 50 if clock.seconds == 62 else 0  # the next message is due 2,500 s later

    standins.of_processes(monkeypatch, send=send, total=lambda: 2)
    store = drawing_host.store_fn(tiny(**{"model.numerics": numerics}), order, lambda: clock.seconds)
    for clock.seconds in (1.0, 29.0, 31.0, 40.0, 62.0, 2600.0, 3000.0):
        store(lambda: CollectedShard([]))
    assert sent == [(second, 0, SO_FAR) for second in expected]

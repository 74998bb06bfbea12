"""Sessions of several processes launch the same windows, whatever each has to do; threads stand in for processes."""

import dataclasses
import threading
import types
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from bench.simulation import HostArray, Hosts
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CarriedRollouts, CollectOptions, collect
from reinforce_ada_jax.collection.trajectories import Trajectories
from reinforce_ada_jax.distributed.signals import Interrupted
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams
from reinforce_ada_jax.types import Pool, Prefetch, Prompt, Verdict
from tests.sampling import tiny
from tests.sampling.page_engine import PageEngine

OPTIONS = dataclasses.replace(tiny.OPTIONS, slots=4, open_prompts=3, pages=60, check_invariants=True)


class HostEngine(PageEngine):
    """The engine of one host of several, of two replicas."""

    def __init__(self, hosts: Hosts, host: int, options: EngineOptions = OPTIONS):
        super().__init__(options, replicas=2)
        self.spans_processes, self.hosts, self.host, self.votes = True, hosts, host, []

    def decode_window(self, params, state, inputs, vote=0):
        state, outputs = super().decode_window(params, state, inputs)
        self.votes.append(vote)
        number = self.hosts.launch(self.host, vote, int(outputs.counts.decode_steps.max()))
        return state, outputs.replace(agreed=np.full(self.replicas, number).view(HostArray))

    def fetch_outputs(self, outputs):
        agreed = self.hosts.agreed(int(outputs.agreed[0]))
        return [each.replace(agreed=agreed) for each in super().fetch_outputs(outputs)]


def make_prompts(host: int, count: int) -> list[Prompt]:
    random = np.random.default_rng(host)
    tokens = [random.integers(0, 24, random.integers(1, 17)).astype(np.int32) for _ in range(count)]
    return [Prompt(f"{host}-{number}", "", "", row) for number, row in enumerate(tokens)]


def verify(pairs) -> Future[list[Verdict]]:
    verdicts = Future()
    verdicts.set_result([Verdict(response.draw % 3 > 0, 0.0) for _, response in pairs])
    return verdicts


def collected(rollouts: Rollouts, prompts: list[Prompt], verify_fn=verify, on_progress=None, **how) -> list[Pool]:
    config = types.SimpleNamespace(strategy="balance", group_size=4, samples_per_round=4, max_rounds=3)
    sample_fn = rollouts.sampler(None, stream=0, sampling=SamplingParams(12))
    strategy, options = strategies.build(config), CollectOptions(**how)
    return collect(prompts, sample_fn, verify_fn, strategy, options, on_progress=on_progress)


def run(num_hosts: int, program, options: EngineOptions = OPTIONS) -> tuple[list, list[list[int]]]:
    """Returns the result or error of `program(host, rollouts)` on each host, and its votes."""
    hosts = Hosts(num_hosts)
    rollouts = [Rollouts(HostEngine(hosts, host, options)) for host in range(num_hosts)]
    with ThreadPoolExecutor(num_hosts) as threads:
        futures = [threads.submit(program, host, each) for host, each in enumerate(rollouts)]
        return [future.exception() or future.result() for future in futures], [each.engine.votes for each in rollouts]


def samples(pools: list[Pool]) -> list:
    return [(pool.prompt.id, response.draw, response.tokens.tolist()) for pool in pools for response in pool.responses]


def test_all_launch_the_same_windows_and_each_draws_what_it_would_alone():
    sizes = (0, 1, 9)
    pools, votes = run(3, lambda host, rollouts: collected(rollouts, make_prompts(host, sizes[host])))
    alone = [collected(Rollouts(PageEngine(OPTIONS)), make_prompts(host, size)) for host, size in enumerate(sizes)]
    assert list(map(samples, pools)) == list(map(samples, alone))
    assert len({len(of_host) for of_host in votes}) == 1
    first_finished = [of_host.index(0) for of_host in votes]
    assert first_finished[0] == 0 < first_finished[1] < first_finished[2]
    # The outcome is known one window later, when another one is in flight.
    assert all(not any(of_host[finished:]) for of_host, finished in zip(votes, first_finished, strict=True))
    assert len(votes[2]) == first_finished[2] + 2


@pytest.mark.parametrize("error", [Interrupted, OSError])
def test_what_breaks_off_one_stops_all_in_the_same_window(error):
    def program(host, rollouts):
        def on_progress(closed, drawn):
            if host == 1 and drawn > 20:
                raise error

        return collected(rollouts, make_prompts(host, 5 + host), on_progress=on_progress)

    errors, votes = run(3, program)
    assert list(map(type, errors)) == [Interrupted, error, Interrupted]
    assert len({len(of_host) for of_host in votes}) == 1
    assert votes[1][-2:] == [2, 2] and 2 not in votes[0] + votes[2]


def test_a_slow_grader_delays_no_other_host():
    done = threading.Event()

    def slow(pairs):
        def verdicts():
            assert done.wait(30), "the other host waited for these verdicts"
            return verify(pairs).result()

        return graders.submit(verdicts)

    def program(host, rollouts):
        prompts = make_prompts(host, 4)
        if host == 0:
            return collected(rollouts, prompts, slow, deterministic=False)

        def on_progress(closed, drawn):
            if closed == len(prompts):
                done.set()

        return collected(rollouts, prompts, on_progress=on_progress)

    with ThreadPoolExecutor(1) as graders:
        pools, _ = run(2, program)
    assert [len(of_host) for of_host in pools] == [4, 4]


def test_steps_spent_on_waiting_are_counted():
    def program(host, rollouts):
        collected(rollouts, make_prompts(host, 8 * host))
        return rollouts.counts

    (idle, working), _ = run(2, program)
    assert idle.steps == working.steps == idle.waited_steps > 0
    assert working.waited_steps == 0 and idle.tokens == 0
    assert idle.slot_utilisation == 0 < working.slot_utilisation


# ---- responses that go on in the next collection ---------------------------------------------------------------------

CONTINUES = dataclasses.replace(OPTIONS, begun_tokens=11, window=2, open_prompts=8, pages=120)
FIXED = strategies.fixed(4)


def in_flight(host, rollouts, sizes, on_progress=None):
    """Two collections: the first begins responses of the second. Their samples, and what was cut in between."""
    now, then = make_prompts(host, sizes[host]), make_prompts(10 + host, 14)
    prefetch, found = Prefetch(then), []
    for stream, prompts in ((0, now), (2, then)):
        carried = CarriedRollouts(dict(prefetch.partial)) if stream else CarriedRollouts(prefetch=prefetch)
        sample_fn = rollouts.sampler(None, stream=stream, prefetch_stream=stream + 2, sampling=SamplingParams(12))
        found.append(samples(collect(prompts, sample_fn, verify, FIXED, carried=carried, on_progress=on_progress)))
    return found, [response for partial in prefetch.partial.values() for response in partial.begun]


def test_all_cut_in_the_same_window_and_draw_what_they_would_alone():
    sizes = (0, 1, 9)
    results, votes = run(3, lambda host, rollouts: in_flight(host, rollouts, sizes), CONTINUES)
    alone = dataclasses.replace(CONTINUES, begun_tokens=0)
    for host, (found, begun) in enumerate(results):
        expected, nothing = in_flight(host, Rollouts(PageEngine(alone)), sizes)
        assert found == expected and begun and not nothing
    assert len({len(of_host) for of_host in votes}) == 1


@pytest.mark.parametrize("drawn", [8, 19, 28, 31, 34, 37])
def test_one_that_is_broken_off_before_or_after_the_cut_stops_all(drawn):
    def program(host, rollouts):
        def on_progress(_, responses):
            if host == 1 and responses >= drawn:
                raise OSError

        return in_flight(host, rollouts, (3, 6, 5), on_progress)

    errors, votes = run(3, program, CONTINUES)
    assert list(map(type, errors)) == [Interrupted, OSError, Interrupted]
    assert len({len(of_host) for of_host in votes}) == 1


# ---- trajectories ----------------------------------------------------------------------------------------------------

# Prompts have at most 8 tokens, and trajectories 3 turns of 6 tokens with 2 of the environment between them.
OF_TURNS = dataclasses.replace(OPTIONS, max_prompt_tokens=30, pages=60)


class Echo:
    """Answers with two tokens that follow from the turn, and ends after one to three turns; may work in a thread."""

    def __init__(self, executor=None, before=lambda: None):
        self.executor, self.before = executor, before

    def begin(self, prompt, draw):
        return [1 + (len(prompt.tokens) + draw) % 3, 0]

    def submit(self, trajectory, tokens):
        if self.executor is not None:
            return self.executor.submit(self.answer, int(tokens.sum()))
        answer = Future()
        answer.set_result(int(tokens.sum()))
        return answer

    def answer(self, total):
        self.before()
        return total

    def read(self, trajectory, answer):
        trajectory[1] += 1
        if trajectory[0] == trajectory[1]:
            return Verdict(answer % 2 == 0, answer / 7)
        return np.array([answer % 24, 1], np.int32)

    def end(self, trajectory):
        pass


def trajectories(rollouts, prompts, environment=None, *, deterministic=True, kept=None, on_progress=None) -> list[Pool]:
    turns = Trajectories(environment or Echo(), max_turns=3, max_tokens=22, deterministic=deterministic, max_begun=8)
    sample_fn = rollouts.sampler(None, stream=0, sampling=SamplingParams(6))
    strategy = strategies.build(
        types.SimpleNamespace(strategy="balance", group_size=4, samples_per_round=4, max_rounds=3)
    )
    return collect(
        prompts, sample_fn, turns.verdicts, strategy, CollectOptions(deterministic=deterministic),
        carried=CarriedRollouts(broken_off={} if kept is None else kept), turns=turns, on_progress=on_progress,
    )  # fmt: skip


def described(pools: list[Pool]) -> list:
    return [
        (pool.prompt.id, response.draw, response.tokens.tolist(), response.segments, verdict.reward)
        for pool in pools
        for response, verdict in zip(pool.responses, pool.verdicts, strict=True)
    ]


def short_prompts(host: int, count: int) -> list[Prompt]:
    return [dataclasses.replace(prompt, tokens=prompt.tokens[:8]) for prompt in make_prompts(host, count)]


@pytest.mark.parametrize("deterministic", [True, False])
def test_trajectories_of_each_host_are_those_that_it_draws_alone(deterministic):
    sizes = (0, 1, 7)
    with ThreadPoolExecutor(2) as environments:
        echo = Echo(None if deterministic else environments)
        pools, votes = run(
            3,
            lambda host, rollouts: trajectories(
                rollouts, short_prompts(host, sizes[host]), echo, deterministic=deterministic
            ),
            OF_TURNS,
        )
    alone = [trajectories(Rollouts(PageEngine(OF_TURNS)), short_prompts(host, size)) for host, size in enumerate(sizes)]
    assert list(map(described, pools)) == list(map(described, alone))
    assert max(len(segments) for *_, segments, _ in described(alone[2])) == 5
    assert len({len(of_host) for of_host in votes}) == 1


def test_a_slow_environment_delays_no_other_host():
    done = threading.Event()

    def program(host, rollouts):
        prompts = short_prompts(host, 4)
        if host == 0:
            slow = Echo(environments, lambda: done.wait(30) or pytest.fail("the other host waited"))
            return trajectories(rollouts, prompts, slow, deterministic=False)

        def on_progress(closed, drawn):
            if closed == len(prompts):
                done.set()

        return trajectories(rollouts, prompts, on_progress=on_progress)

    with ThreadPoolExecutor(1) as environments:
        pools, _ = run(2, program, OF_TURNS)
    assert [len(of_host) for of_host in pools] == [4, 4]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_host_that_is_broken_off_while_it_waits_for_an_environment_stops_all(deterministic):
    asked, over = threading.Event(), threading.Event()

    def silent():
        asked.set()
        assert over.wait(30), "nothing was broken off"

    def program(host, rollouts):
        def on_progress(closed, drawn):
            if host == 1 and asked.is_set():
                over.set()
                raise Interrupted

        kept, settings = {}, {"deterministic": deterministic, "on_progress": on_progress}
        environment = Echo(environments, silent) if host else None
        try:
            trajectories(rollouts, short_prompts(host, 5), environment, kept=kept, **settings)
        except Interrupted:
            return kept
        raise AssertionError("it was not broken off")

    with ThreadPoolExecutor(1) as environments:
        (_, waited), votes = run(2, program, OF_TURNS)
    assert waited == {}
    assert len({len(of_host) for of_host in votes}) == 1

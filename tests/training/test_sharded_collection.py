"""A collection over several processes (threads here, that exchange bytes) gives what one process would."""

import collections
import dataclasses
import functools
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CarriedRollouts, CollectOptions, collect
from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes
from reinforce_ada_jax.distributed.signals import Interrupted
from reinforce_ada_jax.training import sharded_collection
from reinforce_ada_jax.types import PartialRollouts, Pool, Prefetch, Prompt, Response, Verdict

STRATEGIES = ("grpo", "positive", "balance", "estimate", "dapo", "ngu")


class Processes:
    """Stands in for `distributed` with one thread a process."""

    def __init__(self, size: int):
        self.size, self.barrier, self.told = size, threading.Barrier(size, timeout=20), [b""] * size
        self.own = threading.local()

    def count(self) -> int:
        return self.size

    def index(self) -> int:
        return self.own.index

    def exchange(self, payload: bytes) -> list[bytes]:
        self.told[self.index()] = payload
        self.barrier.wait()
        told = list(self.told)
        self.barrier.wait()
        return told

    def run(self, program) -> list:
        """Returns results or errors of `program(index)`, by process."""
        results = [None] * self.size

        def one(index):
            self.own.index = index
            try:
                results[index] = program(index)
            except Exception as error:  # handed to the test
                results[index] = error

        threads = [threading.Thread(target=one, args=(index,)) for index in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture
def in_processes(monkeypatch):
    """in_processes(size) -> the processes that collections of the test run in."""

    def made(size: int) -> Processes:
        processes = Processes(size)
        monkeypatch.setattr(sharded_collection, "processes", processes)
        return processes

    return made


@pytest.fixture(autouse=True)
def one_reads_at_a_time(monkeypatch):
    """numpy reads headers by ast.parse, which fails in several threads of CPython 3.11 (SystemError, 1 run in 50)."""
    lock = threading.Lock()

    def locked(*arguments):
        with lock:
            return from_bytes(*arguments)

    monkeypatch.setattr(sharded_collection, "from_bytes", locked)


def make_prompts(names, pass_rate=lambda row: None) -> list[Prompt]:
    return [Prompt(name, "", "", np.zeros(1, np.int32), pass_rate(row)) for row, name in enumerate(names)]


def drawn(prompt_id: str, draw: int) -> Response:
    """Follows from its address alone, as a real sample does."""
    numbers = np.random.default_rng([*prompt_id.encode(), draw])
    size = int(numbers.integers(1, 6))
    tokens, logprobs = numbers.integers(0, 99, size).astype(np.int32), numbers.normal(size=size).astype(np.float32)
    return Response(prompt_id, draw, tokens, logprobs, bool(tokens[0] % 2))


def sample(queue, prefetch=0):
    """Eight requests at a time; beside them, `prefetch` of the next collection's."""
    while requests := queue.take(8) + queue.take_prefetch(prefetch):
        yield [drawn(request.prompt.id, request.draw) for request in requests]
        queue.closed()


def verify(pairs):
    """Prompts of very different pass rates, some of them 0 and 1."""
    verdicts = []
    for prompt, response in pairs:
        rate = (int(prompt.id[1:]) % 5) / 4
        correct = np.random.default_rng([*prompt.id.encode(), response.draw, 7]).random() < rate
        verdicts.append(Verdict(bool(correct), float(correct), "" if correct else "no_answer"))
    return verdicts


def described(pools) -> str:
    """All that pools hold."""
    return json.dumps([dataclasses.asdict(pool) for pool in pools], default=lambda x: x.tolist())


def section(strategy: str) -> SimpleNamespace:
    return SimpleNamespace(strategy=strategy, group_size=4, samples_per_round=4, max_rounds=3)


def drawn_by_all(job, draw):
    """(pools, counts) of a job, as training and evaluation draw it."""
    several = sharded_collection.processes.count() > 1
    return sharded_collection.collect_everywhere(job, draw) if several else draw(job)


def collected_plainly(job, sample_fn=sample, **options):
    """(pools, no counts) of a job: the `draw` of a collection that has nothing of its own."""
    return collect(job.prompts, sample_fn, verify, job.strategy, CollectOptions(**options)), collections.Counter()


def collected(
    strategy: str, log=None, prefetch=0, partial=None, broken_off=None, yields=10**6
) -> tuple[list[Pool], dict[str, PartialRollouts]]:
    """(pools, what was prefetched); a collection that yields more than `yields` responses is broken off."""
    prompts, replacements = (
        make_prompts(f"p{row}" for row in range(13)),
        make_prompts(f"p{row}" for row in range(13, 40)),
    )
    upcoming = Prefetch(make_prompts(f"n{row}" for row in range(6)) if prefetch else ())
    rates = {prompt.id: (int(prompt.id[1:]) % 7) / 7 for prompt in prompts}
    built = strategies.build(section(strategy))

    def end(_, num_responses):
        if num_responses > yields:
            raise Interrupted

    def draw(job):
        if log is not None:
            log.append([prompt.id for prompt in job.prompts])
        pools = collect(
            job.prompts, functools.partial(sample, prefetch=prefetch), verify, job.strategy,
            CollectOptions(replacements=job.replacements, estimate_fn=job.estimate_fn, seed=3, iteration=5),
            carried=CarriedRollouts(job.partial, job.prefetch, job.broken_off.partial), on_progress=end,
        )  # fmt: skip
        return pools, collections.Counter(tokens=sum(len(r.tokens) for pool in pools for r in pool.responses))

    job = sharded_collection.Job(
        prompts, built, replacements if built.extra_batches else (),
        (lambda prompts: np.array([rates[prompt.id] for prompt in prompts])) if built.plan else None,
        partial=partial or {}, prefetch=upcoming, broken_off=broken_off or CollectedShard([]),
    )  # fmt: skip
    pools, counts = drawn_by_all(job, draw)
    assert counts["tokens"] == sum(len(response.tokens) for pool in pools for response in pool.responses)
    return pools, upcoming.partial


@pytest.mark.parametrize("size", [2, 3, 16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pools_are_those_of_one_process(in_processes, strategy, size):
    alone, _ = collected(strategy)
    assert len({pool.rounds for pool in alone}) > 1 or strategy in {"grpo", "estimate", "dapo"}
    processes, logs = in_processes(size), [[] for _ in range(size)]
    everybody = processes.run(lambda index: collected(strategy, logs[index])[0])
    assert [described(pools) for pools in everybody] == [described(alone)] * size
    drawn_for = [name for log in logs for names in log for name in names]
    assert sorted(drawn_for) == sorted(pool.prompt.id for pool in alone), "each prompt was drawn in one process"
    if strategy in {"dapo", "ngu"}:
        assert len(alone) > 13, "some were replaced"


def test_what_is_stored_while_prompts_are_replaced_has_the_prompts_before(in_processes):
    """Process 0 has what all processes drew before; the others have their replacements alone."""
    stored = [[], []]

    def program(index):
        def draw(job):
            job.store(lambda: CollectedShard([], {}, {"tokens": 1}))
            return collect(job.prompts, sample, verify, job.strategy), collections.Counter(tokens=10)

        strategy = strategies.build(section("dapo"))
        job = sharded_collection.Job(
            make_prompts(f"p{row}" for row in range(13)), strategy, make_prompts(f"p{row}" for row in range(13, 40)),
            store=lambda so_far: stored[index].append(so_far()),
        )  # fmt: skip
        return sharded_collection.collect_everywhere(job, draw)

    (pools, _), _ = in_processes(2).run(program)
    of_all, of_replacements = [[len(shard.partial) for shard in each] for each in stored]
    assert of_all[:2] == [0, 13] and 13 < of_all[-1] < len(pools) and not any(of_replacements)
    assert [shard.counts["tokens"] for shard in stored[0][:3]] == [1, 21, 41]


def test_what_is_drawn_ahead_is_everybodys(in_processes):
    processes = in_processes(2)
    (_, first), (_, second) = processes.run(lambda index: collected("balance", prefetch=2))
    assert first.keys() == second.keys()
    assert {int(name[1:]) % 2 for name in first} == {0, 1}, "of both shards"


def test_an_interrupt_of_one_is_an_interrupt_of_all(in_processes):
    processes = in_processes(3)

    def program(index):
        def draw(job):
            if index == 1:
                raise Interrupted
            return collected_plainly(job)

        job = sharded_collection.Job(make_prompts(["p1", "p2", "p3"]), strategies.build(section("grpo")))
        return sharded_collection.collect_everywhere(job, draw)

    assert [type(result) for result in processes.run(program)] == [Interrupted] * 3


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_collection_that_one_breaks_off_goes_on_in_all(in_processes, strategy, size):
    alone, _ = collected(strategy)
    processes = in_processes(size)
    kept = [CollectedShard([]) for _ in range(size)]

    def break_off(index):
        yields = 10 if index == size - 1 else 10**6
        return collected(strategy, broken_off=kept[index], yields=yields)

    assert [type(result) for result in processes.run(break_off)] == [Interrupted] * size
    addresses = {
        (name, r.draw) for name, rollouts in kept[0].partial.items() for r in rollouts.responses if r is not None
    }
    assert len(addresses) > 10
    assert all(shard.partial.keys() == kept[0].partial.keys() for shard in kept), "everybody has everything"
    again = processes.run(lambda index: collected(strategy, partial=kept[index].partial)[0])
    assert [described(pools) for pools in again] == [described(alone)] * size


def test_shards_weigh_about_the_same():
    assert sharded_collection.split([1.0] * 7, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert sharded_collection.split([9, 1, 1, 1, 5, 1], 2) == [[0], [1, 2, 3, 4, 5]]
    assert sharded_collection.split([1.0], 3) == [[0], [], []]
    weights = np.random.default_rng(0).gamma(1.0, 10.0, 500).tolist()
    loads = [sum(weights[index] for index in shard) for shard in sharded_collection.split(weights, 8)]
    assert max(loads) - min(loads) < 0.01 * sum(loads)


LOOKS_AT_ITS_PROMPT = """
from reinforce_ada_jax.collection.strategies import Strategy, keep_all, one_round, until

def mine(config):
    return Strategy(
        lambda progress: 0 if progress.rounds else 4 if progress.prompt.pass_rate > 0.2 else 8,
        one_round, keep_all, max_draws=8, max_kept=8,
    )
"""


def test_a_users_rule_is_the_same_in_several_processes(in_processes, tmp_path):
    (tmp_path / "file.py").write_text(LOOKS_AT_ITS_PROMPT)
    settings = section(f"{tmp_path / 'file.py'}:mine")
    settings.max_draws, settings.retry_probability = 0, 0.999
    prompts = make_prompts((f"p{row}" for row in range(1, 5)), lambda row: (0.1, 0.3, 0.5, 0.0)[row])
    alone = collect(prompts, sample, verify, strategies.build(settings))

    def program(index):
        job = sharded_collection.Job(prompts, strategies.build(settings))
        return sharded_collection.collect_everywhere(job, collected_plainly)[0]

    processes = in_processes(2)
    assert [described(pools) for pools in processes.run(program)] == [described(alone)] * 2


def test_shards_are_balanced_by_planned_draws(in_processes):
    drawn_by = [[], []]

    def program(index):
        def draw(job):
            drawn_by[index].extend(prompt.id for prompt in job.prompts)
            return collected_plainly(job, estimate_fn=job.estimate_fn)

        # 10 draws for p0 and 2 for the others: p0 weighs as much as all of them.
        plan = lambda _, ids: np.array([10 if name == "p0" else 2 for name in ids])  # noqa: E731
        strategy = dataclasses.replace(strategies.build(section("estimate")), plan=plan, max_draws=10)
        job = sharded_collection.Job(make_prompts(f"p{row}" for row in range(6)), strategy)
        return sharded_collection.collect_everywhere(job, draw)

    processes = in_processes(2)
    processes.run(program)
    assert drawn_by == [["p0"], ["p1", "p2", "p3", "p4", "p5"]]


def test_single_draws_with_speculation_are_the_same_in_several_processes(in_processes):
    """Rounds of one until the first success: every process has the same pools and counts of discarded draws."""

    def solved(progress):
        return progress.correct > 0

    strategy = strategies.Strategy(
        strategies.until(solved, 1, 32), solved, strategies.keep_all, max_draws=32, max_kept=32
    )
    prompts = make_prompts(f"p{row}" for row in range(9))

    def early(queue):
        """Eight requests at a time, then 4 draws of the prompts that were taken last."""
        while requests := queue.take(8):
            requests += queue.take_speculative(4, list({request.prompt.id: None for request in requests}))
            yield [drawn(request.prompt.id, request.draw) for request in requests]
            queue.closed()

    def run(sample_fn):
        draw = functools.partial(collected_plainly, sample_fn=sample_fn, speculative=True)
        return drawn_by_all(sharded_collection.Job(prompts, strategy), draw)[0]

    def without_discarded(pools):
        return described([dataclasses.replace(pool, discarded=()) for pool in pools])

    alone = run(sample)
    # Prompts 0 and 5 have the pass rate 0, and 4 has 1.
    assert [len(alone[row].responses) for row in (0, 5, 4)] == [32, 32, 1]
    processes = in_processes(3)
    everybody = processes.run(lambda index: run(early))
    assert [without_discarded(pools) for pools in everybody] == [without_discarded(alone)] * 3
    assert len({described(pools) for pools in everybody}) == 1
    assert sum(len(pool.discarded) for pool in everybody[0]) > 0

"""The server's sampler on an engine without a policy: tokens passed while a response grows are those of its answer."""

import dataclasses

import numpy as np

from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.sampling.token import address
from reinforce_ada_jax.serving.sampler import SERVED_STREAM, SampleJob, Sampler, Weights
from tests.sampling import tiny
from tests.sampling.page_engine import PageEngine, response_to

# Responses of up to 6 windows, in so few pages that some are evicted; 12 rows, for more responses than that.
OPTIONS = dataclasses.replace(
    tiny.OPTIONS, slots=3, pages=17, open_prompts=4, max_response_tokens=24, check_invariants=True
)


class CountingEngine(PageEngine):
    """Counts tokens of evicted responses."""

    redone = 0

    def set_terms(self, state, terms):
        return state

    def fetch_outputs(self, outputs):
        of_replicas = super().fetch_outputs(outputs)
        self.redone += sum(int(each.counts.redone) for each in of_replicas)
        return of_replicas


class Client:
    """One request: what it gets while the responses grow, and at the end."""

    def __init__(self, number: int, rng: np.random.Generator):
        tokens = rng.integers(0, 24, rng.integers(1, 17)).astype(np.int32)
        limit, self.found, self.ended = int(rng.integers(1, 25)), None, []
        self.job = SampleJob(
            f"job {number}", tokens, int(rng.integers(1, 4)), SamplingParams(limit), (), None, self.done, "", self.watch
        )
        self.watched = [[] for _ in range(self.job.num_samples)]

    def watch(self, index, new, ended):
        assert index not in self.ended and (ended or len(new.tokens))
        self.watched[index] += new.tokens.tolist()
        self.ended += [index] * ended

    def done(self, found):
        assert self.found is None and not isinstance(found, Exception), found
        self.found = found


def test_watched_tokens_are_those_of_the_answers():
    """30 requests come over time to two replicas; some are cancelled, whole or one response, while they run."""
    redone = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        engine = CountingEngine(OPTIONS, replicas=2)
        sampler = Sampler(engine, Weights({}))
        clients, cancelled = [Client(number, rng) for number in range(30)], set()
        for client in clients:
            sampler.submit(client.job)
            for _ in range(rng.integers(0, 2)):
                sampler.turn()
            other = clients[rng.integers(0, len(clients))]
            if other.found is None and rng.random() < 0.2:
                index = int(rng.integers(0, other.job.num_samples)) if rng.random() < 0.5 else None
                sampler.cancel(other.job, index)
                cancelled.add(other)
        while sampler.busy:
            sampler.turn()
        for client in clients:
            words = [address(SERVED_STREAM, client.job.id, index) for index in range(client.job.num_samples)]
            whole = [response_to(each, client.job.sampling.max_tokens, OPTIONS.max_response_tokens) for each in words]
            never_begun = client in cancelled and not client.ended  # it was cancelled while all of it waited
            assert never_begun or sorted(client.ended) == list(range(client.job.num_samples))
            for watched, found, (tokens, truncated) in zip(client.watched, client.found, whole, strict=True):
                assert watched == found.tokens.tolist() == tokens[: len(found.tokens)]
                assert client in cancelled or len(watched) == len(tokens)
                assert found.stopped == (len(watched) == len(tokens) and not truncated)
        redone += engine.redone
    assert redone > 50

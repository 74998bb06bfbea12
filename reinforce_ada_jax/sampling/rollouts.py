"""The host's side of sampling: requests in, finished responses out, one thread.

`Rollouts.sampler` gives the `sample_fn` of the collection loop. The host decides only which prompts are open and which
requests are in the device's queue. The compiled window decides about slots, pages and tokens.

The device never waits for the host: a window is submitted before the outputs of the one before it are read. What the
host knows is therefore one window old, and every decision of a scheduler is safe whatever that window does.

Over several processes a window is one program of all devices. Each process has its own requests, and launches as many
windows as the others: `_Session.run_in_step`.
"""

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from reinforce_ada_jax.distributed.mesh import shard_bytes
from reinforce_ada_jax.distributed.signals import Interrupted
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling import invariants
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.scheduler import Scheduler
from reinforce_ada_jax.sampling.state import EngineOptions, Occupancy, SamplingParams, WindowInputs, WindowOutputs
from reinforce_ada_jax.types import CuttableQueue, Request, RequestQueue, Response

# Recorded when the first window of each `sample_fn` is read: its tokens are on the host.
FIRST_WINDOW_EVENT = "/reinforce_ada_jax/sampling/first_window"
# Votes of a process on what follows a window; the largest one decides. _FINISHED: all its requests are answered.
# _WORKING: some are not. _STOPPED: it was broken off, so all processes stop.
_FINISHED, _WORKING, _STOPPED = 0, 1, 2
# Seconds that a process without work waits for verdicts before its next window: less than the others' windows take.
_IDLE_S = 0.002


@runtime_checkable
class DecodeEngine(Protocol):
    """Engine interface that rollouts use; the state is the engine's own, and each call replaces it."""

    options: EngineOptions

    @property
    def replicas(self) -> int: ...
    @property
    def spans_processes(self) -> bool: ...
    def decode_weights(self, params: Any, /) -> Any: ...
    def init_decode_state(self) -> Any: ...
    def decode_window(
        self, params: Any, state: Any, inputs: Sequence[WindowInputs], vote: int = 0, /
    ) -> tuple[Any, WindowOutputs]: ...
    def fetch_outputs(self, outputs: WindowOutputs, /) -> list[WindowOutputs]: ...
    def fetch(self, state: Any, /) -> list[Occupancy]: ...


@dataclasses.dataclass
class RolloutCounts:
    """Work of one call of `sample_fn`, for the metrics."""

    tokens: int = 0  # response tokens made: one in each slot-step that is not idle, and accepted drafts
    slot_steps: int = 0  # all slot-steps, idle ones included
    windows: int = 0  # decode windows that were read
    steps: int = 0  # decode steps from the first window to the last; of several processes those of the slowest
    waited_steps: int = 0  # those of them in which this process decoded nothing and waited for another one
    prefills: int = 0  # prompts prefilled
    prefilled_tokens: int = 0  # their tokens, less the last of each, and less those shared or continued
    shared_tokens: int = 0  # their tokens whose keys and values another prompt had
    continued_tokens: int = 0  # their tokens whose keys and values the turn before had left
    dispatches: int = 0  # programs started on the device: windows, and a last one, which only gives pages back
    drafted: int = 0  # tokens that were guessed and verified
    accepted: int = 0  # of these, tokens of responses
    redone: int = 0  # tokens of responses that were evicted for lack of pages and drawn again; `tokens` has them, too
    host_s: float = 0.0  # seconds from reading outputs to submitting a window, where the device had no work left

    @property
    def slot_utilisation(self) -> float:
        """Share of slot-steps that made a token."""
        return (self.tokens - self.accepted) / self.slot_steps if self.slot_steps else 0.0


@dataclasses.dataclass(frozen=True)
class Reshard:
    """Cost of making the learner's weights ready for decoding."""

    seconds: float = 0.0  # time of the cast and reshard, while no other program runs
    bytes: int = 0  # size of decoding's copy on each device; 0 where it reads the learner's arrays


class Rollouts:
    """One engine and its decode state, fed from a request queue."""

    def __init__(self, engine: DecodeEngine):
        self.engine = engine
        self.state = engine.init_decode_state()  # None while a session has it, and after `release`
        self.counts = RolloutCounts()
        self.reshard = Reshard()  # for the newest sampler

    def sampler(
        self,
        params: Params | None,
        *,
        stream: int,
        sampling: SamplingParams | Callable[[Request], SamplingParams],
        prefetch_stream: int | None = None,
        policy_version: int = 0,
    ) -> Callable[[RequestQueue], Iterator[list[Response]]]:
        """Returns a `sample_fn` that draws from `params`.

        Args:
          params: the learner's weights; None for an engine that has none.
          stream: first word of every address (`token.stream`).
          sampling: parameters of all responses, or a function that returns those of a request.
          prefetch_stream: the stream of requests for the next iteration; those of later ones follow in equal steps.
            None leaves idle slots idle.
          policy_version: `Response.policy_version` of the responses.

        Raises:
          ValueError: max_tokens is above that of the engine; from `sample_fn` where `sampling` is a function.
        """
        if isinstance(sampling, SamplingParams):
            self._check(sampling)

        def sampling_of(request: Request) -> SamplingParams:
            params = sampling if isinstance(sampling, SamplingParams) else self._check(sampling(request))
            if request.begun is None:
                return params
            return dataclasses.replace(params, max_tokens=params.max_tokens - len(request.begun.tokens))

        terms = _Terms(self.decode_weights(params), stream, prefetch_stream, policy_version, sampling_of)

        def sample_fn(queue: RequestQueue) -> Iterator[list[Response]]:
            session = _Session(self, queue, terms)
            return session.run_in_step() if self.engine.spans_processes else session.run()

        return sample_fn

    def release(self) -> None:
        """Frees the pages until the next session, which begins with empty ones in any case."""
        self.state = None

    def decode_weights(self, params: Any) -> Any:
        """Returns the weights to decode with, ready on the devices; `reshard` has the cost of making them so."""
        jax.block_until_ready(params)
        begin = time.monotonic()
        weights = jax.block_until_ready(self.engine.decode_weights(params))
        own = {id(leaf) for leaf in jax.tree.leaves(params)}
        copies = [leaf for leaf in jax.tree.leaves(weights) if id(leaf) not in own]
        self.reshard = Reshard(time.monotonic() - begin, shard_bytes(copies))
        return weights

    def _check(self, sampling: SamplingParams) -> SamplingParams:
        longest = self.engine.options.max_response_tokens
        if sampling.max_tokens > longest:
            raise ValueError(
                f"max_tokens is {sampling.max_tokens}; the engine was built for 1 to {longest}. Raise "
                "sampling.max_response_tokens, or ask for less."
            )
        return sampling


@dataclasses.dataclass(frozen=True, eq=False)
class _Terms:
    """Weights and parameters of a session; see `Rollouts.sampler`."""

    weights: Params | None
    stream: int
    prefetch_stream: int | None
    policy_version: int
    sampling_of: Callable[[Request], SamplingParams]

    def address(self, request: Request) -> np.ndarray:
        stream = self.stream
        if self.prefetch_stream is not None:
            stream = (stream + request.prefetch * (self.prefetch_stream - stream)) % 2**32
        prompt_id = request.prompt.id if request.begun is None else request.begun.prompt_id
        return token_lib.address(stream, prompt_id, request.draw)


class _Session:
    """One call of `sample_fn`: windows for all replicas, each submitted before the one before it is read."""

    def __init__(self, rollouts: Rollouts, queue: RequestQueue, terms: _Terms):
        self.rollouts, self.queue, self.terms = rollouts, queue, terms
        self.engine = rollouts.engine
        self.counts = RolloutCounts()
        self.state: Any = None
        self.schedulers = [Scheduler(self.engine.options) for _ in range(self.engine.replicas)]
        self.prefetched: set[str] = set()  # prompts of later iterations
        # Steps of all windows; where other processes decode too, steps of the last window alone.
        self.decode_steps = np.zeros(self.engine.replicas, np.int64)
        self.outcome = _WORKING  # largest vote on the last window that was read
        self._cuts = self._goes_on = False
        if self.engine.options.begun_tokens and isinstance(queue, CuttableQueue):
            self._goes_on, queue.running = True, self._begun
            self._cuts = queue.cuts_at_end = not self.engine.options.finishes
        self.voted_before_cut: WindowOutputs | None = None  # submitted when all cut
        self.read_at = time.monotonic()

    def run(self) -> Generator[list[Response]]:
        """Submits a window, reads the one before it, yields its responses; until no request is left."""
        self._take_state()
        previous: WindowOutputs | None = None
        try:
            while True:
                if self._may_cut():
                    self._cut()
                else:
                    self._take_requests()
                submitted = self._submit_window(previous) if self._busy else None
                if previous is not None:
                    yield self._read_window(previous)
                elif submitted is None and not self._make_room():
                    break
                previous = submitted
        except GeneratorExit:  # broken off
            self._give_begun()
            raise
        self._close_all()
        if any(scheduler.rows.closing.any() for scheduler in self.schedulers):
            self._submit_window(None)  # it takes no step, and releases the last pages
        self._return_state()

    def run_in_step(self) -> Generator[list[Response]]:
        """Does what `run` does where other processes decode too: all launch the same windows in the same order.

        Each process launches a window in every pass, even without requests, and votes on what follows. The outcome is
        in the window's outputs, the same in all processes; the next window is already submitted by then. If running
        responses can go on later, all processes cut them in the pass in which the last of them has no more work. Then
        they vote again.

        Raises:
          Interrupted: another process was broken off.
        """
        self._take_state()
        vote, previous, submitted = _WORKING, None, None
        try:
            while True:
                vote = self._next_vote(vote)
                submitted = self._submit_window(previous, vote)
                if previous is not None:
                    responses = self._read_window(previous)
                    if self.outcome == _STOPPED:
                        raise Interrupted
                    if self._all_cut(submitted):
                        self._cut()
                    elif self.outcome == _FINISHED:
                        break
                    yield responses
                previous = submitted
        except (GeneratorExit, Interrupted):  # also of a queue that waits for verdicts
            self._give_begun()
            # The others are at work, and stop with this process, in the same pass.
            while submitted is not None and self.outcome == _WORKING:
                previous, submitted = submitted, self._submit_window(submitted, _STOPPED)
                self._read_window(previous)
                self._all_cut(submitted)
            raise
        finally:
            # The next program of all processes begins when the last window has ended in all of them.
            jax.block_until_ready(submitted)
        self._return_state()

    def _all_cut(self, submitted: WindowOutputs) -> bool:
        """Returns True once, when no process has more to do: all now cut what runs. `submitted` has older votes."""
        if self.outcome != _FINISHED or not self._cuts or self.voted_before_cut is not None:
            return False
        self.outcome, self.voted_before_cut = _WORKING, submitted
        return True

    def _next_vote(self, vote: int) -> int:
        """Takes requests while there may be some; returns the vote of the next window."""
        if self.voted_before_cut is None:
            if vote == _FINISHED and not self._cuts:
                return vote
            self._take_requests()  # first its own, then those of later iterations while other processes are at work
            if self._may_cut():
                return _FINISHED
            if self._busy or self._awaits_verdicts() or self._make_room():
                return _WORKING
        elif self._busy:
            return _WORKING
        self._close_all()
        return _FINISHED

    def _take_state(self) -> None:
        """Takes the decode state; a session that is broken off while slots decode does not return it."""
        rollouts = self.rollouts
        rollouts.counts = self.counts
        self.state = self.engine.init_decode_state() if rollouts.state is None else rollouts.state
        rollouts.state = None

    def _return_state(self) -> None:
        if self.engine.options.check_invariants:
            for state in self.engine.fetch(self.state):
                invariants.check_idle(self.engine.options, state)
        self.rollouts.state, self.state = self.state, None

    def _awaits_verdicts(self) -> bool:
        """Returns True while verdicts may bring requests, after a short wait."""
        pending = self.queue.awaits_verdicts()
        if pending:
            time.sleep(_IDLE_S)
        return pending

    @property
    def _busy(self) -> bool:
        return any(scheduler.busy for scheduler in self.schedulers)

    def _take_requests(self) -> None:
        """Closes prompts that need nothing more, and takes as many requests as the next window can start."""
        self._close(self.queue.closed())
        for scheduler in self.schedulers:
            scheduler.open_waiting()
        # Requests of open prompts may be behind requests that must wait; prompts close only after they are answered.
        while capacity := sum(each.capacity for each in self.schedulers):
            taken = self.queue.take(capacity, wait=False) if self.engine.spans_processes else self.queue.take(capacity)
            if not taken:
                break
            self._add(taken)
        if self.terms.prefetch_stream is not None and (wanted := sum(map(self._room_for_prefetch, self.schedulers))):
            taken = self.queue.take_prefetch(wanted)
            self.prefetched.update(request.prompt.id for request in taken)
            self._add(taken)
        for scheduler in self.schedulers:
            if missing := scheduler.missing_requests:
                self._add(self.queue.take_speculative(missing, scheduler.rows.prompts))

    def _room_for_prefetch(self, scheduler: Scheduler) -> int:
        """Returns the number of requests of later iterations that may start: one for each idle slot.

        Where the end of the iteration cuts what still runs, slots that the window will free get requests, too.
        Elsewhere such requests would lengthen the wait at the end.
        """
        if self._cuts and not scheduler.num_unopened:
            return scheduler.missing_requests
        return scheduler.idle_slots

    def _may_cut(self) -> bool:
        """Returns True if what still runs can go on in the next collection."""
        return isinstance(self.queue, CuttableQueue) and self._cuts and self.queue.is_complete()

    def _cut(self) -> None:
        """Ends all responses with their next token, and gives back the requests that have not started."""
        assert isinstance(self.queue, CuttableQueue)
        for scheduler in self.schedulers:
            self.queue.give_back(scheduler.cancel_all())

    def _give_begun(self) -> None:
        """Gives the queue the tokens so far of what runs, if it can go on later."""
        if isinstance(self.queue, CuttableQueue) and self._goes_on:
            self.queue.add_begun(self._begun())

    def _begun(self) -> list[Response]:
        """Returns the tokens so far of what runs, by the last window read."""
        version = self.terms.policy_version
        return [response for scheduler in self.schedulers for response in scheduler.begun(version)]

    def _add(self, requests: Sequence[Request]) -> None:
        """Gives each request to the replica with its prompt or last turn; else to the one with the least to do."""
        for request in requests:
            homes = [scheduler for scheduler in self.schedulers if scheduler.has(request.prompt.id)]
            (homes[0] if homes else min(self.schedulers, key=lambda scheduler: scheduler.load)).add(request)

    def _close(self, prompt_ids: Sequence[str]) -> None:
        for scheduler in self.schedulers:
            scheduler.close(prompt_ids)

    def _submit_window(self, previous: WindowOutputs | None, vote: int = _WORKING) -> WindowOutputs:
        """Starts the requests that are ready; `previous` is the window before, which is not read yet."""
        terms = self.terms
        inputs = [scheduler.next_window(terms.address, terms.sampling_of) for scheduler in self.schedulers]
        if previous is not None and previous.counts.decode_steps.is_ready():
            self.counts.host_s += time.monotonic() - self.read_at
        self.state, outputs = self.engine.decode_window(terms.weights, self.state, inputs, vote)
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()
        self.counts.dispatches += 1
        for opened in (each.opened for each in inputs):
            is_prompt = opened.row < self.engine.options.open_prompts
            self.counts.prefills += int(is_prompt.sum())
            continues = opened.like == opened.row
            self.counts.shared_tokens += int(opened.cached[~continues].sum())
            self.counts.continued_tokens += int(opened.cached[continues].sum())
            self.counts.prefilled_tokens += int((opened.length - 1 - opened.cached)[is_prompt].sum())
        if self.engine.options.check_invariants:  # it waits for the window
            unread = [outputs] if previous is None else [previous, outputs]
            of_replicas = zip(*map(self.engine.fetch_outputs, unread), strict=True)
            states = self.engine.fetch(self.state)
            for scheduler, state, own in zip(self.schedulers, states, of_replicas, strict=True):
                scheduler.check(state, own)
        return outputs

    def _read_window(self, window: WindowOutputs) -> list[Response]:
        """Waits for a window; returns the responses that ended in it, by replica and output row."""
        of_replicas = self.engine.fetch_outputs(window)
        self.read_at = time.monotonic()
        if not self.counts.windows:
            jax.monitoring.record_event(FIRST_WINDOW_EVENT)
        self.counts.windows += 1
        for counts in (outputs.counts for outputs in of_replicas):
            accepted = int(counts.accepted or 0)
            self.counts.tokens += int(counts.busy) + accepted
            self.counts.drafted += int(counts.verified or 0)
            self.counts.accepted += accepted
            self.counts.redone += int(counts.redone)
        self._count_steps(of_replicas)
        if window is self.voted_before_cut and self.outcome == _FINISHED:
            self.outcome = _WORKING
        return [
            response
            for scheduler, outputs in zip(self.schedulers, of_replicas, strict=True)
            for response in scheduler.process_outputs(outputs, self.terms.policy_version)
        ]

    def _count_steps(self, of_replicas: Sequence[WindowOutputs]) -> None:
        """Counts the steps of a window; a replica that takes fewer than another one idles meanwhile."""
        counts, steps = self.counts, [int(outputs.counts.decode_steps) for outputs in of_replicas]
        if of_replicas[0].agreed is None:
            self.decode_steps += steps
            counts.steps = int(self.decode_steps.max())
        else:
            self.outcome, most_steps = of_replicas[0].agreed.tolist()  # the steps are those of the window before
            counts.steps += most_steps
            counts.waited_steps += most_steps - int(self.decode_steps.max())
            self.decode_steps[:] = steps
        counts.slot_steps = counts.steps * self.engine.options.slots * len(of_replicas)

    def _make_room(self) -> bool:
        """Returns True if prompts that wait for room may find some now; nothing must be in flight."""
        if not any(scheduler.num_unopened for scheduler in self.schedulers):
            return False
        for scheduler in self.schedulers:
            scheduler.open_waiting()  # which may close others
        if self._busy:
            return True
        verdicts = self.queue.wait()  # they close prompts
        self._close(self.queue.closed())  # also those that the last `take` closed
        if not verdicts and not self._busy:
            # Waiting prompts and those in their way belong to the next iteration. The latter would stay open until the
            # end, with nothing more to do in this iteration.
            self._close(sorted(self.prefetched))
        return verdicts or self._busy

    def _close_all(self) -> None:
        """Closes all prompts, with the next window; RuntimeError if some were never opened."""
        waiting = sum(scheduler.num_unopened for scheduler in self.schedulers)
        if waiting:
            raise RuntimeError(
                f"{waiting} prompts wait and none can be opened, with nothing in flight: prompts that need nothing "
                "more were never closed, or a barrier keeps all of them open and the engine has room for fewer."
            )
        for scheduler in self.schedulers:
            scheduler.close_all()

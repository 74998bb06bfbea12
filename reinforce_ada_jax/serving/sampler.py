"""Sampling for many clients: one engine decodes the requests as they arrive.

Only `submit` and `cancel` may be called from any thread. Everything else runs in the thread that owns the devices. A
turn submits one decode window for all requests, and reads the window before; between turns this thread may do other
work.
"""

import collections
import dataclasses
import hashlib
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.scheduler import Scheduler
from reinforce_ada_jax.sampling.state import (
    RUNNING,
    EngineOptions,
    PromptTerms,
    SamplingParams,
    WindowInputs,
    WindowOutputs,
    default_terms,
)
from reinforce_ada_jax.types import Prompt, Request

# First word of the addresses of served responses.
SERVED_STREAM = 2**32 - 2
NO_ADAPTER = -1


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Tokens of a response, their log-probabilities, and whether a stop ended the response."""

    tokens: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    stopped: bool


@dataclasses.dataclass(eq=False)
class SampleJob:
    """Request for samples.

    `done` is called with the responses, or with the error. A cancelled response has the tokens that were drawn until
    then. After each window with new tokens of a draw, `watch` is called with its index, these tokens, and True if the
    draw has ended.
    """

    id: str
    tokens: Int[np.ndarray, " T"]  # of the prompt
    num_samples: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int | None  # the draws are a function of it; None: of the id
    done: Callable[[list[Sampled] | Exception], None]
    adapter: str = ""  # name of the adapters, for `Weights.use`; "": none
    watch: Callable[[int, Sampled, bool], None] | None = None
    responses: dict[int, Sampled] = dataclasses.field(default_factory=dict)  # those that have ended, by index
    # Tokens of each draw that `watch` got.
    num_watched: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    @property
    def prompt_id(self) -> str:
        """Name of tokens, stops and adapter together: requests with the same name share a prefill."""
        digest = hashlib.blake2b(np.asarray(self.tokens, np.int32).tobytes(), digest_size=16).hexdigest()
        return f"{digest} {self.stop_ids} {self.adapter}"


@runtime_checkable
class SampledEngine(Protocol):
    """Engine that a sampler uses: of this process, or of several processes (hosts.py)."""

    options: EngineOptions
    replicas: int

    def init_decode_state(self) -> Any: ...
    def set_terms(self, state: Any, terms: Sequence[PromptTerms], /) -> Any: ...
    def decode_window(
        self, params: Any, state: Any, inputs: Sequence[WindowInputs], /
    ) -> tuple[Any, WindowOutputs]: ...
    def fetch_outputs(self, outputs: WindowOutputs, /) -> list[WindowOutputs]: ...


class Weights:
    """Weights to decode with, without adapters; the subclass in tinker/adapters.py has some."""

    def __init__(self, params: Params):
        self.params = params

    def use(self, adapter: str, in_use: Collection[str]) -> bool:
        """Makes adapters ready; returns False while adapters in use leave no room. ValueError: none has this name."""
        return True

    def place(self, adapter: str) -> int:
        """Returns the index of ready adapters in the decode weights; `NO_ADAPTER` for a request without adapters."""
        return NO_ADAPTER


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Draw(Request):
    job: SampleJob
    index: int


class Sampler:
    """One engine with its weights."""

    def __init__(self, engine: SampledEngine, weights: Weights):
        """Makes an idle sampler; the engine has room for as many stop tokens as a request may have."""
        self.engine, self.weights = engine, weights
        self._waiting: collections.deque[SampleJob] = collections.deque()
        self._cancelled: collections.deque[tuple[SampleJob, int | None]] = collections.deque()
        self._reset()

    def _reset(self) -> None:
        options = self.engine.options
        self._state: Any = None  # frees the old state first: devices seldom have room for two
        self._state = self.engine.init_decode_state()
        self._schedulers = [Scheduler(options, self._adapter_of) for _ in range(self.engine.replicas)]
        self._terms = [default_terms(options) for _ in self._schedulers]
        self._prompts: dict[str, Prompt] = {}
        self._open: dict[str, dict[int, _Draw]] = {}  # unfinished draws of each prompt
        self._num_draws: collections.Counter[str] = collections.Counter()
        self._previous: WindowOutputs | None = None

    def submit(self, job: SampleJob) -> None:
        """Queues a request, from any thread."""
        self._waiting.append(job)

    def cancel(self, job: SampleJob, index: int | None = None) -> None:
        """Ends one response of a request, or all (None), from any thread. Their slots are free after a window."""
        self._cancelled.append((job, index))

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._cancelled or self._open or self._previous is not None)

    @property
    def num_running(self) -> int:
        """Number of responses on the device: in slots, or queued there for the next free slot."""
        return sum(len(scheduler.rows.in_flight) for scheduler in self._schedulers)

    def warm_up(self) -> None:
        """Compiles all programs of sampling, so that no client waits for the compiler."""
        prompt, found = np.zeros(self.engine.options.max_prompt_tokens, np.int32), []
        self.submit(SampleJob("warm up", prompt, 1, SamplingParams(1), (), 0, found.append))
        while self.busy:
            self.turn()
        if isinstance(found[0], Exception):
            raise found[0]

    def turn(self) -> None:
        """Starts requests, submits a window, and reads the one before it."""
        try:
            self._cancel_responses()
            self._admit()
            self._open_prompts()
            submitted = self._submit() if any(scheduler.busy for scheduler in self._schedulers) else None
            if self._previous is not None:
                self._read(self._previous)
            self._previous = submitted
        except Exception as error:  # the open requests get the error, and the engine starts again
            jobs = dict.fromkeys(draw.job for draws in self._open.values() for draw in draws.values())
            traceback.clear_frames(error.__traceback__)  # its frames hold the old state, too
            self._reset()
            for job in jobs:
                job.done(error)

    def _cancel_responses(self) -> None:
        nothing = Sampled(np.zeros(0, np.int32), np.zeros(0, np.float32), stopped=False)
        while self._cancelled:
            job, index = self._cancelled.popleft()
            if job in self._waiting:
                self._waiting.remove(job)
                job.done([nothing] * job.num_samples)
                continue
            name = job.prompt_id
            draws = {
                draw for draw in self._open.get(name, {}).values() if draw.job is job and index in (None, draw.index)
            }
            for scheduler in self._schedulers:
                for draw in scheduler.cancel(draws):
                    self._finish(name, draw.draw, nothing)
                self._close(scheduler, name)

    def _admit(self) -> None:
        most = 2 * self.engine.options.slots * len(self._schedulers)
        while self._waiting and sum(scheduler.load for scheduler in self._schedulers) < most:
            job = self._waiting[0]
            in_use = {draw.job.adapter for draws in self._open.values() for draw in draws.values()}
            try:
                if not self.weights.use(job.adapter, in_use):
                    break
            except Exception as error:  # only this request failed: it must not stay first in the queue
                self._waiting.popleft().done(error)
                continue
            self._waiting.popleft()
            self._start(job)

    def _start(self, job: SampleJob) -> None:
        name = job.prompt_id
        prompt = self._prompts.setdefault(name, Prompt(name, "", "", np.asarray(job.tokens, np.int32)))
        home = next((each for each in self._schedulers if each.has(name)), None)
        home = home or min(self._schedulers, key=lambda scheduler: scheduler.load)
        for index in range(job.num_samples):
            draw = _Draw(prompt, self._num_draws[name], job=job, index=index)
            self._num_draws[name] += 1
            self._open.setdefault(name, {})[draw.draw] = draw
            home.add(draw)

    def _job_of(self, prompt_id: str) -> SampleJob:
        """Returns a request with this prompt; all of them have the same stops and adapter."""
        return next(iter(self._open[prompt_id].values())).job

    def _adapter_of(self, prompt: Prompt) -> int:
        return self.weights.place(self._job_of(prompt.id).adapter)

    def _open_prompts(self) -> None:
        changed = False
        for scheduler, terms in zip(self._schedulers, self._terms, strict=True):
            scheduler.open_waiting()
            names = {row: name for name, row in scheduler.rows.prompts.items()}
            for row in (prompt.row for prompt in scheduler.opened):
                job = self._job_of(names[row])
                stop_ids = np.full_like(terms.stop_ids[row], -1)
                stop_ids[: len(job.stop_ids)] = job.stop_ids
                adapter = self.weights.place(job.adapter)
                changed |= bool((terms.stop_ids[row] != stop_ids).any() or terms.adapter[row] != adapter)
                terms.stop_ids[row], terms.adapter[row] = stop_ids, adapter
        if changed:
            # Copies, because the device may read them later.
            self._state = self.engine.set_terms(self._state, jax.tree.map(np.array, self._terms))

    def _submit(self) -> WindowOutputs:
        inputs = [scheduler.next_window(_address, _sampling) for scheduler in self._schedulers]
        self._state, outputs = self.engine.decode_window(self.weights.params, self._state, inputs)
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()
        return outputs

    def _read(self, window: WindowOutputs) -> None:
        for scheduler, outputs in zip(self._schedulers, self.engine.fetch_outputs(window), strict=True):
            for response in scheduler.process_outputs(outputs, 0):
                stopped = not (response.truncated or response.is_cut)
                found = Sampled(response.tokens, response.logprobs, stopped)
                self._finish(response.prompt_id, response.draw, found)
                self._close(scheduler, response.prompt_id)
            has_new, running = outputs.rows.length > outputs.rows.start, outputs.rows.status == RUNNING
            for row in np.flatnonzero(has_new & running).tolist():
                tokens, logprobs = scheduler.rows.response(row)
                _watch(scheduler.rows.in_flight[row], Sampled(tokens, logprobs, stopped=False), ended=False)

    def _finish(self, prompt_id: str, number: int, found: Sampled) -> None:
        draw = self._open[prompt_id].pop(number)
        job = draw.job
        _watch(draw, found, ended=True)
        job.responses[draw.index] = found
        if len(job.responses) == job.num_samples:
            job.done([job.responses[index] for index in range(job.num_samples)])

    def _close(self, scheduler: Scheduler, prompt_id: str) -> None:
        """Closes a prompt if all its draws are finished."""
        if prompt_id in self._open and not self._open[prompt_id]:
            scheduler.close([prompt_id])
            for by_prompt in (self._open, self._prompts, self._num_draws):
                by_prompt.pop(prompt_id)


def _watch(request: Request, found: Sampled, ended: bool) -> None:
    """Passes new tokens to `watch`; after an eviction a response has fewer tokens, until it has drawn them again."""
    assert isinstance(request, _Draw)
    job, index = request.job, request.index
    begin = job.num_watched[index]
    if job.watch is not None and (ended or len(found.tokens) > begin):
        job.num_watched[index] = max(begin, len(found.tokens))
        job.watch(index, Sampled(found.tokens[begin:].copy(), found.logprobs[begin:].copy(), found.stopped), ended)


def _address(request: Request) -> np.ndarray:
    assert isinstance(request, _Draw)
    job = request.job
    return token_lib.address(SERVED_STREAM, job.id if job.seed is None else f"seed {job.seed}", request.index)


def _sampling(request: Request) -> SamplingParams:
    assert isinstance(request, _Draw)
    return request.job.sampling

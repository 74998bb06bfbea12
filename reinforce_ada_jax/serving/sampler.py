"""Sampling for many clients: one engine, adapters side by side in its weights, and requests as they come.

Everything here runs in the thread that owns the devices. A turn submits one decode window for all requests and reads
the one before it; between turns that thread may do something else.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.lora import Lora
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.scheduler import Scheduler
from reinforce_ada_jax.sampling.state import PromptTerms, SamplingParams, WindowOutputs, default_terms
from reinforce_ada_jax.serving.tinker.protocol import Sampled
from reinforce_ada_jax.types import Prompt, Request, Response

# First word of the addresses of served responses.
SERVED_STREAM = 2**32 - 2
NO_ADAPTER = -1
# Adapters as a sampler gets them: what they are, and their arrays.
LoadedAdapter = tuple[Lora, Params]


@dataclasses.dataclass(eq=False)
class SampleJob:
    """Request for samples.

    Attributes:
      id: of the request; its draws are a function of it, unless there is a seed.
      tokens: of the prompt.
      adapter: name of the adapters, as `load` takes it; "" for none.
      num_samples: responses.
      sampling: parameters of each.
      stop_ids: tokens that end a response.
      seed: the draws are a function of it; None: of the id.
      done: is called with the responses, or with what went wrong.
      responses: those that are there, by draw.
    """

    id: str
    tokens: Int[np.ndarray, " T"]
    adapter: str
    num_samples: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int | None
    done: Callable[[list[Sampled] | Exception], None]
    responses: dict[int, Sampled] = dataclasses.field(default_factory=dict)

    @property
    def prompt_id(self) -> str:
        """Name of everything that its pages and its stops depend on: requests with the same one share a prefill."""
        digest = hashlib.blake2b(np.asarray(self.tokens, np.int32).tobytes(), digest_size=16).hexdigest()
        return f"{digest} {self.stop_ids} {self.adapter}"

    @property
    def address_id(self) -> str:
        """Name that the randomness of its draws depends on."""
        return self.id if self.seed is None else f"seed {self.seed}"


@dataclasses.dataclass(frozen=True, eq=False)
class _Draw(Request):
    job: SampleJob | None = None
    index: int = 0


class Sampler:
    """One engine with the weights of its base and `num_adapters` adapters at a time."""

    def __init__(self, engine: Engine, base: Params, size: Lora, num_adapters: int):
        """Makes an idle sampler.

        Args:
          engine: of the base; its stop tokens are filled up with -1, to as many as a request may have.
          base: weights of the learner.
          size: rank and targets of the largest adapter.
          num_adapters: adapters that may be in use at the same time.
        """
        self.engine = engine
        self.load: Callable[[str], LoadedAdapter] = _unknown  # returns adapters by name; the service sets it
        self._weights = lora.bank(engine.decode_weights(base), engine.architecture, size, num_adapters, engine.dtype)
        self._adapters: collections.OrderedDict[str, int] = collections.OrderedDict()  # last used at the end
        self._free_adapters = list(range(num_adapters))[::-1]
        self.waiting: collections.deque[SampleJob] = collections.deque()
        self._reset()

    def _reset(self) -> None:
        options = self.engine.options
        self._state: Any = self.engine.init_decode_state()
        self._schedulers = [Scheduler(options, self._adapter_of) for _ in range(self.engine.replicas)]
        self._terms = [default_terms(options) for _ in self._schedulers]
        self._prompts: dict[str, Prompt] = {}
        self._open: dict[str, dict[int, _Draw]] = {}  # unfinished draws of each prompt
        self._num_draws: collections.Counter[str] = collections.Counter()
        self._previous: WindowOutputs | None = None

    @property
    def busy(self) -> bool:
        """True if a turn has something to do."""
        return bool(self.waiting or self._open or self._previous is not None)

    def warm_up(self) -> None:
        """Compiles everything that sampling runs: no client waits for the compiler."""
        prompt = np.zeros(self.engine.options.max_prompt_tokens, np.int32)
        self.waiting.append(SampleJob("warm up", prompt, "", 1, SamplingParams(1), (), 0, _ignore))
        while self.busy:
            self.turn()

    def turn(self) -> None:
        """Starts requests, submits a window, and reads the one before it."""
        try:
            self._admit()
            self._open_prompts()
            submitted = self._submit() if any(scheduler.busy for scheduler in self._schedulers) else None
            if self._previous is not None:
                self._read(self._previous)
            self._previous = submitted
        except Exception as error:  # the requests get it; the engine starts again
            jobs = {id(draw.job): draw.job for draws in self._open.values() for draw in draws.values()}
            self._reset()
            for job in jobs.values():
                if job is not None:
                    job.done(error)

    def _admit(self) -> None:
        most = 2 * self.engine.options.slots * len(self._schedulers)
        while self.waiting and sum(scheduler.load for scheduler in self._schedulers) < most:
            job = self.waiting[0]
            try:
                if not self._use_adapter(job.adapter):
                    break
            except ValueError as error:
                self.waiting.popleft().done(error)
                continue
            self.waiting.popleft()
            self._start(job)

    def _use_adapter(self, name: str) -> bool:
        """Puts adapters beside the others; returns False if all places are in use."""
        if not name:
            return True
        if name in self._adapters:
            self._adapters.move_to_end(name)
            return True
        if not self._free_adapters:
            in_use = {draw.job.adapter for draws in self._open.values() for draw in draws.values() if draw.job}
            unused = next((each for each in self._adapters if each not in in_use), None)
            if unused is None:
                return False
            self._free_adapters.append(self._adapters.pop(unused))
        chosen, params = self.load(name)
        place = self._free_adapters.pop()
        self._weights = lora.put_into_bank(self._weights, params, chosen, place)
        self._adapters[name] = place
        return True

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

    def _adapter_of(self, prompt: Prompt) -> int:
        """Returns the place of the adapter of a prompt's draws."""
        job = next(iter(self._open[prompt.id].values())).job
        assert job is not None
        return self._adapters.get(job.adapter, NO_ADAPTER)

    def _open_prompts(self) -> None:
        for scheduler, terms in zip(self._schedulers, self._terms, strict=True):
            scheduler.open_waiting()
            names = {row: name for name, row in scheduler.rows.prompts.items()}
            for row in (prompt.row for prompt in scheduler.opened):
                job = next(iter(self._open[names[row]].values())).job
                assert job is not None
                terms.stop_ids[row] = -1
                terms.stop_ids[row, : len(job.stop_ids)] = job.stop_ids
                terms.adapter[row] = self._adapters.get(job.adapter, NO_ADAPTER)
        if any(scheduler.opened for scheduler in self._schedulers):
            # Copies, because the device may read them later.
            self._state = self.engine.set_terms(self._state, [_copy(terms) for terms in self._terms])

    def _submit(self) -> WindowOutputs:
        inputs = [scheduler.next_window(_address, _sampling) for scheduler in self._schedulers]
        self._state, outputs = self.engine.decode_window(self._weights, self._state, inputs)
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()
        return outputs

    def _read(self, window: WindowOutputs) -> None:
        outputs_of = self.engine.fetch_outputs(window)
        for scheduler, outputs in zip(self._schedulers, outputs_of, strict=True):
            for response in scheduler.process_outputs(outputs, 0):
                self._finish(response)
                if not self._open[response.prompt_id]:
                    scheduler.close([response.prompt_id])
                    for kept in (self._open, self._prompts, self._num_draws):
                        kept.pop(response.prompt_id)

    def _finish(self, response: Response) -> None:
        draw = self._open[response.prompt_id].pop(response.draw)
        job = draw.job
        assert job is not None
        job.responses[draw.index] = Sampled(response.tokens, response.logprobs, stopped=not response.truncated)
        if len(job.responses) == job.num_samples:
            job.done([job.responses[index] for index in range(job.num_samples)])


def _unknown(name: str) -> LoadedAdapter:
    raise ValueError(f"there are no adapters {name}.")


def _ignore(found: list[Sampled] | Exception) -> None:
    if isinstance(found, Exception):
        raise found


def _copy(terms: PromptTerms) -> PromptTerms:
    return jax.tree.map(np.array, terms)


def _address(request: Request) -> np.ndarray:
    assert isinstance(request, _Draw) and request.job is not None
    return token_lib.address(SERVED_STREAM, request.job.address_id, request.index)


def _sampling(request: Request) -> SamplingParams:
    assert isinstance(request, _Draw) and request.job is not None
    return request.job.sampling


def cut_at_stop(response: Sampled, texts: Sequence[str], decode: Callable[[np.ndarray], str]) -> Sampled:
    """Ends a response with the first token after which its text contains one of `texts`."""

    def contains(length: int) -> bool:
        text = decode(response.tokens[:length])
        return any(stop in text for stop in texts)

    if not texts or not contains(len(response.tokens)):
        return response
    low, high = 1, len(response.tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if contains(middle) else (middle + 1, high)
    return Sampled(response.tokens[:low], response.logprobs[:low], stopped=True)

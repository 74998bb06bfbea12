"""The service behind the HTTP interface: sessions, models, samplers, and the thread that owns the devices.

Methods of `Service` are called by the HTTP server. They check what needs no device, store the request, and return at
once. `Worker` runs the requests. Every ValueError is for the client.
"""

import dataclasses
import functools
import pathlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int32

from reinforce_ada_jax.learning.adapter_learner import AdapterLearner, LossRow
from reinforce_ada_jax.policy.lora import TARGETS, Lora
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving.http import Refusal, Served
from reinforce_ada_jax.serving.response_text import TextStops
from reinforce_ada_jax.serving.sampler import Sampled, SampleJob, Sampler
from reinforce_ada_jax.serving.settings import ServerSettings, check_max_tokens, check_prompt
from reinforce_ada_jax.serving.tinker import adapters, protocol
from reinforce_ada_jax.serving.tinker.futures import SampleFuture, SampleFutures
from reinforce_ada_jax.serving.tinker.protocol import Result, types
from reinforce_ada_jax.serving.tinker.store import MOST_SEQ, CheckpointRow, ModelRow, SamplerRow, Store

# Stop tokens of one request.
MAX_STOPS = 8
# The product of an adapter is multiplied by ALPHA / rank, as in the hosted service, and as usual with PEFT.
ALPHA = 32.0
SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Base(Served):
    """A served model that clients train adapters of, and sample."""

    learner: AdapterLearner
    bank: adapters.AdapterBank
    sampler: Sampler

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.engine.options.max_prompt_tokens + self.engine.options.max_response_tokens


def share(waiting: int, num_owners: int) -> int:
    """Returns how many of `waiting` places each of `num_owners` owners of requests may use: at least one.

    Requests that waited before another owner came stay waiting. So all owners together have at most waiting * (1 +
    1/2 + ... + 1/num_owners).
    """
    return max(1, waiting // num_owners)


class Service:
    """Everything that the HTTP interface offers, without HTTP."""

    def __init__(self, settings: ServerSettings, workdir: pathlib.Path, bases: dict[str, Base]):
        self.settings, self.workdir, self.bases = settings, workdir, bases
        self.store = Store(workdir)
        self.lock = threading.RLock()
        self.wake = threading.Event()  # there is something to do
        self.samples = SampleFutures()
        self.on_result: Callable[[str], None] = lambda request_id: None
        for base in bases.values():
            base.bank.load = functools.partial(self.load_adapter, base)
        now = time.monotonic()
        self.seen = {session: now for session, ended in self.store.sessions().items() if ended is None}

    # ---- sessions ------------------------------------------------------------------------------------------------

    def create_session(self, request: types.CreateSessionRequest) -> types.CreateSessionResponse:
        """Begins a session, which lasts while the client sends heartbeats."""
        with self.lock:
            if len(self.seen) >= self.settings.sessions:
                raise Refusal(
                    429, f"{len(self.seen)} sessions are open, and more may not (--sessions): try again later."
                )
            session = str(uuid.uuid4())
            self.store.add_session(session)
            self.seen[session] = time.monotonic()
        return types.CreateSessionResponse(session_id=session)

    def heartbeat(self, session: str) -> types.SessionHeartbeatResponse:
        with self.lock:  # it may end meanwhile
            self._check_session(session)
            self.seen[session] = time.monotonic()
        return types.SessionHeartbeatResponse()

    def _check_session(self, session: str) -> None:
        if session not in self.seen:
            ended = self.store.sessions().get(session, "it is unknown")
            raise Refusal(410, f"session {session} has ended: {ended}.")

    def end_session(self, session: str, why: str) -> None:
        """Ends a session: its samples are dropped, and its models end; their checkpoints stay."""
        with self.lock:
            if self.seen.pop(session, None) is None:
                return
            answer = protocol.error_result(f"session {session} has ended: {why}. {RESUME}")
            for request_id in self.store.end_session(session, why, answer):
                self.on_result(request_id)
            for request_id, future in list(self.samples.waiting.items()):
                if future.session == session:
                    self._drop(request_id, f"session {session} has ended: {why}.")
        self.wake.set()

    def _drop(self, request_id: str, why: str) -> None:
        """Answers a request with a reason, and ends its responses; their slots are free after a window."""
        job = self.samples.waiting[request_id].job
        self._finish_sample(request_id, protocol.error_result(why))
        if job is not None:
            for base in self.bases.values():
                base.sampler.cancel(job)

    def end_silent_sessions(self) -> None:
        limit = self.settings.session_s
        for session, seen in list(self.seen.items()):
            if time.monotonic() - seen > limit:
                self.end_session(session, f"no heartbeat came for {limit:g} s (--session_s)")

    # ---- models --------------------------------------------------------------------------------------------------

    def base(self, name: str | None) -> Base:
        if name not in self.bases:
            raise Refusal(400, f"base_model is {name!r:.160}; this server has {', '.join(self.bases)}.")
        return self.bases[name]

    def model(self, model_id: str) -> ModelRow:
        """Returns a model that requests may name, ended or not."""
        found = self.store.model(model_id)
        if found is None:
            raise Refusal(404, f"model {model_id!r:.160} is unknown: create it first.")
        return found

    def create(self, session: str, model_seq: int, kind: str, body: bytes) -> str:
        """Stores a request that makes a model; returns the id of its future."""
        self._check_session(session)
        return self.submit(f"{session}:train:{model_seq}", 0, kind, body)

    def submit(self, model_id: str, seq: int | None, kind: str, body: bytes) -> str:
        """Stores a request of a model, which runs after those with smaller numbers; returns the id of its future."""
        if seq is None or not 0 <= seq <= MOST_SEQ:
            raise Refusal(400, f"seq_id is {seq!s:.40}; it must number the requests of a model from 1.")
        request_id, waiting = f"{model_id}:{seq}", self.store.num_waiting()
        if seq:
            model = self.model(model_id)
            if model.ended is not None:
                raise Refusal(410, f"model {model_id} has ended with its session: {model.ended}. {RESUME}")
            # The limit is for the number of a request, not for how many wait: the next one to run is always taken.
            room = share(self.settings.waiting, len(waiting.keys() | {model_id}))
            if seq >= model.next_seq + room:
                raise Refusal(
                    429,
                    f"seq_id is {seq}, the model's next request is {model.next_seq}, and {room} may wait (--waiting): "
                    "try again later.",
                )
        elif self.store.num_creating() >= self.settings.waiting:
            raise Refusal(429, f"{self.settings.waiting} requests are waiting (--waiting): try again later.")
        self.store.add_request(request_id, model_id, seq, kind, body)
        self.wake.set()
        return request_id

    def get_info(self, model_id: str) -> types.GetInfoResponse:
        model = self.model(model_id)
        base = self.base(model.base)
        data = {"arch": base.engine.architecture.family, "model_name": base.name, "tokenizer_id": base.tokenizer_id}
        return types.GetInfoResponse.model_validate({
            "type": "get_info", "model_id": model.id, "model_name": base.name, "is_lora": True,
            "lora_rank": model.rank, "model_data": data,
        })  # fmt: skip

    # ---- sampling ------------------------------------------------------------------------------------------------

    def create_sampler(self, request: types.CreateSamplingSessionRequest) -> types.CreateSamplingSessionResponse:
        """Begins a sampling session over a base, or over a checkpoint of adapters."""
        self._check_session(request.session_id)
        base, path = request.base_model, request.model_path
        if path is not None:
            base = self.checkpoint(path).base
        name = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self.store.add_sampler(SamplerRow(name, request.session_id, self.base(base).name, path))
        return types.CreateSamplingSessionResponse(sampling_session_id=name)

    def sampler(self, sampler_id: str) -> SamplerRow:
        found = self.store.sampler(sampler_id)
        if found is None:
            raise Refusal(404, f"sampler {sampler_id!r:.160} is unknown, or has ended with its session.")
        return found

    def sample(self, request: types.SampleRequest) -> types.UntypedAPIFuture:
        """Puts a request for samples into the queue."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise Refusal(422, "sampling_session_id and seq_id are missing: use a SamplingClient of this client.")
        sampler = self.sampler(request.sampling_session_id)
        self._check_session(sampler.session)
        base = self.base(sampler.base)  # an earlier start of the server may have had other models
        request_id = f"{sampler.id}:{request.seq_id}"
        with self.lock:
            if request_id not in self.samples:
                waiting = self.samples.num_waiting()
                room = share(self.settings.waiting, len(waiting.keys() | {sampler.session}))
                if waiting[sampler.session] >= room:
                    raise Refusal(429, f"{room} requests of this session are waiting (--waiting): try again later.")
                # A checkpoint that is saved again under the same path has other weights.
                adapter = f"{sampler.path}#{self.checkpoint(sampler.path).created}" if sampler.path else ""
                future = self.samples.add(request_id, sampler.session)
                try:
                    self._queue_sample(request_id, future, base, adapter, request)
                except ValueError as error:
                    self.samples.finish(request_id, protocol.error_result(str(error)))
        self.wake.set()
        most = base.engine.options.output_rows  # more are refused
        ids = [f"{request_id}:{index}" for index in range(max(0, min(request.num_samples, most)))]
        return types.UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)

    def _queue_sample(
        self, request_id: str, future: SampleFuture, base: Base, adapter: str, request: types.SampleRequest
    ) -> None:
        asked, tokens = request.sampling_params, protocol.prompt_tokens(request.prompt)
        check_sample_request(base, request, tokens)
        texts = (asked.stop,) if isinstance(asked.stop, str) else tuple(x for x in asked.stop or () if type(x) is str)
        stop_ids = base.tokenizer.stop_ids
        if asked.stop is not None and not texts:
            stop_ids = tuple(x for x in asked.stop if isinstance(x, int))

        def done(found: list[Sampled] | Exception) -> None:
            if future.result is not None:
                return
            try:
                if isinstance(found, Exception):
                    raise found
                responses = found if stops is None else [stops.cut(index, each) for index, each in enumerate(found)]
                logprobs = None
                if request.prompt_logprobs:
                    logprobs = self._prompt_logprobs(base, adapter, tokens, request.prompt_logprobs_last_n)
                result = protocol.sample_result(responses, logprobs)
            except Exception as error:  # of this request alone, such as a checkpoint that was deleted meanwhile
                category = protocol.USER if isinstance(error, ValueError) else protocol.SERVER
                result = protocol.error_result(str(error), category)
            self._finish_sample(request_id, result)

        stops = TextStops(base.tokenizer, texts, lambda index: base.sampler.cancel(job, index)) if texts else None
        future.job = job = SampleJob(
            id=request_id,
            tokens=tokens,
            adapter=adapter,
            num_samples=request.num_samples,
            sampling=SamplingParams(
                max_tokens=asked.max_tokens or base.engine.options.max_response_tokens, temperature=asked.temperature,
                top_k=max(asked.top_k, 0), top_p=asked.top_p,
            ),
            stop_ids=stop_ids,
            seed=asked.seed,
            done=done,
            watch=None if stops is None else stops.watch,
        )  # fmt: skip
        base.sampler.submit(job)

    def _prompt_logprobs(
        self, base: Base, adapter: str, tokens: Int32[np.ndarray, " T"], last: int | None
    ) -> Float[np.ndarray, " T"]:
        """Returns the log-probability of each prompt token; nan for the first one and those not requested."""
        logprobs = np.full(len(tokens), np.nan, np.float32)
        if len(tokens) > 1:
            if adapter:
                chosen, params = self.load_adapter(base, adapter)
            else:
                chosen = Lora(1, ALPHA, tuple(TARGETS))
                params = base.learner.init(chosen, 0).params  # adapters that change nothing
            zeros = np.zeros(len(tokens) - 1, np.float32)
            (logprobs[1:],) = base.learner.forward(params, chosen, [LossRow(tokens[:-1], tokens[1:], zeros, zeros)])
        logprobs[: 0 if last is None else -last] = np.nan
        return logprobs

    def load_adapter(self, base: Base, adapter: str) -> tuple[Lora, Params]:
        """Returns the adapters of a checkpoint, by its path and the time of its creation; ValueError if it is gone."""
        path, _, created = adapter.partition("#")
        found = self.store.checkpoint(path)
        if found is None or str(found.created) != created:
            raise ValueError(f"the weights of this sampling client are no longer there ({path}): make a new one.")
        return adapters.load_params(self.folder(path), base.learner)

    def _finish_sample(self, request_id: str, result: Result) -> None:
        with self.lock:
            self.samples.finish(request_id, result)
        self.on_result(request_id)

    def cancel(self, request_id: str) -> None:
        with self.lock:
            if request_id in self.samples.waiting:
                self._drop(request_id, "the client cancelled this request.")

    def result(self, request_id: str) -> Result | None:
        """Returns the result of a future, or None while there is none; after a refusal the client samples again."""
        with self.lock:
            if request_id in self.samples:
                return self.samples.fetch(request_id)
        known, result = self.store.result(request_id)
        if not known:
            raise Refusal(
                410, f"future {request_id!r:.160} is unknown: the server was started again, or its time is up."
            )
        return result

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def folder(self, path: str) -> pathlib.Path:
        model, kind, name = path.removeprefix(SCHEME).split("/")
        return self.workdir / "checkpoints" / model / kind / name

    def checkpoint(self, path: str) -> CheckpointRow:
        """Returns a checkpoint that is there and has not expired."""
        found = self.store.checkpoint(path)
        if found is None or (found.expires is not None and found.expires < time.time()):
            raise Refusal(404, f"there is no checkpoint {path!r:.300}, or it has expired.")
        return found

    def remove_checkpoint(self, path: str) -> None:
        self.store.remove_checkpoint(path)
        shutil.rmtree(self.folder(path), ignore_errors=True)

    def weights_info(self, path: str) -> protocol.WeightsInfoResponse:
        checkpoint = self.checkpoint(path)
        model = self.model(checkpoint.model)
        return protocol.WeightsInfoResponse(
            base_model=checkpoint.base, is_lora=True, lora_rank=model.rank, train_unembed=False,
            train_mlp="down_proj" in model.targets, train_attn="q_proj" in model.targets,
        )  # fmt: skip


RESUME = (
    "Create a training client from a checkpoint: create_training_client_from_state_with_optimizer with a path of "
    "save_state."
)
ABSENT = {
    "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0, "target_prompt_logprobs": None, "prompt_alt_tokens_k": 0,
}  # fmt: skip


def check_sample_request(base: Base, request: types.SampleRequest, tokens: Int32[np.ndarray, " T"]) -> None:
    """Raises ValueError where the engine cannot answer a request for samples; `tokens` are those of its prompt."""
    options, vocabulary = base.engine.options, base.engine.architecture.vocab_size
    asked, length = request.sampling_params, len(tokens)
    absent = [name for name, nothing in ABSENT.items() if getattr(request, name) != nothing]
    if absent:
        raise ValueError(f"{', '.join(absent)}: this server does not compute it.")
    check_prompt(tokens, options, vocabulary)
    if asked.max_tokens is not None:
        check_max_tokens(asked.max_tokens, options)
    if not 1 <= request.num_samples <= options.output_rows:
        raise ValueError(f"num_samples is {request.num_samples}; it must be 1 to {options.output_rows}.")
    if isinstance(asked.stop, list | tuple) and len(asked.stop) > MAX_STOPS:
        raise ValueError(f"stop has {len(asked.stop)} entries; there may be {MAX_STOPS}.")
    ids = [each for each in asked.stop or () if isinstance(each, int)]
    if not all(0 <= each < vocabulary for each in ids):
        raise ValueError(f"stop has token ids outside of the vocabulary, 0 to {vocabulary - 1:,}.")
    if asked.stop == "" or (isinstance(asked.stop, list | tuple) and "" in asked.stop):
        raise ValueError("stop has an empty text, which every response contains: leave it out.")
    last = request.prompt_logprobs_last_n
    if last is not None and not 1 <= last < length:
        raise ValueError(
            f"prompt_logprobs_last_n is {last}; it must be 1 to {length - 1}, less than the prompt's tokens."
        )

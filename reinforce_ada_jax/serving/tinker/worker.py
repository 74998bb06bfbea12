"""The thread that owns the devices: it runs the requests of models in order, and a decode window between them.

A model's adapters and optimiser are in memory, and in the work directory as they were after its last `optim_step` or
load. Gradients summed since then are in memory only: after a kill they are computed again from the stored requests.
"""

import dataclasses
import pathlib
import re
import shutil
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable

import numpy as np

from reinforce_ada_jax.learning.adapter_learner import token_losses
from reinforce_ada_jax.learning.optimizer import AdamParams
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.policy.lora import Lora
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.serving.hosts import IDLE_S, DeviceThread
from reinforce_ada_jax.serving.http import Refusal
from reinforce_ada_jax.serving.tinker import adapters, protocol
from reinforce_ada_jax.serving.tinker.protocol import Result, types
from reinforce_ada_jax.serving.tinker.service import ALPHA, RESUME, SCHEME, Base, Service
from reinforce_ada_jax.serving.tinker.store import (
    FULL_DISK,
    CheckpointRow,
    ModelRow,
    RequestRow,
    SamplerRow,
    disk_is_full,
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# Kind of request whose effect is in memory only.
REPLAYED = "forward_backward"
# Number of weights of unnamed sampling clients that are stored for each model; older ones are removed.
MOST_UNNAMED = 64
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")  # of a checkpoint: one part of a path
MOST_TTL_S = 10 * 365 * 86_400
HOUSEKEEPING_S = 5.0


@dataclasses.dataclass(eq=False)
class Model:
    """A model in memory: the `Lora` of its adapters, their state, and the sum of gradients since the last step."""

    id: str
    base: Base
    lora: Lora
    state: LearnerState
    sums: Params | None = None


class Worker(DeviceThread):
    """Runs the requests of a service until it is stopped."""

    def __init__(self, service: Service):
        super().__init__(service.wake)
        self.service, self.store = service, service.store
        self.models: dict[str, Model] = {}
        self._cleaned = time.monotonic()
        self._is_full = False
        self._run_kind: dict[str, Callable[[RequestRow], Result]] = {
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
        }

    # ---- the loop ------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Restores every model, with its gradients, as it was when the last process ended."""
        for checkpoint in self.store.checkpoints():
            adapters.recover(self.service.folder(checkpoint.path))
        for row in self.store.models():
            if row.ended is None:
                self._restore(row)

    def _restore(self, row: ModelRow) -> None:
        base = self.service.bases.get(row.base)
        if base is None:
            raise ValueError(
                f"the work directory has a model of {row.base}, which is not served: add --model={row.base}=FOLDER, or "
                "choose another --workdir."
            )
        chosen, state = adapters.load(self._state_folder(row.id, row.state_seq), base.learner, optimizer=True)
        self.models[row.id] = model = Model(row.id, base, chosen, state)
        for request in self.store.done_since(row.id, row.state_seq, REPLAYED):
            self._add_gradient(model, request)

    def stop(self, within_s: float) -> bool:
        has_ended = super().stop(within_s)
        if has_ended:  # otherwise the process closes it, and the running request runs again at the next start
            self.store.close()
        return has_ended

    def run(self) -> None:
        self.repeat(self.step)  # what was accepted before an error, such as a full disk, runs at the next start

    def step(self) -> bool:
        """Runs one request of a model and one window of each base that has work; returns False if there was none."""
        if time.monotonic() - self._cleaned > HOUSEKEEPING_S:
            self._clean()
        request = self.store.next_request()
        if request is not None:
            self._execute(request)
        busy = [base for base in self.service.bases.values() if base.sampler.busy]
        for base in busy:
            base.sampler.turn()
        return bool(request or busy)

    def _execute(self, request: RequestRow) -> None:
        try:
            self.store.finish(request, self._result_of(request), replayed=False)  # no effect if it is stored already
        except sqlite3.Error as error:
            if not disk_is_full(error):
                raise
            if not self._is_full:
                print(f"warning: {FULL_DISK} Requests wait until then.", file=sys.stderr, flush=True)
            self._is_full = True
            self._forget_gradients(request.model)
            self._stopping.wait(IDLE_S)  # after it the request runs again
        else:
            self._is_full = False
            self.service.on_result(request.id)

    def _result_of(self, request: RequestRow) -> Result:
        """Runs a request; sqlite3.Error if its result could not be stored."""
        try:
            return self._run_kind[request.kind](request)
        except (ValueError, Refusal) as error:
            return protocol.error_result(str(error))
        except sqlite3.Error:
            raise
        except Exception as error:
            self._forget_gradients(request.model)
            if disk_is_full(error):  # while a checkpoint was written
                return protocol.error_result(FULL_DISK, protocol.SERVER)
            traceback.print_exc(file=sys.stderr)
            return protocol.error_result(f"{type(error).__name__}: {error!s:.500}", protocol.SERVER)

    def _forget_gradients(self, model_id: str) -> None:
        """Restores a model after a failure, because a part of its summed gradients may have been used."""
        row = self.store.model(model_id)
        if row is not None and row.ended is None and self.models.pop(model_id, None) is not None:
            self._restore(row)

    def _clean(self) -> None:
        """Ends silent sessions, and removes the files of ended sessions and of expired checkpoints."""
        self._cleaned = time.monotonic()
        try:
            self.service.end_silent_sessions()
            for row in self.store.models():
                if row.ended is not None:
                    self.models.pop(row.id, None)
                    shutil.rmtree(self.service.workdir / "models" / row.id, ignore_errors=True)
            live = set(self.service.seen)
            for checkpoint in self.store.checkpoints():
                expired = checkpoint.expires is not None and checkpoint.expires < time.time()
                unused = checkpoint.sampler is not None and checkpoint.sampler.split(":")[0] not in live
                if expired or unused:
                    self.service.remove_checkpoint(checkpoint.path)
        except sqlite3.Error as error:
            if not disk_is_full(error):
                raise

    # ---- models --------------------------------------------------------------------------------------------------

    def _state_folder(self, model_id: str, seq: int) -> pathlib.Path:
        return self.service.workdir / "models" / model_id / str(seq)

    def _model(self, model_id: str) -> Model:
        if model_id not in self.models:
            raise ValueError(f"model {model_id} has ended, or was never made. {RESUME}")
        return self.models[model_id]

    def _keep(self, model: Model, request: RequestRow, result: Result) -> Result:
        """Stores a model's state together with the result of the request that made it."""
        folder = self._state_folder(model.id, request.seq)
        adapters.save(folder, model.base.learner, model.lora, model.state, model.base.folder, optimizer=True)
        with self.store.transaction():
            self.store.set_state(model.id, request.seq)
            self.store.finish(request, result, replayed=False)
            self.store.drop_replays(model.id, request.seq)
        for old in folder.parent.iterdir():
            if old != folder:
                shutil.rmtree(old)
        return result

    def _add(self, request: RequestRow, session: str, model: Model, metadata: object, result: Result) -> Result:
        with self.service.lock, self.store.transaction():
            self._check_open(session)  # it may have ended since: its end would not find the model
            self.store.add_model(ModelRow(
                model.id, session, model.base.name, model.lora.rank, model.lora.targets, dict(metadata or {}),  # pyright: ignore
                next_seq=0, state_seq=0, created=time.time(), ended=None,
            ))  # fmt: skip
            self._keep(model, request, result)
        self.models[model.id] = model
        return result

    def _check_room(self, session: str) -> None:
        limit = self.service.settings.models
        if len(self.models) >= limit:
            self._clean()
        if len(self.models) >= limit:
            raise ValueError(
                f"{len(self.models)} models are in training, and more may not (--models): end a session first, with "
                "ServiceClient.close."
            )
        self._check_open(session)

    def _check_open(self, session: str) -> None:
        if session not in self.service.seen:
            raise ValueError(f"session {session} has ended.")

    def _check_rank(self, rank: int) -> None:
        most = self.service.settings.max_rank
        if not 1 <= rank <= most:
            raise ValueError(f"the rank of the adapters is {rank}; this server takes 1 to {most} (--max_rank).")

    def _create_model(self, request: RequestRow) -> Result:
        asked = protocol.parse(types.CreateModelRequest, request.body)
        self._check_room(asked.session_id)
        if asked.lora_config is None:
            raise ValueError("lora_config is missing: this server trains adapters, not all weights.")
        _check_optimizer(asked.optimizer_config.type)
        config, base = asked.lora_config, self.service.base(asked.base_model)
        self._check_rank(config.rank)
        targets = (*(ATTENTION if config.train_attn else ()), *(MLP if config.train_mlp else ()))
        if not targets:
            raise ValueError("this server has adapters on attention and MLP: set train_attn or train_mlp.")
        chosen = Lora(config.rank, ALPHA, targets)
        model = Model(request.model, base, chosen, base.learner.init(chosen, config.seed or 0))
        result = protocol.json_result(types.CreateModelResponse(model_id=model.id))
        return self._add(request, asked.session_id, model, asked.user_metadata, result)

    def _load_weights(self, request: RequestRow) -> Result:
        asked = protocol.parse(types.LoadWeightsRequest, request.body)
        if asked.optimizer_config is not None:
            _check_optimizer(asked.optimizer_config.type)
        base = self.service.base(self.service.checkpoint(asked.path).base)
        chosen, state = adapters.load(self.service.folder(asked.path), base.learner, optimizer=asked.optimizer)
        result = protocol.json_result(types.LoadWeightsResponse.model_validate(
            {"path": asked.path, "model_id": request.model, "type": "load_weights"}
        ))  # fmt: skip
        if request.seq == 0:  # the request makes the model
            session = request.model.split(":")[0]
            self._check_room(session)
            self._check_rank(chosen.rank)
            if asked.base_model not in (None, base.name):
                raise ValueError(f"base_model is {asked.base_model!r:.160}, and the checkpoint is of {base.name}.")
            model = Model(request.model, base, chosen, state)
            return self._add(request, session, model, asked.user_metadata, result)
        model = self._model(request.model)
        if (chosen, base.name) != (model.lora, model.base.name):
            raise ValueError(
                f"the checkpoint has adapters of rank {chosen.rank} on {base.name}, and the model of rank "
                f"{model.lora.rank} on {model.base.name}: create a training client from the checkpoint."
            )
        model.state, model.sums = state, None
        return self._keep(model, request, result)

    # ---- training ------------------------------------------------------------------------------------------------

    def _add_gradient(self, model: Model, request: RequestRow) -> Result:
        base, learner = model.base, model.base.learner
        asked = protocol.parse_loss_request(request.body, base.engine.architecture.vocab_size, base.max_tokens)
        if asked.forward_only:
            logprobs = learner.forward(model.state.params, model.lora, asked.rows)
            pairs = zip(logprobs, asked.rows, strict=True)
            losses = [np.asarray(token_losses(asked.loss, *each, asked.clip)) for each in pairs]
        else:
            model.sums, logprobs, losses = learner.forward_backward(
                model.state.params, model.sums, model.lora, asked.rows, asked.loss, asked.clip
            )
        return protocol.loss_result(logprobs, losses)

    def _forward_backward(self, request: RequestRow) -> Result:
        result = self._add_gradient(self._model(request.model), request)
        self.store.finish(request, result, replayed=True)
        return result

    def _optim_step(self, request: RequestRow) -> Result:
        model, asked = self._model(request.model), protocol.parse(types.OptimStepRequest, request.body)
        params = asked.optim_params
        if not isinstance(params, types.AdamParams):
            raise ValueError(f"the optimizer of this model is adamw, and the step is of {params.type!r:.80}.")
        if model.sums is None:
            raise ValueError("optim_step needs a gradient: call forward_backward first.")
        adam = AdamParams(
            params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm
        )
        sums, model.sums = model.sums, None
        try:
            model.state, norm = model.base.learner.step(model.state, sums, model.lora, adam)
        except ValueError as error:
            return self._keep(model, request, protocol.error_result(str(error)))
        metrics = {"optim/grad_norm": norm, "optim/lr": params.learning_rate}
        return self._keep(model, request, protocol.json_result({"metrics": metrics}))

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save(
        self,
        request: RequestRow,
        kind: str,
        name: str | None,
        ttl_s: int | None,
        metadata: dict[str, str] | None = None,
        sampler: str | None = None,
    ) -> Result:
        """Writes a checkpoint, which appears together with the result of the request."""
        if ttl_s is not None and not 1 <= ttl_s <= MOST_TTL_S:
            raise ValueError(f"ttl_seconds is {ttl_s!s:.40}; it must be 1 to {MOST_TTL_S:,}, or absent.")
        model = self._model(request.model)
        if name is None or not NAME.fullmatch(name):
            raise ValueError(
                f"the name {name!r:.160} is not allowed: use up to 128 letters, digits, '.', '_' and '-', and no '.' "
                "first."
            )
        path = f"{SCHEME}{model.id}/{kind}/{name}"
        folder = self.service.folder(path)
        adapters.save(
            folder, model.base.learner, model.lora, model.state, model.base.folder, optimizer=kind == "weights"
        )
        now = time.time()
        row = CheckpointRow(
            path, model.id, kind, model.base.name, now, None if ttl_s is None else now + ttl_s, metadata, sampler
        )
        answer = {"path": path} if sampler is None else {"sampling_session_id": sampler}
        result = protocol.json_result(answer | {"type": request.kind})
        with self.store.transaction():
            self.store.add_checkpoint(row)
            if sampler is not None:
                self.store.add_sampler(SamplerRow(sampler, request.model.split(":")[0], model.base.name, path))
            self.store.finish(request, result, replayed=False)
        return result

    def _save_weights(self, request: RequestRow) -> Result:
        asked = protocol.parse(types.SaveWeightsRequest, request.body)
        path = f"{SCHEME}{request.model}/weights/{asked.path}"
        if not asked.overwrite and self.store.checkpoint(path) is not None:
            raise ValueError(f"there is a checkpoint {path}: choose another name, or set overwrite.")
        return self._save(request, "weights", asked.path, asked.ttl_seconds, asked.user_metadata)

    def _save_for_sampler(self, request: RequestRow) -> Result:
        asked = protocol.parse(types.SaveWeightsForSamplerRequest, request.body)
        if asked.kind != "snapshot":
            raise ValueError(f"the kind of a sampling client is {asked.kind!r}; this server has 'snapshot'.")
        if asked.path is not None:
            return self._save(request, "sampler_weights", asked.path, asked.ttl_seconds, asked.user_metadata)
        old = [each for each in self.store.checkpoints() if each.model == request.model and each.sampler is not None]
        for checkpoint in old[: -MOST_UNNAMED + 1]:
            self.service.remove_checkpoint(checkpoint.path)
        sampler = f"{request.model.split(':')[0]}:sample:{asked.sampling_session_seq_id}"
        return self._save(request, "sampler_weights", f"sampler-{request.seq}", None, sampler=sampler)

    def _save_external(self, request: RequestRow) -> Result:
        asked = protocol.parse(types.SaveWeightsExternalRequest, request.body)
        if asked.age_encryption_recipients:
            raise ValueError("age_encryption_recipients: this server does not encrypt checkpoints.")
        return self._save(request, "external_weights", asked.path, asked.ttl_seconds)


def _check_optimizer(name: str) -> None:
    if name != "adamw":
        raise ValueError(f"the optimizer is {name!r:.80}; this server has adamw.")

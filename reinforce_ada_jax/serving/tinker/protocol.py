"""Messages of the Tinker interface: requests are parsed into plain records, results are written as bytes.

The message classes are those of the client itself (`tinker`, pinned), so both sides have the same messages. Every
ValueError here is meant for the client.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pydantic
from google.protobuf.message import DecodeError
from jaxtyping import Float, Int32
from tinker import types
from tinker.proto import tinker_public_pb2 as pb2
from tinker.types.weights_info_response import WeightsInfoResponse

from reinforce_ada_jax.learning.adapter_learner import LOSSES, Clip, LossRow
from reinforce_ada_jax.serving.sampler import Sampled

__all__ = ["WeightsInfoResponse", "types"]
JSON, PROTO = "application/json", "application/x-protobuf"
USER, SERVER = "user", "server"
# Inputs of each loss in addition to the targets.
INPUTS = {"cross_entropy": ("weights",)} | dict.fromkeys(
    ("importance_sampling", "ppo", "cispo"), ("logprobs", "advantages")
)
DTYPES = {pb2.DTYPE_FLOAT32: np.dtype(np.float32), pb2.DTYPE_INT64: np.dtype(np.int64)}
Model = TypeVar("Model", bound=pydantic.BaseModel)


def parse(kind: type[Model], body: bytes) -> Model:
    """Returns a request of the client's own class `kind`; ValueError if the body is not such a request."""
    try:
        return kind.model_validate(json.loads(body))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the request is no {kind.__name__}: {error!s:.500}") from error


@dataclasses.dataclass(frozen=True)
class LossRequest:
    """Request for `forward` or `forward_backward`."""

    rows: list[LossRow]  # one for each datum
    loss: str  # a name of `LOSSES`
    clip: Clip  # bounds of its ratio
    forward_only: bool  # no gradient is wanted


def parse_loss_message(body: bytes) -> pb2.ForwardBackwardRequest:
    """Returns a `forward_backward` request; ValueError if the body is not such a request."""
    try:
        return pb2.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"the request is no ForwardBackwardRequest ({error!s:.200}).") from error


def parse_loss_request(body: bytes, vocab_size: int, max_tokens: int) -> LossRequest:
    """Returns the content of a `forward_backward` request; ValueError if this server cannot answer it."""
    message = parse_loss_message(body)
    if message.loss_fn not in LOSSES:
        raise ValueError(f"loss_fn is {message.loss_fn!r:.80}; this server has {', '.join(LOSSES)}.")
    rows = [_row(datum, message.loss_fn, index) for index, datum in enumerate(message.data)]
    if not rows:
        raise ValueError("the request has no data.")
    for index, row in enumerate(rows):
        if len(row.tokens) > max_tokens:
            raise ValueError(
                f"datum {index} has {len(row.tokens):,} tokens; this server takes {max_tokens:,} at most (its "
                "--max_prompt_tokens and --max_response_tokens together)."
            )
        ids = np.concatenate([row.tokens, row.targets])
        if not (0 <= ids.min() and ids.max() < vocab_size):
            raise ValueError(f"datum {index} has token ids outside of the vocabulary, 0 to {vocab_size - 1:,}.")
        if not (np.isfinite(row.factors).all() and np.isfinite(row.old_logprobs).all()):
            raise ValueError(f"datum {index} has loss inputs that are not finite.")
    return LossRequest(rows, message.loss_fn, _clip(message), message.forward_only)


def _clip(message: Any) -> Clip:
    names = {"clip_low_threshold": "low", "clip_high_threshold": "high"}
    # Clients write numbers into the older field, too; some clients know only this one.
    given = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if key in names and not value.HasField("number"):
            raise ValueError(f"loss_fn_config has {key} = {value.text!r:.80}; it must be a number.")
        given[key] = value.number
    unknown = [key for key in given if message.loss_fn not in ("ppo", "cispo") or key not in names]
    if unknown:
        raise ValueError(f"loss_fn_config has {', '.join(unknown)}, which {message.loss_fn} does not have here.")
    return Clip(**{names[key]: value for key, value in given.items()})


def _row(datum: Any, loss: str, index: int) -> LossRow:
    tokens = _tokens(datum.model_input, f"datum {index}")
    inputs = {name: _vector(tensor, f"{name} of datum {index}") for name, tensor in datum.loss_fn_inputs.items()}
    unknown = sorted(inputs.keys() - {"target_tokens", *INPUTS[loss]})
    missing = {"target_tokens", *(INPUTS[loss] if loss != "cross_entropy" else ())} - inputs.keys()
    if unknown or missing:
        raise ValueError(
            f"datum {index} has loss_fn_inputs {sorted(inputs)}; {loss} takes target_tokens, {', '.join(INPUTS[loss])}."
        )
    for name, values in inputs.items():
        if len(values) != len(tokens):
            raise ValueError(f"{name} of datum {index} has {len(values)} values for {len(tokens)} tokens.")
    ones, zeros = np.ones(len(tokens), np.float32), np.zeros(len(tokens), np.float32)
    return LossRow(
        tokens=tokens,
        targets=np.clip(inputs["target_tokens"], -1, 2**31 - 1).astype(np.int32),  # none beyond int32 becomes a token
        factors=np.asarray(inputs.get("advantages", inputs.get("weights", ones)), np.float32),
        old_logprobs=np.asarray(inputs.get("logprobs", zeros), np.float32),
    )


def _tokens(chunks: Sequence[Any], owner: str) -> Int32[np.ndarray, " T"]:
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in chunks):
        raise ValueError(f"{owner} has chunks other than text: this server has language models only.")
    tokens = np.frombuffer(b"".join(chunk.encoded_text.tokens for chunk in chunks), np.int32)
    if not len(tokens):
        raise ValueError(f"{owner} has no tokens.")
    return tokens


def _vector(tensor: Any, name: str) -> np.ndarray:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise ValueError(f"{name} has {len(tensor.shape)} axes or is sparse; this server takes one value per token.")
    if tensor.dtype not in DTYPES or len(tensor.dense) % DTYPES[tensor.dtype].itemsize:
        raise ValueError(f"{name} is neither float32 nor int64.")
    return np.frombuffer(tensor.dense, DTYPES[tensor.dtype])


def prompt_tokens(prompt: types.ModelInput) -> Int32[np.ndarray, " T"]:
    """Returns the tokens of a prompt; ValueError if it has other chunks, or numbers that are no token ids."""
    if any(chunk.type != "encoded_text" for chunk in prompt.chunks):
        raise ValueError("the prompt has chunks other than text: this server has language models only.")
    try:
        return np.array([token for chunk in prompt.chunks for token in chunk.tokens], np.int32)  # pyright: ignore
    except OverflowError as error:
        raise ValueError(f"the prompt has token ids outside of the vocabulary ({error}).") from error


@dataclasses.dataclass(frozen=True)
class Result:
    """Body of an answer to `retrieve_future`."""

    content_type: str
    body: bytes


def json_result(value: pydantic.BaseModel | Mapping[str, Any]) -> Result:
    content = value.model_dump(mode="json", exclude_none=True) if isinstance(value, pydantic.BaseModel) else value
    return Result(JSON, json.dumps(content).encode())


def error_result(message: str, category: str = USER) -> Result:
    """Returns the answer that the client raises as its RequestFailedError."""
    return json_result({"error": message, "category": category})


def loss_result(logprobs: Sequence[Float[np.ndarray, " T"]], losses: Sequence[Float[np.ndarray, " T"]]) -> Result:
    fields = {"logprobs": _batched(logprobs), "elementwise_loss": _batched(losses)}
    message = pb2.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[pb2.ArrayRecord(type_tag="ArrayRecord", fields=fields, num_datums=len(logprobs))],
        metrics={"loss:sum": float(sum(loss.sum(dtype=np.float64) for loss in losses))},
    )
    return Result(PROTO, message.SerializeToString())


def _batched(values: Sequence[Float[np.ndarray, " T"]]) -> Any:
    offsets = np.cumsum([0, *(4 * len(each) for each in values)], dtype=np.int64)
    data = np.concatenate(values).astype(np.float32).tobytes()
    return pb2.BatchedTensor(data=data, offsets=offsets.tobytes(), dtype=pb2.DTYPE_FLOAT32)


def sample_result(responses: Sequence[Sampled], prompt_logprobs: Float[np.ndarray, " T"] | None = None) -> Result:
    """Returns the answer to `sample`; `prompt_logprobs` is nan where nothing was computed."""
    message = pb2.SampleResponse()
    for response in responses:
        message.sequences.add(
            stop_reason=pb2.STOP_REASON_STOP if response.stopped else pb2.STOP_REASON_LENGTH,
            tokens=response.tokens.astype(np.int32).tobytes(),
            logprobs=response.logprobs.astype(np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    return Result(PROTO, message.SerializeToString())

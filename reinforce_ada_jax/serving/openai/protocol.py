"""Requests of OpenAI's interface, and the errors in its format.

If this server does not support a field that would change the answer, it refuses the request.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, Field
from starlette.responses import JSONResponse, Response

from reinforce_ada_jax.learning.scoring import MAX_TOP
from reinforce_ada_jax.serving.http import Refusal

MAX_STOPS, MAX_STOP_CHARS = 16, 256
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP)]
DEFAULT_COMPLETION_TOKENS = 16
# By status: the type and the code of an error, as OpenAI's clients know them.
ERRORS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "not_ready"),
}
# Names of types that pydantic adds to the location of an error.
TYPES = ("str", "int", "constrained-str")
# Statuses of temporary refusals: a client may send the same request again.
RETRIED = (429, 503)


class Invalid(Refusal):
    """A request with a wrong field, which `param` names."""

    def __init__(self, why: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(status, why)
        self.param, self.code = param, code


def error_response(refusal: Refusal) -> Response:
    headers = {"Retry-After": "1"} if refusal.status in RETRIED else {}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(refusal), status_code=refusal.status, headers=headers)


def error_body(refusal: Refusal) -> dict[str, Any]:
    kind, code = ERRORS.get(refusal.status, ERRORS[400])
    param = refusal.param if isinstance(refusal, Invalid) else None
    code = (refusal.code if isinstance(refusal, Invalid) else None) or code
    return {"error": {"message": str(refusal), "type": kind, "param": param, "code": code}}


# ---- requests --------------------------------------------------------------------------------------------------------


def _only(*values: Any) -> AfterValidator:
    """Returns the check of an unsupported field, which may have only values that change nothing."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(f"this server does not have it: leave it out, or send {json.dumps(values[-1])}")
        return value

    return AfterValidator(check)


Absent = Annotated[Any, _only(None)]
Off = Annotated[Any, _only(None, False)]
Zero = Annotated[Any, _only(None, 0)]
Item = TypeVar("Item")
# A list whose first wrong item ends its check: 250,000 errors took 7 s and 600 MB.
Many = Annotated[list[Item], Field(fail_fast=True)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(BaseModel, extra="forbid", strict=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is padded


class Request(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Fields that completions and chat have in common; `top_k` is an addition of this server."""

    model: str
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # They change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: Off = None
    service_tier: Annotated[Any, _only(None, "default", "auto")] = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: Annotated[Any, _only(None, {})] = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Request):
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: TopLogprobs | None = None
    best_of: Annotated[Any, _only(None, 1)] = None
    echo: bool | None = None
    suffix: Annotated[Any, _only(None, "")] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each as text or as tokens."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most probable tokens for each token; None if no log-probabilities are requested."""
        return self.logprobs


class TextPart(BaseModel, extra="forbid", strict=True):
    type: Literal["text"]
    text: str


class FunctionCall(BaseModel, strict=True):
    """A call that the model made. Its arguments arrive as JSON text; here they are parsed, as templates need them."""

    name: str
    arguments: pydantic.Json[Any]


class ToolCall(BaseModel, strict=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(BaseModel, extra="ignore", strict=True):  # clients send the server's answers back
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(BaseModel, extra="allow", strict=True):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel, extra="forbid", strict=True):
    type: Literal["function"]
    function: Function


class ChatRequest(Request):
    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Many[Tool] | None = None
    tool_choice: Annotated[Any, _only(None, "none", "auto")] = None
    parallel_tool_calls: Annotated[Any, _only(None, True)] = None
    response_format: Annotated[Any, _only(None, {"type": "text"})] = None
    modalities: Annotated[Any, _only(None, ["text"])] = None
    functions: Absent = None
    function_call: Absent = None
    reasoning_effort: Absent = None
    verbosity: Absent = None
    prediction: Absent = None
    audio: Absent = None
    web_search_options: Absent = None

    @property
    def num_top_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise Invalid("top_logprobs is given without logprobs: send logprobs=true as well.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call, as chat templates take them."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """Returns a request; Invalid if the body is no JSON, or a field is unknown, missing or wrong."""
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # A union adds the names of its members, which are no fields.
        param = ".".join(str(part) for part in first["loc"] if part not in TYPES and not str(part).endswith("]"))
        if first["type"] == "extra_forbidden":
            raise Invalid(f"{param:.200}: this server does not know the field.", param[:200]) from None
        reason = first["msg"].removeprefix("Value error, ").rstrip(".")
        raise Invalid(f"{param or 'body':.200}: {reason:.300}.", param[:200] or None) from None


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns messages as chat templates take them: text alone, arguments of calls as objects."""
    rendered = []
    for index, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        if content is None and not message.tool_calls:
            raise Invalid(f"messages.{index}.content: it is missing.", f"messages.{index}.content")
        role = "system" if message.role == "developer" else message.role
        row: dict[str, Any] = {"role": role, "content": content or ""}
        row |= message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        if message.tool_calls:
            row["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        rendered.append(row)
    return rendered

"""Answers in OpenAI's format: one object, or a stream of server-sent events."""

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from reinforce_ada_jax.environments import tool_calls
from reinforce_ada_jax.serving.http import Refusal
from reinforce_ada_jax.serving.openai import protocol
from reinforce_ada_jax.serving.openai.call import Call, Choice
from reinforce_ada_jax.serving.openai.protocol import ChatRequest, CompletionRequest
from reinforce_ada_jax.serving.openai.response_text import Piece


class Answer:
    """Answer to one request, of which `call` has the responses."""

    def __init__(self, asked: CompletionRequest | ChatRequest, call: Call):
        self._asked, self._call = asked, call
        self._is_chat = isinstance(asked, ChatRequest)
        offered = asked.offered_tools if isinstance(asked, ChatRequest) else []
        self._tools = {tool["function"]["name"] for tool in offered}
        self._id = ("chatcmpl-" if self._is_chat else "cmpl-") + uuid.uuid4().hex

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        created = int(self._call.created)
        return {"id": self._id, "object": kind, "created": created, "model": self._asked.model, "choices": choices}

    def _usage(self) -> dict[str, int]:
        prompt, completion = self._call.num_prompt_tokens, self._call.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _end(self, choice: Choice) -> tuple[str, list[tool_calls.Call], str]:
        """Returns the text of a finished response, the calls of tools after it, and the reason of its end."""
        text, calls = choice.text.text, []
        if self._tools:
            text, calls = tool_calls.parse_calls(text, self._tools)
        return text, calls, "tool_calls" if calls else choice.finish_reason

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Returns the tokens with their log-probabilities; the most probable one is the token itself, if there is one.

        The sampler knows the probability of the tokens that it drew. Without temperature these are the most probable.
        """
        if self._asked.num_top_logprobs is None:
            return None
        with_top = self._asked.num_top_logprobs > 0
        if not self._is_chat:
            return {
                "tokens": [piece.text for piece in pieces],
                "token_logprobs": [piece.logprob for piece in pieces],
                "top_logprobs": [{piece.text: piece.logprob} for piece in pieces] if with_top else None,
                "text_offset": [piece.begin for piece in pieces],
            }
        content = []
        for piece in pieces:
            entry = {"token": piece.text, "logprob": piece.logprob, "bytes": list(piece.text.encode())}
            content.append(entry | {"top_logprobs": [dict(entry)] if with_top else []})
        return {"content": content, "refusal": None}

    def whole(self) -> dict[str, Any]:
        """Returns the answer when all responses have ended."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._call.choices):
            text, calls, reason = self._end(choice)
            logprobs = self._logprobs(choice.text.pieces)
            row: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": reason}
            if self._is_chat:
                content = None if calls and not text.strip() else text
                row["message"] = {"role": "assistant", "content": content, "refusal": None}
                if calls:
                    row["message"]["tool_calls"] = [_tool_call(each) for each in calls]
            else:
                row["text"] = text
            choices.append(row)
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._frame(kind, choices) | {"usage": self._usage()}

    # ---- streams -------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[str]:
        """Yields the events of a stream; what has not ended is cancelled when the client closes it."""
        call, growing = self._call, [_Growing(index) for index in range(len(self._call.choices))]
        try:
            if self._is_chat:
                yield _event([self._chunk(each, {"role": "assistant", "content": ""}) for each in growing])
            while not all(each.ended for each in growing):
                await call.changed()
                pairs = zip(growing, call.choices, strict=True)
                if chunks := [chunk for each, choice in pairs if not each.ended for chunk in self._new(each, choice)]:
                    yield _event(chunks)
            if self._asked.includes_usage:
                yield _event([self._frame(self._kind, []) | {"usage": self._usage()}])
            yield "data: [DONE]\n\n"
        except Exception as error:  # the sampler's; the status is sent already
            yield _event([protocol.error_body(Refusal(500, f"{type(error).__name__}: {error!s:.300}"))])
        finally:
            call.cancel()

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(
        self, growing: "_Growing", delta: dict[str, Any], pieces: Sequence[Piece] = (), reason: str | None = None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(pieces) if pieces else None
        row: dict[str, Any] = {"index": growing.index, "logprobs": logprobs, "finish_reason": reason}
        row |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        frame = self._frame(self._kind, [row])
        return frame | {"usage": None} if self._asked.includes_usage else frame

    def _new(self, growing: "_Growing", choice: Choice) -> list[dict[str, Any]]:
        """Returns the chunks of one response that have not been sent."""
        calls, reason = [], None
        if choice.finish_reason:
            text, calls, reason = self._end(choice)
            pieces = choice.text.pieces[growing.num_pieces :]
        else:
            length = choice.text.settled_length
            if self._tools:
                length = min(length, tool_calls.settled_length(choice.text.text))
            text = choice.text.text[:length]
            pieces = [
                each for each in choice.text.pieces[growing.num_pieces :] if each.begin + len(each.text) <= length
            ]
        chunks, new = [], text[growing.num_chars :]
        if new or pieces:
            chunks.append(self._chunk(growing, {"content": new}, pieces))
        if calls:
            delta = [{"index": index} | _tool_call(each) for index, each in enumerate(calls)]
            chunks.append(self._chunk(growing, {"tool_calls": delta}))
        growing.num_chars += len(new)
        growing.num_pieces += len(pieces)
        if reason:
            growing.ended = True
            chunks.append(self._chunk(growing, {}, reason=reason))
        return chunks


class _Growing:
    """Amount that a stream has sent of one response."""

    def __init__(self, index: int):
        self.index, self.num_chars, self.num_pieces, self.ended = index, 0, 0, False


def _tool_call(call: tool_calls.Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _event(chunks: Sequence[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n" for chunk in chunks)

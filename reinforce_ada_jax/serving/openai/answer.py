"""Answers in OpenAI's format: one object, or a stream of server-sent events."""

import asyncio
import bisect
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from reinforce_ada_jax.environments import tool_calls
from reinforce_ada_jax.serving.http import Refusal
from reinforce_ada_jax.serving.openai import protocol
from reinforce_ada_jax.serving.openai.call import Call, Choice
from reinforce_ada_jax.serving.openai.protocol import ChatRequest, CompletionRequest
from reinforce_ada_jax.serving.response_text import token_text

# Number for log-probabilities that are not finite, as in OpenAI's answers: JSON has no infinity.
LEAST_LOGPROB = -9999.0
Made = TypeVar("Made")


class Answer:
    """Answer to one request; `call` has its responses."""

    def __init__(self, asked: CompletionRequest | ChatRequest, call: Call, executor: Executor):
        """`executor` runs work that takes too long for the event loop."""
        self._asked, self._call, self._executor = asked, call, executor
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

    def _logprob(self, choice: Choice, index: int) -> tuple[float | None, list[tuple[str, float]] | None]:
        """Returns the log-probability of a piece's token, and the most probable tokens at its position with theirs.

        Both are None for the first token of a prompt. Without scores, the piece's token is the most probable one: at
        temperature 0 the sampler draws it.
        """
        piece, scores, count = choice.text.pieces[index], choice.scores, self._asked.num_top_logprobs
        if scores is None:
            return piece.logprob, [(piece.text, piece.logprob)][:count]
        if scores.top_ids[index, 0] < 0:
            return None, None
        pairs = zip(scores.top_ids[index, :count].tolist(), scores.top_logprobs[index, :count].tolist(), strict=True)
        tokenizer = self._call.tokenizer
        top = [
            (piece.text if token == piece.token else token_text(tokenizer, token), max(logprob, LEAST_LOGPROB))
            for token, logprob in pairs
        ]
        return max(float(scores.logprobs[index]), LEAST_LOGPROB), top

    def _logprobs(self, choice: Choice, shown: range) -> dict[str, Any] | None:
        """Returns pieces of the text with their log-probabilities, and with the most probable tokens."""
        if self._asked.num_top_logprobs is None:
            return None
        rows = [(choice.text.pieces[index], *self._logprob(choice, index)) for index in shown]
        if self._is_chat:
            content = [
                _chat_token(piece.text, logprob) | {"top_logprobs": [_chat_token(*each) for each in top or ()]}
                for piece, logprob, top in rows
            ]
            return {"content": content, "refusal": None}
        tops = [None if top is None else _by_text([*top, (piece.text, logprob)]) for piece, logprob, top in rows]
        return {
            "tokens": [piece.text for piece, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": tops if self._asked.num_top_logprobs > 0 else None,
            "text_offset": [piece.begin for piece, _, _ in rows],
        }

    async def made(self, make: Callable[[], Made]) -> Made:
        """Returns the result of `make`; with scores, which take long, it runs outside of the event loop."""
        if not self._call.terms.scored:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._executor, make)

    def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for choice in self._call.choices:
            text, calls, reason = self._end(choice)
            logprobs = self._logprobs(choice, range(len(choice.text.pieces)))
            row: dict[str, Any] = {"index": choice.index, "logprobs": logprobs, "finish_reason": reason}
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
        """Yields the events of a stream; when the client closes it, responses that have not ended are cancelled."""
        call = self._call
        try:
            if self._is_chat:
                yield _event([self._chunk(choice, {"role": "assistant", "content": ""}) for choice in call.choices])
            while not all(choice.is_sent for choice in call.choices):
                await call.changed()
                if event := await self.made(self._next_event):
                    yield event
            if self._asked.includes_usage:
                yield _event([self._frame(self._kind, []) | {"usage": self._usage()}])
            yield "data: [DONE]\n\n"
        except Exception as error:  # of the sampler, or because the server ends; the status has been sent already
            refusal = error if isinstance(error, Refusal) else Refusal(500, f"{type(error).__name__}: {error!s:.300}")
            yield _event([protocol.error_body(refusal)])
        finally:
            call.cancel()

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _next_event(self) -> str:
        """Returns an event with the unsent parts of all responses; "" if there are none."""
        return _event([chunk for choice in self._call.choices if not choice.is_sent for chunk in self._new(choice)])

    def _chunk(
        self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"index": choice.index, "logprobs": logprobs, "finish_reason": reason}
        row |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        frame = self._frame(self._kind, [row])
        return frame | {"usage": None} if self._asked.includes_usage else frame

    def _new(self, choice: Choice) -> list[dict[str, Any]]:
        """Returns the unsent chunks of one response; a response with scores is sent as a whole."""
        calls, reason = [], None
        num_pieces = len(choice.text.pieces)
        if choice.finish_reason:
            text, calls, reason = self._end(choice)
        elif self._call.terms.scored:
            return []
        else:
            length = choice.text.settled_length
            if self._tools:
                length = min(length, tool_calls.settled_length(choice.text.text))
            text = choice.text.text[:length]
            # Tokens of a character that is not complete begin at the end: a later stop text may still remove them.
            num_pieces = min(
                bisect.bisect_right(choice.text.pieces, length, key=lambda each: each.begin + len(each.text)),
                bisect.bisect_left(choice.text.pieces, length, key=lambda each: each.begin),
            )
        chunks, new, shown = [], text[choice.num_sent_chars :], range(choice.num_sent_pieces, num_pieces)
        if new or shown:
            chunks.append(self._chunk(choice, {"content": new}, self._logprobs(choice, shown) if shown else None))
        if calls:
            delta = [{"index": index} | _tool_call(each) for index, each in enumerate(calls)]
            chunks.append(self._chunk(choice, {"tool_calls": delta}))
        choice.num_sent_chars += len(new)
        choice.num_sent_pieces = max(choice.num_sent_pieces, num_pieces)
        if reason:
            choice.is_sent = True
            chunks.append(self._chunk(choice, {}, reason=reason))
        return chunks


def _tool_call(call: tool_calls.Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _by_text(pairs: Sequence[tuple[str, float | None]]) -> dict[str, float | None]:
    """Returns the log-probability of each text; the first one where tokens have the same text."""
    found: dict[str, float | None] = {}
    for text, logprob in pairs:
        found.setdefault(text, logprob)
    return found


def _chat_token(text: str, logprob: float | None) -> dict[str, Any]:
    """Returns a token in the format of chats; `bytes` is None for a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _event(chunks: Sequence[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n" for chunk in chunks)

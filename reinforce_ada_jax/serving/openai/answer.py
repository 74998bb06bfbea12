"""Answers in OpenAI's format: one object, or a stream of server-sent events."""

import asyncio
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
from reinforce_ada_jax.serving.openai.response_text import Piece, token_text

# A log-probability that is not finite, which JSON lacks: OpenAI's number for the same.
LEAST_LOGPROB = -9999.0
Made = TypeVar("Made")


class Answer:
    """Answer to one request, of which `call` has the responses."""

    def __init__(self, asked: CompletionRequest | ChatRequest, call: Call, executor: Executor):
        """`executor` makes what takes too long for the event loop."""
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

    def _top(self, choice: Choice, index: int) -> list[tuple[str, float]] | None:
        """Returns the most probable tokens in the place of a piece, with their log-probabilities; None: nothing.

        Without scores it is the token itself: at temperature 0 the sampler draws the most probable one.
        """
        piece, count = choice.text.pieces[index], self._asked.num_top_logprobs or 0
        if choice.scores is None:
            return [(piece.text, piece.logprob)][:count]
        if choice.scores.top_ids[index, 0] < 0:
            return None
        pairs = zip(choice.scores.top_ids[index].tolist(), choice.scores.top_logprobs[index].tolist(), strict=True)
        tokenizer = self._call.tokenizer
        return [
            (piece.text if token == piece.token else token_text(tokenizer, token), max(logprob, LEAST_LOGPROB))
            for token, logprob in list(pairs)[:count]
        ]

    def _logprob(self, choice: Choice, index: int) -> float | None:
        """Returns the log-probability of a piece's token; None for the first token of a prompt."""
        if choice.scores is None:
            return choice.text.pieces[index].logprob
        if choice.scores.top_ids[index, 0] < 0:
            return None
        return max(float(choice.scores.logprobs[index]), LEAST_LOGPROB)

    def _logprobs(self, choice: Choice, shown: range) -> dict[str, Any] | None:
        """Returns pieces of the text with their log-probabilities, and with the most probable tokens."""
        if self._asked.num_top_logprobs is None:
            return None
        pieces = [choice.text.pieces[index] for index in shown]
        logprobs = [self._logprob(choice, index) for index in shown]
        tops = [self._top(choice, index) for index in shown]
        if not self._is_chat:
            with_top = self._asked.num_top_logprobs > 0
            return {
                "tokens": [piece.text for piece in pieces],
                "token_logprobs": logprobs,
                "top_logprobs": [
                    None if top is None else _by_text([*top, (piece.text, logprob)])
                    for piece, logprob, top in zip(pieces, logprobs, tops, strict=True)
                ] if with_top else None,
                "text_offset": [piece.begin for piece in pieces],
            }  # fmt: skip
        content = []
        for piece, logprob, top in zip(pieces, logprobs, tops, strict=True):
            entry = _chat_token(piece.text, logprob)
            content.append(entry | {"top_logprobs": [_chat_token(*each) for each in top or ()]})
        return {"content": content, "refusal": None}

    async def made(self, make: Callable[[], Made]) -> Made:
        """Returns what `make` returns; where scores make it long, it does not run in the event loop."""
        if not self._call.terms.scored:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._executor, make)

    def whole(self) -> dict[str, Any]:
        """Returns the answer when all responses have ended."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._call.choices):
            text, calls, reason = self._end(choice)
            logprobs = self._logprobs(choice, range(len(choice.text.pieces)))
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
                if event := await self.made(lambda: self._next_event(growing)):
                    yield event
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

    def _next_event(self, growing: Sequence["_Growing"]) -> str:
        """Returns what has not been sent of all responses; "" if there is nothing."""
        pairs = zip(growing, self._call.choices, strict=True)
        return _event([chunk for each, choice in pairs if not each.ended for chunk in self._new(each, choice)])

    def _chunk(
        self,
        growing: "_Growing",
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"index": growing.index, "logprobs": logprobs, "finish_reason": reason}
        row |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        frame = self._frame(self._kind, [row])
        return frame | {"usage": None} if self._asked.includes_usage else frame

    def _new(self, growing: "_Growing", choice: Choice) -> list[dict[str, Any]]:
        """Returns the chunks of one response that have not been sent; one that is scored is sent as a whole."""
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
            while num_pieces and not _ends_within(choice.text.pieces[num_pieces - 1], length):
                num_pieces -= 1
        chunks, new, shown = [], text[growing.num_chars :], range(growing.num_pieces, num_pieces)
        if new or shown:
            chunks.append(self._chunk(growing, {"content": new}, self._logprobs(choice, shown) if shown else None))
        if calls:
            delta = [{"index": index} | _tool_call(each) for index, each in enumerate(calls)]
            chunks.append(self._chunk(growing, {"tool_calls": delta}))
        growing.num_chars += len(new)
        growing.num_pieces = max(growing.num_pieces, num_pieces)
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


def _ends_within(piece: Piece, length: int) -> bool:
    return piece.begin + len(piece.text) <= length


def _by_text(pairs: Sequence[tuple[str, float | None]]) -> dict[str, float | None]:
    """Returns the log-probability of each text; the first one where tokens have the same text."""
    found: dict[str, float | None] = {}
    for text, logprob in pairs:
        found.setdefault(text, logprob)
    return found


def _chat_token(text: str, logprob: float | None) -> dict[str, Any]:
    """Returns a token of chats; the bytes of a part of a character are not known."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _event(chunks: Sequence[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n" for chunk in chunks)

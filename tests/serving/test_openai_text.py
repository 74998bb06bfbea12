"""Texts of the OpenAI-compatible server without an engine: stops, tokens, calls of tools, streams."""

import asyncio
import dataclasses
import json
import pathlib
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from reinforce_ada_jax.data.templates import render_chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.environments import tool_calls
from reinforce_ada_jax.environments.tool_calls import parse_calls, partial_length, settled_length
from reinforce_ada_jax.learning.scoring import Scores
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving.http import Refusal
from reinforce_ada_jax.serving.openai import protocol
from reinforce_ada_jax.serving.openai.answer import Answer
from reinforce_ada_jax.serving.openai.call import Backend, Call, PromptText, Terms
from reinforce_ada_jax.serving.openai.protocol import ChatRequest, CompletionRequest, Invalid
from reinforce_ada_jax.serving.openai.scoring import ScoreQueue
from reinforce_ada_jax.serving.response_text import ResponseText, prompt_pieces
from reinforce_ada_jax.serving.sampler import Sampled, Sampler
from reinforce_ada_jax.training.components import ASSETS
from tests import standins
from tests.serving.test_tokenizer import of_bytes, of_words

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def sampled(tokens):
    return Sampled(np.asarray(tokens, np.int32), -0.5 * np.ones(len(tokens), np.float32), stopped=False)


def grown(text, stops=(), at_a_time=1, keep=False):
    """A response's text after each addition, and the response."""
    tokenizer = of_bytes()
    response, shown = ResponseText(tokenizer, (-7,), stops, keep), []
    tokens = tokenizer.encode(text)
    for begin in range(0, len(tokens), at_a_time):
        response.add(sampled(tokens[begin : begin + at_a_time]))
        shown.append(response.text[: response.settled_length])
    response.finish()
    return shown, response


@pytest.mark.parametrize("at_a_time", [1, 3, 100])
def test_stops_are_cut_exactly_and_never_shown(at_a_time):
    shown, response = grown("one\n\ntwo Question: three", ["\n\nQ", "Quest"], at_a_time)
    assert response.text == "one\n\ntwo " and response.at_stop_text
    assert response.num_tokens == len("one\n\ntwo Quest")
    assert all("one\n\ntwo ".startswith(text) for text in shown)
    if at_a_time == 1:
        # "\n", "\n\n" and "Q" may be the beginning of a stop.
        assert shown[:6] == ["o", "on", "one", "one", "one", "one\n\nt"]
        assert shown[8:10] == ["one\n\ntwo ", "one\n\ntwo "]


def test_the_stop_that_begins_first_cuts():
    assert grown("abcd", ["cd", "bcd"])[1].text == "a"
    assert grown("abcd", ["bc", "c"])[1].text == "a"
    assert grown("aab", ["ab"])[1].text == "a"
    assert grown("ab", ["abc"])[1].text == "ab"  # it never came


def test_tokens_joined_are_the_text():
    _, response = grown("aé你!", keep=True)
    assert [(piece.text, piece.begin) for piece in response.pieces] == [
        ("a", 0), ("", 1), ("é", 1), ("", 2), ("", 2), ("你", 2), ("!", 3)
    ]  # fmt: skip
    _, cut = grown("aé你!b", ["你!"], keep=True)
    assert "".join(piece.text for piece in cut.pieces) == cut.text == "aé"


def test_an_incomplete_character_at_the_end_is_its_last_tokens():
    tokenizer = of_bytes()
    response = ResponseText(tokenizer, (), (), True)
    response.add(sampled(tokenizer.encode("a🙂")[:3]))
    assert response.text == "a"
    response.finish()
    assert response.text == "a\ufffd" == "".join(piece.text for piece in response.pieces)


def test_an_end_token_has_no_text_and_is_counted():
    tokenizer = of_bytes()
    letter = tokenizer.encode("a").tolist()
    for keep in (False, True):
        response = ResponseText(tokenizer, letter, (), keep)
        response.add(sampled([*tokenizer.encode("bc"), *letter]))
        response.finish()
        assert (response.text, response.num_tokens) == ("bc", 3)


def test_the_end_token_is_the_last_piece_where_it_is_wanted():
    tokenizer = of_bytes()
    (end,) = tokenizer.encode("a").tolist()
    response = ResponseText(tokenizer, [end], (), True, keep_end=True)
    response.add(sampled([*tokenizer.encode("bé")[:2], end]))
    response.finish()
    assert response.text == "b\ufffd" and [piece[:2] for piece in response.pieces] == [
        ("b", 0), ("\ufffd", 1), ("a", 2)
    ]  # fmt: skip


def test_a_prompt_comes_first_and_has_no_stops():
    tokenizer = of_bytes()
    prompt = prompt_pieces(tokenizer, tokenizer.encode("é."), None)
    assert [piece[:2] for piece in prompt] == [("", 0), ("é", 0), (".", 1)]
    response = ResponseText(tokenizer, (), [".x", "!"], True, prompt=prompt)
    response.add(sampled(tokenizer.encode("x.")))
    assert response.settled_length == len("é.x")  # the last letter may begin a stop
    response.add(sampled(tokenizer.encode("x?")))
    assert (response.text, response.num_tokens) == ("é.x", 3)  # not "é": the stop must be in the response
    assert "".join(piece.text for piece in response.pieces) == "é.x"


def test_a_bos_that_the_tokenizer_adds_has_no_text_and_other_special_tokens_have_their_names():
    tokenizer = Tokenizer.load(ASSETS / "cipher")
    tokens = tokenizer.encode("zU=")
    bos, end = tokenizer.token(int(tokens[0])), tokenizer.token(tokenizer.stop_ids[0])
    assert [piece.text for piece in prompt_pieces(tokenizer, tokens, "zU=")] == ["", "z", "U", "="]
    asked = np.append(tokens, tokenizer.stop_ids[0])
    assert [piece.text for piece in prompt_pieces(tokenizer, asked, None)] == [bos, "z", "U", "=", end]


def test_a_completion_goes_on_with_the_text_of_its_prompt():
    """SentencePiece strips the space before a first word, and here "Hello" is not the first one."""
    tokenizer = of_words()  # Hello, world, !, bytes
    byte = 3 + 0xE4  # part of a character
    for prompt, text in (
        ([1], " Hello"),
        ([1, 300, byte], " Hello"),
        ([2], " Hello"),
        ([byte, 300], "Hello"),
        ([], "Hello"),
    ):
        response = ResponseText(tokenizer, (), (), False, after=prompt)
        response.add(sampled([0]))
        assert response.text == text
    pieces = prompt_pieces(tokenizer, np.array([0, 1]), None)
    response = ResponseText(tokenizer, (), (), True, prompt=pieces, after=[0, 1])
    response.add(sampled([0, 2]))
    assert response.text == tokenizer.decode(np.array([0, 1, 0, 2])) == "Hello world Hello!"
    assert [piece[:2] for piece in response.pieces] == [("Hello", 0), (" world", 5), (" Hello", 11), ("!", 17)]


ALPHABET = {letter: int(of_bytes().encode(letter)[0]) for letter in "abcd"}


def test_scores_of_a_prompt_and_its_response():
    """The prompt is "ab", the response "cd", and every token t has log-probability -t."""
    asked = CompletionRequest(model="m", prompt="ab", echo=True, logprobs=1)
    tokenizer = of_bytes()
    prompt = PromptText(tokenizer.encode("ab"), prompt_pieces(tokenizer, tokenizer.encode("ab"), "ab"))
    terms = Terms(1, SamplingParams(8), None, (), keep_pieces=True, keep_end=True, scored=True)
    whole, ((row, end),), _ = exchanged(asked, terms, prompt, "cd", at_a_time=1)
    (choice,) = whole["choices"]
    b, c, d = (-ALPHABET[letter] for letter in "bcd")
    assert choice["text"] == row["text"] == "abcd" and choice["finish_reason"] == end["finish_reason"] == "length"
    assert choice["logprobs"] == row["logprobs"] == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, b, c, d],
        # The most probable one, "b", and the token itself.
        "top_logprobs": [None, {"b": b}, {"b": b, "c": c}, {"b": b, "d": d}],
        "text_offset": [0, 1, 2, 3],
    }  # fmt: skip


def test_a_prompt_is_scored_without_a_response():
    asked = CompletionRequest(model="m", prompt="ab", echo=True, logprobs=0, max_tokens=0)
    tokenizer = of_bytes()
    prompt = PromptText(tokenizer.encode("ab"), prompt_pieces(tokenizer, tokenizer.encode("ab"), "ab"))
    terms = Terms(1, SamplingParams(1), None, (), keep_pieces=True, scored=True, draws=False)
    whole, _, cancelled = exchanged(asked, terms, prompt, "never drawn")
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"], cancelled) == ("ab", "length", [])
    assert choice["logprobs"]["token_logprobs"] == [None, -ALPHABET["b"]]
    assert choice["logprobs"]["top_logprobs"] is None
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}


def test_top_tokens_of_a_chat_are_scored_without_its_prompt():
    whole, ((_, row, _),), _ = answered("cé", logprobs=True, top_logprobs=2)
    content = whole["choices"][0]["logprobs"]["content"]
    assert content == row["logprobs"]["content"] and "".join(entry["token"] for entry in content) == "cé"
    top = [{"token": "b", "logprob": -65.0, "bytes": [98]}, {"token": "c", "logprob": -9999.0, "bytes": [99]}]
    assert content[0] == {"token": "c", "logprob": -66.0, "bytes": [99], "top_logprobs": top}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [("add", '{"a": 1, "b": [2]}')]),
        (f"I add.\n{CALL}\n{CALL}", "I add.\n", [("add", '{"a": 1, "b": [2]}')] * 2),
        ('<tool_call>{"name": "é", "arguments": {}}', "", [("é", "{}")]),  # the end token came instead
        ('{"name": "add", "parameters": {"a": "ä"}}', "", [("add", '{"a": "ä"}')]),  # Llama
        ('{"name": "other", "parameters": {}}', None, []),
        ('{"answer": 42}', None, []),
        ("42", None, []),
        ("<tool_call>{broken</tool_call>", None, []),
        ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', None, []),
        ("<tool_call>" + "[" * 100_000, None, []),
        # Half of a character can be written in JSON, but not be sent.
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', None, []),
        ('{"name": "add", "arguments": {"a": "\\ud83d\\ude00"}}', "", [("add", '{"a": "😀"}')]),
    ],
)
def test_calls_of_tools(text, content, calls):
    """Calls of known tools are read from the text, and the rest is content."""
    assert parse_calls(text, {"add"}) == (
        text if content is None else content,
        [tool_calls.Call(*call) for call in calls],
    )


def test_text_is_held_back_while_it_may_be_a_call():
    assert [settled_length(text) for text in ("", " ", "{", " {a", "a", "a<", "a<b", "a<tool_", "a<tool_call>x")] == [
        0, 0, 0, 0, 1, 1, 3, 1, 1
    ]  # fmt: skip
    assert [partial_length("ab", word) for word in ("bc", "abc", "ab", "x", "b")] == [1, 2, 0, 0, 0]


class ScriptedSampler(Sampler):
    """Answers every response with the bytes of a text, some at a time."""

    def __init__(self, tokenizer, text, at_a_time):
        self.engine = types.SimpleNamespace(options=types.SimpleNamespace(stop_ids=(-7,)))
        self._tokens, self._at_a_time, self.cancelled = tokenizer.encode(text), at_a_time, []

    def submit(self, job):
        for draw in range(job.num_samples):
            for begin in range(0, len(self._tokens), self._at_a_time):
                tokens = self._tokens[begin : begin + self._at_a_time]
                job.watch(draw, sampled(tokens), begin + self._at_a_time >= len(self._tokens))

    def cancel(self, job, draw):
        self.cancelled.append(draw)


class ScriptedScores(ScoreQueue):
    """Scores of every text: token t has log-probability -t, and the tokens 65 and 66 ("b", "c") are most probable."""

    def __init__(self):
        self.texts = []

    def submit(self, job):
        self.texts.append(job.tokens.tolist())
        length = len(job.tokens)
        logprobs, ids = -job.tokens.astype(np.float32), np.full((length, 2), (65, 66))
        tops = np.full((length, 2), (-65.0, -np.inf), np.float32)
        logprobs[0], ids[0], tops[0] = np.nan, -1, np.nan
        job.done(Scores(logprobs, ids, tops))


def answered(text, at_a_time=4, stops=(), **fields):
    """(whole answer, deltas of each response in a stream, draws that were cancelled) of a chat."""
    asked = ChatRequest(model="m", messages=[{"role": "user", "content": "?"}], **fields)
    scored = bool(asked.num_top_logprobs)
    terms = Terms(
        asked.n or 1, SamplingParams(1000), None, tuple(stops), asked.num_top_logprobs is not None, scored=scored
    )
    return exchanged(asked, terms, PromptText(np.zeros(3, np.int32)), text, at_a_time)


def exchanged(asked, terms, prompt, text, at_a_time=4):
    """(whole answer, rows of each response in a stream, draws that were cancelled)."""
    tokenizer = of_bytes()

    async def ask():
        sampler = ScriptedSampler(tokenizer, text, at_a_time)

        def call():
            made = Call([prompt], terms, tokenizer, Backend(sampler, ScriptedScores()), "name", lambda _: None)
            made.submit()
            return made

        first = call()
        await first.finished()
        with ThreadPoolExecutor(1) as executor:
            events = "".join([event async for event in Answer(asked, call(), executor).events()]).split("\n\n")
            whole = Answer(asked, first, executor).whole()
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        rows = [row for chunk in chunks for row in chunk["choices"]]
        streams = [[row for row in rows if row["index"] == index] for index in range(asked.n or 1)]
        return whole, streams, sampler.cancelled

    return asyncio.run(ask())


@pytest.mark.parametrize("at_a_time", [1, 7, 1000])
def test_a_stream_with_tools_says_what_the_whole_answer_says(at_a_time):
    whole, streams, _ = answered(f"I add.{CALL}", at_a_time, tools=[ADD], n=2)
    for choice, rows in zip(whole["choices"], streams, strict=True):
        message, deltas = choice["message"], [row["delta"] for row in rows]
        assert (message["content"], choice["finish_reason"]) == ("I add.", "tool_calls")
        assert "".join(delta.get("content", "") for delta in deltas) == "I add."
        (call,), (streamed,) = message["tool_calls"], [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": [2]}'}
        assert streamed[0]["index"] == 0 and streamed[0]["function"] == call["function"]
        assert [row["finish_reason"] for row in rows] == [None] * (len(rows) - 1) + ["tool_calls"]


def test_a_call_alone_has_no_content_and_without_tools_it_is_text():
    assert answered(CALL, tools=[ADD])[0]["choices"][0]["message"]["content"] is None
    for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
        (choice,) = answered(CALL, **fields)[0]["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "length")


def test_a_stream_shows_no_token_of_a_character_that_a_stop_removes():
    """Two bytes of the stop come with the first window, and two with the second."""
    asked, tokenizer = CompletionRequest(model="m", prompt="?", logprobs=0), of_bytes()
    terms = Terms(1, SamplingParams(8), None, ("🙂",), keep_pieces=True)

    async def ask():
        backend = Backend(ScriptedSampler(tokenizer, "", 1), ScriptedScores())
        call = Call([PromptText(np.zeros(1, np.int32))], terms, tokenizer, backend, "name", lambda _: None)
        with ThreadPoolExecutor(1) as executor:
            answer, found = Answer(asked, call, executor), []
            events = answer.events()
            for window in np.split(tokenizer.encode("a🙂"), [3]):
                call.choices[0].job.watch(0, sampled(window), False)
                found.append(json.loads((await anext(events)).removeprefix("data: "))["choices"][0])
            await events.aclose()
        return answer.whole()["choices"][0], found

    whole, (first, end) = asyncio.run(ask())
    assert (whole["text"], whole["finish_reason"], end["finish_reason"]) == ("a", "stop", "stop")
    assert first["logprobs"] == whole["logprobs"] and first["logprobs"]["tokens"] == ["a"]
    assert end["logprobs"] is None


@pytest.mark.parametrize("ended", [False, True])
def test_tokens_that_cannot_be_decoded_end_the_request(monkeypatch, ended):
    """An error that a callback of the event loop raises would be logged, and the request would wait without end."""
    tokenizer = dataclasses.replace(of_bytes(), folder=pathlib.Path("/models/secret"))
    terms = Terms(2, SamplingParams(8), None, (), keep_pieces=False)

    async def ask():
        sampler = ScriptedSampler(tokenizer, "", 1)
        call = Call(
            [PromptText(np.zeros(1, np.int32))], terms, tokenizer, Backend(sampler, ScriptedScores()), "name",
            ended_with.append,
        )  # fmt: skip
        call.choices[0].job.watch(1, sampled([1]), ended)
        with pytest.raises(Refusal, match="the tokenizer of the model can't decode 1 tokens"):
            await asyncio.wait_for(call.finished(), 5)
        return sampler.cancelled

    ended_with = []
    standins.failing(
        monkeypatch, Tokenizer, "decode", ValueError(f"the tokenizer of {tokenizer.folder} can't decode 1 tokens")
    )
    assert asyncio.run(ask()) == [0, 1] and len(ended_with) == 2


def test_a_stop_text_cancels_the_draw():
    whole, streams, cancelled = answered("abcdef" * 10, 4, stops=["ef"], n=2)
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["abcd"] * 2
    assert ["".join(row["delta"].get("content", "") for row in rows) for rows in streams] == ["abcd"] * 2
    assert cancelled == [0, 1] * 2 and whole["usage"]["completion_tokens"] == 12


def test_messages_as_templates_take_them():
    asked = protocol.parse(ChatRequest, json.dumps({"model": "m", "messages": [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]}).encode())  # fmt: skip
    messages = protocol.template_messages(asked.messages)
    assert messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]  # fmt: skip
    names, call = (
        "{% for t in tools %}{{ t.function.name }} {% endfor %}",
        "messages[2].tool_calls[0].function.arguments",
    )
    assert render_chat(names + "{{ " + call + " | tojson }}", messages, {}, tools=[ADD]) == 'add {"a": 1}'


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "nobody", "content": "a"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{a"}}],
            },
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_messages_that_are_refused(message, param):
    with pytest.raises(Invalid) as caught:
        asked = protocol.parse(ChatRequest, json.dumps({"model": "m", "messages": [message]}).encode())
        protocol.template_messages(asked.messages)
    assert caught.value.status == 400 and caught.value.param.startswith(param)

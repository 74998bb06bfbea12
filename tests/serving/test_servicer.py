"""The gRPC service over a Driver that does what the test says: turns, waiting, hang-ups and text."""

import asyncio
import functools
import types
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import numpy as np
import pytest

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.serving.jetstream import servicer as servicer_lib
from reinforce_ada_jax.serving.jetstream.servicer import PREFILLED, Servicer, pb2
from reinforce_ada_jax.serving.settings import ServerSettings
from reinforce_ada_jax.training import components as components_lib
from tests.serving.test_tokenizer import of_bytes, of_words

SLOTS = 2
OPTIONS = types.SimpleNamespace(slots=SLOTS, max_prompt_tokens=8, max_response_tokens=16)


class Ended(Exception):
    """Raised by `abort`."""


class Call:
    """A client's end of one call."""

    def __init__(self, *metadata: tuple[str, str]):
        self.metadata, self.responses, self.trailing = (("user-agent", "grpc-python"), *metadata), [], ()

    def invocation_metadata(self):
        return self.metadata

    async def abort(self, code, details):
        raise Ended(code, details)

    async def write(self, response):
        self.responses.append(response.stream_content.samples[0])

    def set_trailing_metadata(self, metadata):
        self.trailing = metadata


class Driver:
    """Keeps what it is asked for; the test answers."""

    live = True

    def __init__(self):
        self.requests = []

    def place_request_on_prefill_queue(self, request):
        self.requests.append(request)

    @staticmethod
    def answer(request, *turns):
        """As the detokenize thread: each turn's tokens, and the slot is free."""
        for tokens in turns:
            request.return_channel.add_result([types.SimpleNamespace(token_ids=list(tokens), text=[])])
        request.return_channel.close()


def make(waiting=3, tokenizer=None, **limits) -> tuple[Servicer, Driver]:
    driver = Driver()
    engine = object.__new__(Engine)  # without programs: a servicer looks at its sizes only
    engine.options, engine.architecture = OPTIONS, types.SimpleNamespace(vocab_size=300)
    settings = ServerSettings("m", waiting=waiting, **{"peer_calls": 1000, "request_s": 0.5} | limits)
    return Servicer(driver, engine, tokenizer or of_bytes(), settings), driver


def text_request(text="ab", max_tokens=16):
    return pb2.DecodeRequest(text_content=dict(text=text), max_tokens=max_tokens)


@pytest.fixture(autouse=True)
def in_one_thread(monkeypatch):
    """Nothing takes time then, and `settle` is exact."""

    async def call(function, *arguments):
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)


async def settle():
    """Lets everything happen that can."""
    for _ in range(50):
        await asyncio.sleep(0)


def finish(test: Coroutine) -> Any:
    """Runs a test that would wait forever where nobody answers."""
    return asyncio.run(asyncio.wait_for(test, 20))


def in_time(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """Decorator of a test that is a coroutine: it runs by `finish`."""
    return functools.wraps(test)(lambda *arguments, **named: finish(test(*arguments, **named)))


async def begin(servicer, count) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(servicer.Decode(text_request(), Call())) for _ in range(count)]
    await settle()
    return tasks


def answer_to(request, *turns, tokenizer=None) -> Call:
    """The call of one request that the Driver answers so."""

    async def run():
        servicer, driver = make(tokenizer=tokenizer)
        call = Call()
        task = asyncio.create_task(servicer.Decode(request, call))
        await settle()
        driver.answer(driver.requests[0], *turns)
        await task
        return call

    return finish(run())


# ---- what a client gets ------------------------------------------------------------------------------------------


def test_ids_come_at_once_and_text_when_it_can_be_read():
    h, *you = of_bytes().encode("h你").tolist()
    call = answer_to(text_request(), [h], you[:1], you[1:2], you[2:], [])
    assert [(sample.text, list(sample.token_ids)) for sample in call.responses] == [
        ("h", [h]), ("", you[:1]), ("", you[1:2]), ("你", you[2:]),
    ]  # fmt: skip
    assert call.trailing == (("finish", "stop"),)


def test_the_text_goes_on_with_that_of_its_prompt():
    """SentencePiece strips the space before a first word, and here "world" is not the first one."""
    call = answer_to(text_request("▁Hello"), [1], [2], [], tokenizer=of_words())
    assert [sample.text for sample in call.responses] == [" world", "!"]


def test_text_cut_off_within_a_character_is_flushed():
    you = of_bytes().encode("你").tolist()
    call = answer_to(text_request(max_tokens=2), you[:1], you[1:2])
    assert [(sample.text, len(sample.token_ids)) for sample in call.responses] == [("", 1), ("", 1), ("\ufffd", 0)]
    assert call.trailing == (("finish", "length"),)


@in_time
async def test_the_last_token_ends_a_response_before_the_driver_has_noticed():
    servicer, driver = make()
    task = asyncio.create_task(servicer.Decode(text_request(max_tokens=2), Call()))
    await settle()
    for token in (1, 2):
        driver.requests[0].return_channel.add_result([types.SimpleNamespace(token_ids=[token], text=[])])
    await task
    assert (servicer.counts.answered, servicer.running) == (1, 1)


def test_a_client_that_sends_tokens_gets_tokens():
    call = answer_to(pb2.DecodeRequest(token_content=dict(token_ids=[5, 299]), max_tokens=3), [7], [8], [])
    assert [(sample.text, list(sample.token_ids)) for sample in call.responses] == [("", [7]), ("", [8])]


def test_a_response_of_nothing_but_the_stop_token_ends_without_a_message():
    call = answer_to(text_request(), [])
    assert call.responses == [] and call.trailing == (("finish", "stop"),)


def test_the_driver_gets_the_tokens_as_they_are():
    async def run():
        servicer, driver = make()
        request = pb2.DecodeRequest(token_content=dict(token_ids=[5, 299]), max_tokens=3)
        task = asyncio.create_task(servicer.Decode(request, Call()))
        await settle()
        task.cancel()
        return driver.requests[0]

    request = finish(run())
    np.testing.assert_array_equal(request.prefill_content, [5, 299])
    # JetStream pads an array in place of a list, and puts no BOS before it where there is a history.
    assert request.prefill_content.shape == (2,) and bool(request.history_path)


# ---- turns -------------------------------------------------------------------------------------------------------


@in_time
async def test_more_than_may_wait_are_refused_and_a_turn_comes_to_those_that_do():
    servicer, driver = make(waiting=3)
    tasks = await begin(servicer, SLOTS + PREFILLED + 3)
    assert (servicer.running, servicer.waiting, len(driver.requests)) == (SLOTS + PREFILLED, 3, SLOTS + PREFILLED)
    with pytest.raises(Ended) as ended:
        await servicer.Decode(text_request(), Call())
    code, details = ended.value.args
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "3 requests are waiting" in details and "larger --waiting" in details
    driver.answer(driver.requests[0], [1], [])
    await settle()
    assert (servicer.running, servicer.waiting, len(driver.requests)) == (SLOTS + PREFILLED, 2, SLOTS + PREFILLED + 1)
    for request in driver.requests[1:]:
        driver.answer(request, [1], [])
    await settle()
    for request in driver.requests[SLOTS + PREFILLED + 1 :]:
        driver.answer(request, [1], [])
    await asyncio.gather(*tasks)
    assert (servicer.running, servicer.waiting) == (0, 0)
    assert servicer.counts == servicer_lib.Counts(
        answered=SLOTS + PREFILLED + 3, refused=1, tokens=SLOTS + PREFILLED + 3
    )


@in_time
async def test_without_places_to_wait_a_further_request_is_refused():
    servicer, _ = make(waiting=0)
    tasks = await begin(servicer, SLOTS + PREFILLED)
    with pytest.raises(Ended, match="0 requests are waiting"):
        await servicer.Decode(text_request(), Call())
    for task in tasks:
        task.cancel()


@in_time
async def test_a_client_that_hangs_up_while_it_waits_never_reaches_the_driver():
    servicer, driver = make()
    tasks = await begin(servicer, SLOTS + PREFILLED + 1)
    tasks[-1].cancel()
    await settle()
    driver.answer(driver.requests[0], [])
    await settle()
    assert (servicer.running, servicer.waiting, servicer.counts.hung_up) == (SLOTS + PREFILLED - 1, 0, 1)
    assert len(driver.requests) == SLOTS + PREFILLED
    for task in tasks:
        task.cancel()


@in_time
async def test_a_client_that_hangs_up_frees_its_slot_and_its_turn_ends_with_it():
    servicer, driver = make()
    tasks = await begin(servicer, SLOTS + PREFILLED)
    assert driver.requests[0].max_tokens == 16
    tasks[0].cancel()
    await settle()
    # 0 tokens: the Driver ends the request at its next turn. Until it has, nobody else gets the turn.
    assert driver.requests[0].max_tokens == 0 and driver.requests[1].max_tokens == 16
    assert servicer.running == SLOTS + PREFILLED
    driver.answer(driver.requests[0])
    await settle()
    assert servicer.running == SLOTS + PREFILLED - 1
    for task in tasks:
        task.cancel()


# ---- refusals ----------------------------------------------------------------------------------------------------


def with_later_field() -> pb2.DecodeRequest:
    """As a client of a later JetStream writes it, whose field 7 this protocol hasn't."""
    return pb2.DecodeRequest.FromString(text_request().SerializeToString() + bytes([7 << 3 | 2, 1, ord("x")]))


@pytest.mark.parametrize(
    ("request_", "metadata", "words"),
    [
        (text_request(""), (), ["prompt is empty", "text_content.text"]),
        (pb2.DecodeRequest(max_tokens=3), (), ["prompt is empty"]),
        (pb2.DecodeRequest(token_content=dict(token_ids=[]), max_tokens=3), (), ["prompt is empty"]),
        (text_request("123456789"), (), ["9 tokens", "takes 1 to 8", "--max_prompt_tokens"]),
        (pb2.DecodeRequest(token_content=dict(token_ids=[1] * 9), max_tokens=3), (), ["9 tokens", "takes 1 to 8"]),
        (pb2.DecodeRequest(token_content=dict(token_ids=[1, 300]), max_tokens=3), (), ["token id 300", "0 to 299"]),
        (pb2.DecodeRequest(token_content=dict(token_ids=[-1]), max_tokens=3), (), ["token id -1"]),
        (text_request(max_tokens=0), (), ["max_tokens is 0", "1 to 16", "--max_response_tokens"]),
        (text_request(max_tokens=-1), (), ["max_tokens is -1"]),
        (text_request(max_tokens=17), (), ["max_tokens is 17"]),
        (pb2.DecodeRequest(text_content=dict(text="a"), max_tokens=1, session_cache="s"), (), ["session_cache is 's'"]),
        (pb2.DecodeRequest(text_content=dict(text="a"), max_tokens=1, priority=2), (), ["priority is 2"]),
        (text_request(), (("temperature", "0"),), ["metadata 'temperature'", "option of the server"]),
        (text_request(), (("authorization", "Bearer x"),), ["metadata 'authorization'"]),
        (with_later_field(), (), ["fields [7]", "google-jetstream 0.2.2"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@in_time
async def test_what_is_refused_does_not_reach_the_driver(request_, metadata, words):
    servicer, driver = make()
    with pytest.raises(Ended) as ended:
        await servicer.Decode(request_, Call(*metadata))
    code, details = ended.value.args
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in details for word in words), details
    assert driver.requests == [] and servicer.counts.refused == 1


@in_time
async def test_text_that_the_tokenizer_lacks_is_refused():
    servicer, driver = make(tokenizer=Tokenizer.load(components_lib.ASSETS / "cipher"))
    with pytest.raises(Ended) as ended:
        await servicer.Decode(text_request("hello Z"), Call())
    code, details = ended.value.args
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "cipher can't encode 'hello Z'" in details
    assert driver.requests == [] and servicer.counts.refused == 1


def test_what_is_just_within_the_limits_is_not():
    for request in (
        text_request("12345678", max_tokens=16),
        text_request("1", max_tokens=1),
        pb2.DecodeRequest(token_content=dict(token_ids=[0, 299]), max_tokens=1),
    ):
        assert answer_to(request, []).trailing == (("finish", "stop"),)


def test_metadata_of_proxies_and_tracing_is_let_through():
    metadata = (("x-request-id", "1"), ("traceparent", "00-1"), ("grpc-accept-encoding", "gzip"))
    servicer_lib.check_supported(text_request(), metadata)

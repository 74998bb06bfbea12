"""Texts that end responses: found while a response grows, and cut off with the token that completes them."""

import numpy as np
import pytest

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.serving.response_text import TextStops
from reinforce_ada_jax.serving.sampler import Sampled
from tests import standins
from tests.serving.test_tokenizer import of_bytes

TOKENIZER = of_bytes()


def sampled(text):
    """A response with a token for each byte; its log-probabilities count them."""
    tokens = TOKENIZER.encode(text)
    return Sampled(tokens, np.arange(len(tokens), dtype=np.float32), stopped=False)


@pytest.fixture
def stops():
    """(stops "END" and "\\n", indices of the responses that they ended)."""
    ended = []
    return TextStops(TOKENIZER, ("END", "\n"), ended.append), ended


def test_a_response_ends_once_with_the_window_that_completes_a_stop(stops):
    stops, ended = stops
    for window, so_far in (("abcEN", []), ("xE", []), ("N", []), ("Dabc", [0]), ("END", [0])):
        stops.watch(0, sampled(window), False)
        assert ended == so_far
    stops.watch(2, sampled("a\nb"), False)
    stops.watch(3, sampled("a\nb"), True)
    assert ended == [0, 2]
    # Whatever is there when the slot is free: less if it was evicted meanwhile.
    for left in ("", "abcENxENDabcEND"):
        cut = stops.cut(0, sampled(left))
        assert TOKENIZER.decode(cut.tokens) == "abcENxEND" and cut.stopped


def test_what_no_stop_ended_stays_as_it_is(stops):
    stops, ended = stops
    stops.watch(1, sampled("abcEN"), False)
    whole = Sampled(np.array([7, 8], np.int32), np.zeros(2, np.float32), stopped=True)
    assert stops.cut(1, whole) is whole and ended == []


def test_a_stop_in_the_last_tokens_is_cut_off(stops):
    stops, ended = stops
    stops.watch(0, sampled("aENDbEND"), True)
    cut = stops.cut(0, sampled("aENDbEND"))
    assert cut.stopped and cut.logprobs.tolist() == [0, 1, 2, 3] and ended == []


def test_tokens_that_cannot_be_decoded_are_an_error_of_their_request(stops, monkeypatch):
    """An error in `watch` is raised in the sampler's turn, which gives it to the requests of all clients."""
    stops, ended = stops
    standins.failing(monkeypatch, Tokenizer, "decode", ValueError("can't decode 1 tokens"))
    for window in ("a", "b"):
        stops.watch(1, sampled(window), False)
    stops.watch(2, sampled("a"), True)
    assert ended == [1]
    for index in (1, 2):
        with pytest.raises(ValueError, match="can't decode"):
            stops.cut(index, sampled("ab"))

"""Drafts: guesses and what is verified, by literal arrays; engines that guess draw what others draw."""

import jax
import numpy as np
import pytest

from reinforce_ada_jax.sampling import drafts
from tests.sampling import tiny

N = drafts.NONE
compiled = jax.jit(drafts.guess, static_argnums=5)


def guess(text, prompt, response, num_drafts=3, room=8):
    """Guesses for one slot."""

    def padded(tokens, width, empty):
        return np.array([list(tokens) + [empty] * (width - len(tokens))], np.int32)

    arguments = (
        padded(text, room, N), padded(prompt, 6, 9), np.array([len(prompt)], np.int32), padded(response, room, 99),
        np.array([len(response)], np.int32),
    )  # fmt: skip
    return compiled(*arguments, num_drafts)[0].tolist()


@pytest.mark.parametrize(
    ("text", "prompt", "response", "expected"),
    [
        ([5, 6, 7, 8], [1, 2], [], [5, 6, 7]),  # the beginning of the last response
        ([5, 6, 7, 8], [2], [], [5, 6, 7]),  # likewise, after a prompt of one token
        ([5, 6, 7, 8], [1, 2], [5], [6, 7, 8]),
        ([5, 6, 7, 8], [1, 2], [5, 6], [7, 8, N]),
        ([5, 6, 7, 8], [1, 2], [4, 5, 6], [7, 8, N]),  # found one place before
        ([5, 6, 3, 5, 6, 4], [1, 2], [0, 0, 0, 5, 6], [4, N, N]),  # the nearest of two
        ([5, 6, 3, 5, 6, 4], [1, 2], [5, 6], [3, 5, 6]),
        ([5, 6, 7, 8], [1, 2], [0], [6, 7, 8]),  # found nowhere: the same place
        ([], [1, 2, 3, 1], [2], [3, 1, 2]),  # no text: after the same two tokens of the sequence
        ([], [1, 2], [3, 1, 2], [3, 1, 2]),
        ([], [1, 2], [3, 4], [N, N, N]),
        ([5, 6, 7, 8], [1, 2, 7, 1], [2], [7, 1, 2]),  # not in the text, but in the prompt
        ([5, 6, 7, 8, 4, 4, 4, 4], [1, 2], [5, 6, 7, 8, 4, 4, 4], [4, N, N]),  # at the longest response
    ],
)
def test_guesses(text, prompt, response, expected):
    """Guesses are what follows the same tokens earlier in the text."""
    assert guess(text, prompt, response) == expected


DRAFTED = dict(drafts=3, draft_rows=64, keep_drafts=True)


def with_texts(texts):
    """Rollouts of an engine whose table holds these texts of prompts."""
    rollouts = tiny.rollouts(**DRAFTED)
    state = rollouts.engine.init_decode_state()
    table = np.array(state.drafts.text)
    for prompt in tiny.PROMPTS:
        row = drafts.text_rows(prompt.tokens[None], np.array([len(prompt.tokens)]), len(table))[0]
        assert (table[row] == N).all()  # no two share one
        table[row, : len(texts[prompt.id])] = texts[prompt.id]
    text = jax.device_put(table, state.drafts.text.sharding)
    rollouts.state = state.replace(drafts=state.drafts.replace(text=text))
    return rollouts


def first_draws():
    return {prompt.id: tiny.drawn()[prompt.id, 0].tokens for prompt in tiny.PROMPTS}


TEXTS = {
    "none": lambda tokens: tokens[:0],
    "right": lambda tokens: tokens,
    "one wrong": lambda tokens: np.where(np.arange(len(tokens)) == 2, (tokens + 1) % 24, tokens),
    "all wrong": lambda tokens: (tokens + 1) % 24,
    "a stop token": lambda tokens: np.full(12, 3, np.int32),
    "random": lambda tokens: np.random.default_rng(0).integers(0, 24, 12).astype(np.int32),
}


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_changes_a_sample(text):
    rollouts = with_texts({name: TEXTS[text](tokens) for name, tokens in first_draws().items()})
    tiny.assert_same(tiny.draw(rollouts), tiny.drawn())


def test_right_guesses_are_counted():
    """Every draw once, with its own text: each guess is right, and their number follows from pages and lengths."""
    texts = first_draws()
    rollouts = with_texts(texts)
    drawn = tiny.draw(rollouts, draws=1)
    tiny.assert_same(drawn, {address: tiny.drawn()[address] for address in drawn})
    drafted = 0
    for prompt in tiny.PROMPTS:
        position, left = len(prompt.tokens) - 1, len(texts[prompt.id])
        while left:
            # Positions up to the end of the page of 4; a text ends with its response.
            guesses = min(3, 3 - position % 4, left - 1)
            drafted, position, left = drafted + guesses, position + 1 + guesses, left - 1 - guesses
    counts = rollouts.counts
    assert drafted > 20
    assert (counts.drafted, counts.accepted) == (drafted, drafted)
    assert counts.tokens == sum(map(len, texts.values()))


@pytest.mark.slow  # test_invariants.py has such drafts, page for page; test_draft_choice.py has what pays
def test_drafts_that_must_pay_change_no_sample():
    """At temperature 1 a quarter of the guesses are right, which does not pay: few are verified, and none is wrong."""
    free, costly = tiny.rollouts(**DRAFTED), tiny.rollouts(**tiny.PAYING)
    tiny.assert_same(tiny.draw(costly), tiny.drawn())
    tiny.draw(free)
    assert 0 < costly.counts.accepted < costly.counts.drafted < free.counts.drafted / 2


def test_earlier_iterations_change_no_bit():
    """A resumed run begins with an empty state: it verifies the same guesses, and so rounds alike."""
    rollouts = tiny.rollouts(**tiny.PAYING)
    tiny.draw(rollouts)
    after_another, counts = tiny.draw(rollouts, stream=1), rollouts.counts
    rollouts.state = None
    resumed = tiny.draw(rollouts, stream=1)
    assert (rollouts.counts.drafted, rollouts.counts.accepted) == (counts.drafted, counts.accepted)
    assert counts.accepted > 0
    for address, response in resumed.items():
        np.testing.assert_array_equal(response.tokens, after_another[address].tokens)
        np.testing.assert_array_equal(response.logprobs, after_another[address].logprobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(drafts=2, tail=(4,)),  # in idle rows only
        dict(drafts=7, draft_rows=64, slots=1),
        dict(drafts=3, draft_rows=16, page_size=16),
        dict(drafts=5, draft_rows=32, page_size=2),  # one guess in a page: drafts take none
        dict(drafts=3, draft_rows=24, fsdp=2, slots=6),
    ],
    ids=str,
)
def test_drafts_change_no_sample(changes):
    rollouts = tiny.rollouts(**changes)
    tiny.assert_same(tiny.draw(rollouts), tiny.drawn())
    assert rollouts.counts.accepted > 0


@pytest.mark.slow
def test_drafts_change_no_sample_of_an_int8_cache():
    rollouts = tiny.rollouts(drafts=3, draft_rows=64, kv_dtype="int8")
    tiny.assert_same(tiny.draw(rollouts), tiny.drawn(kv_dtype="int8"))
    assert rollouts.counts.accepted > 0

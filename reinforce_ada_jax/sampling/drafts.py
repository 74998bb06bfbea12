"""Drafts: tokens that a decode step verifies in rows that would be idle, all at once and without any loss.

A token is a function of the tokens before it and of its address (token.py). So the model may compute several positions
of a response in one step, with guessed tokens as inputs. As long as the token drawn is the one that was guessed, the
next row is right as well. The first token that differs is kept, and the rows after it are dropped. Whatever the guesses
are, the response is the one that decoding token by token gives.

Guesses come from the last responses to the same prompt, in a table of fixed size on the device, and else from the
prompt and the response itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from reinforce_ada_jax.sampling import draft_choice
from reinforce_ada_jax.sampling.draft_choice import Flags, Numbers
from reinforce_ada_jax.sampling.pages import ArrayLike
from reinforce_ada_jax.sampling.state import DecodeState, Drafts, EngineOptions, OpenedPrompts, Slots

# Marks a place without a token, also in the table of texts.
NONE = -1
# An odd number: its powers distinguish the places of a prompt's tokens.
FACTOR = 0x9E3779B1


def text_rows(
    tokens: Int[ArrayLike, "R max_prompt"], length: Int[ArrayLike, " R"], num_rows: int
) -> Int[ArrayLike, " R"]:
    """Returns each prompt's row in the table of texts, a hash of its tokens: prompts that share a row guess worse."""
    place = np.arange(tokens.shape[1])
    powers = np.cumprod(np.full(tokens.shape[1], FACTOR, np.uint32), dtype=np.uint32)
    words = jnp.where(place[None] < length[:, None], tokens.astype(jnp.uint32) + jnp.uint32(1), jnp.uint32(0))
    mixed = jnp.sum(words * powers[None], axis=1, dtype=jnp.uint32)
    return ((mixed >> 8) % jnp.uint32(num_rows)).astype(jnp.int32)


def begin_window(drafts: Drafts, opened: OpenedPrompts, keep: bool) -> Drafts:
    """Finds the texts of prompts that are opened; unless `keep`, their earlier contents are cleared."""
    num_texts, open_prompts = drafts.text.shape[0], drafts.row.shape[0]
    row, text = text_rows(opened.tokens, opened.length, num_texts), drafts.text
    if not keep:
        text = text.at[jnp.where(opened.row < open_prompts, row, num_texts)].set(NONE, mode="drop")
    return Drafts(
        text=text,
        row=drafts.row.at[opened.row].set(row, mode="drop"),
        counts=drafts.counts.at[opened.row].set(0, mode="drop"),
    )


def guess(
    text: Int[ArrayLike, "S max_response"],
    prompt: Int[ArrayLike, "S max_prompt"],
    prompt_length: Int[ArrayLike, " S"],
    response: Int[ArrayLike, "S max_response"],
    count: Int[ArrayLike, " S"],
    num_drafts: int,
) -> Numbers:
    """Returns tokens that may follow each response, up to the first `NONE`.

    The last two tokens are searched in the text; the guesses follow the match nearest to the response's own place.
    Without a match they follow the last earlier place of the two in the sequence itself (prompt and response). If there
    is none, they are the text from the response's own place on. `text` has earlier responses, and `NONE` where there is
    nothing; tokens of `response` beyond `count` are ignored.
    """
    rows, room = jnp.arange(text.shape[0])[:, None], text.shape[1]
    place = jnp.arange(prompt.shape[1] + room)[None]
    before = jnp.minimum(place, prompt.shape[1] - 1)
    within = jnp.clip(place - prompt_length[:, None], 0, room - 1)
    sequence = jnp.where(place < prompt_length[:, None], prompt[rows, before], response[rows, within])
    position = (prompt_length + count - 1)[:, None]
    last, second_last = sequence[rows, position], sequence[rows, jnp.maximum(position - 1, 0)]

    def follows(tokens):
        """Returns places of tokens that follow the last two of the sequence."""
        pair = (tokens[:, :-2] == second_last) & (tokens[:, 1:-1] == last) & (position > 0)
        return jnp.pad(pair, ((0, 0), (2, 0)))

    # The prompt's last two tokens in front: response token t is at place t + 2.
    start = [sequence[rows, jnp.maximum(prompt_length[:, None] - back, 0)] for back in (2, 1)]
    text = jnp.concatenate([*start, text], axis=1)
    own, far = count[:, None] + 2, text.shape[1] + place.shape[1]
    text_place = jnp.arange(text.shape[1])[None]
    in_text = follows(text) & (text != NONE)
    distance = jnp.where(in_text, jnp.abs(text_place - own), far)
    nearest = jnp.argmin(distance, axis=1)[:, None]
    in_sequence = jnp.where(follows(sequence) & (place <= position), place, NONE)
    latest = jnp.max(in_sequence, axis=1)[:, None]

    ahead = jnp.arange(num_drafts)[None]
    from_text = jnp.where(in_text.any(1, keepdims=True), nearest, own) + ahead
    known = jnp.where(from_text < text.shape[1], text[rows, jnp.minimum(from_text, text.shape[1] - 1)], NONE)
    again = latest + ahead
    repeated = jnp.where(again <= position, sequence[rows, jnp.clip(again, 0, place.shape[1] - 1)], NONE)
    return jnp.where(~in_text.any(1, keepdims=True) & (latest >= 0), repeated, known)


def verifiable(guessed: Numbers, slots: Slots, page_size: int) -> Flags:
    """Returns the guesses that can be verified: the first ones of each active slot.

    A draft takes no page: it is verified where its slot holds one already, and before the response's last token.
    """
    ahead = jnp.arange(1, guessed.shape[1] + 1)[None]
    in_page = slots.position[:, None] + ahead < (slots.used * page_size)[:, None]
    in_limit = slots.count[:, None] + ahead < slots.requests.sampling.max_tokens[:, None]
    fits = slots.active[:, None] & (guessed != NONE) & in_page & in_limit
    return jnp.cumsum(~fits, axis=1) == 0


def accepted(guessed: Numbers, chosen: Flags, tokens: Numbers, stopped: Flags) -> Int[ArrayLike, " S"]:
    """Returns how many of the chosen guesses are the tokens drawn in their places; none after a stop token."""
    right = chosen & (guessed == tokens) & ~stopped
    return jnp.sum(jnp.cumsum(~right, axis=1) == 0, axis=1, dtype=jnp.int32)


def num_compared(guessed: Numbers, chosen: Flags, tokens: Numbers, stopped: Flags) -> Int[ArrayLike, "S 2"]:
    """Returns how many guesses the tokens drawn confirm or refute, and how many they confirm.

    The first guess of a slot is compared without a row, too: so it is known when guesses begin to be right.
    """
    first = jnp.arange(guessed.shape[1])[None] == 0
    compared = chosen | (first & (guessed != NONE))
    right = accepted(guessed, compared, tokens, stopped)
    return jnp.stack([jnp.minimum(right + 1, jnp.sum(compared, axis=1, dtype=jnp.int32)), right], axis=1)


class Rows(NamedTuple):
    """Rows of one forward pass: each active slot's next token, and behind it the guesses to verify."""

    slots: Slots  # one entry for each row, the active ones first
    row_of: Int[Array, "S inputs"]  # row of each slot's input and guesses; beyond the rows where there is none
    guessed: Int[Array, "S drafts"]  # tokens
    chosen: Bool[Array, "S drafts"]  # those that have a row
    size: Int[Array, ""]  # rows that the model computes, active or not


def draft_rows(state: DecodeState, options: EngineOptions) -> Rows:
    """Guesses tokens; returns the rows of the forward pass that verifies them."""
    slots, drafts, sizes = state.slots, state.drafts, draft_choice.step_sizes(options)
    assert drafts is not None
    most_rows = sizes[-1]
    prompt_row = slots.requests.prompt_row
    chance = draft_choice.chances(drafts.counts[prompt_row], options.drafts)

    def guesses():
        prompt = state.prompt_tokens[prompt_row], state.prompts.length[prompt_row]
        response = state.outputs.tokens[slots.requests.output_row]
        return guess(drafts.text[drafts.row[prompt_row]], *prompt, response, slots.count, options.drafts)

    has_room = jnp.sum(slots.active) < most_rows
    guessed = jax.lax.cond(has_room, guesses, lambda: jnp.full_like(chance, NONE))
    fits = verifiable(guessed, slots, options.page_size)
    guessed = jnp.where(fits, guessed, NONE)
    chosen, size = draft_choice.choose(fits, chance, slots, options, sizes)
    inputs = jnp.concatenate([slots.active[:, None], chosen], axis=1)
    index = jnp.where(inputs, jnp.cumsum(inputs).reshape(inputs.shape) - 1, most_rows)
    slot, ahead = jnp.indices(inputs.shape, dtype=jnp.int32)
    nothing = jnp.zeros(most_rows, jnp.int32)
    slot, ahead = (nothing.at[index].set(each, mode="drop") for each in (slot, ahead))
    rows = jax.tree.map(lambda x: x[slot], slots)
    rows = rows.replace(
        active=jnp.arange(most_rows) < jnp.sum(inputs),
        token=jnp.concatenate([slots.token[:, None], guessed], axis=1)[slot, ahead],
        position=rows.position + ahead,
        count=rows.count + ahead,
    )
    return Rows(rows, index, guessed, chosen, size)


def verify(
    state: DecodeState,
    rows: Rows,
    tokens: Int[Array, "S inputs"],
    is_stop: Bool[Array, "S inputs"],
    active: Bool[Array, " S"],
) -> tuple[DecodeState, Int[Array, " S"]]:
    """Compares guesses with the tokens drawn; returns the state with these in the texts, and each slot's right ones."""
    slots, drafts, prompt_row = state.slots, state.drafts, state.slots.requests.prompt_row
    assert drafts is not None
    right = accepted(rows.guessed, rows.chosen, tokens[:, :-1], is_stop[:, :-1])
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    appended = active[:, None] & (place <= right[:, None])
    # If several responses write into the same place, one of them stays: a wrong guess only costs time.
    text_row = jnp.where(appended, drafts.row[prompt_row][:, None], drafts.text.shape[0])
    compared = num_compared(rows.guessed, rows.chosen, tokens[:, :-1], is_stop[:, :-1])
    compared = jnp.where(active[:, None], compared, 0)
    drafts = drafts.replace(
        text=drafts.text.at[text_row, slots.count[:, None] + place].set(tokens, mode="drop"),
        counts=draft_choice.recent(drafts.counts.at[prompt_row].add(compared)),
    )
    counts = state.counts.replace(
        verified=state.counts.verified + jnp.sum(active[:, None] & rows.chosen, dtype=jnp.int32),
        accepted=state.counts.accepted + jnp.sum(jnp.where(active, right, 0), dtype=jnp.int32),
    )
    return state.replace(drafts=drafts, counts=counts), right

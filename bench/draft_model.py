"""Drafts of the window model: its texts in numpy, with prescribed responses. drafts.py chooses the guesses."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from reinforce_ada_jax.sampling import draft_choice, drafts
from reinforce_ada_jax.sampling.state import EngineOptions, Prompts, Slots


@functools.partial(jax.jit, static_argnums=0)
def _guess(
    options: EngineOptions,
    text: Int[jax.Array, "S max_response"],
    prompt: Int[jax.Array, "S max_prompt"],
    prompt_length: Int[jax.Array, " S"],
    response: Int[jax.Array, "S max_response"],
    recent: Int[jax.Array, "S 2"],
    slots: Slots,
) -> tuple[Int[jax.Array, "S drafts"], Bool[jax.Array, "S drafts"]]:
    """Returns the guesses, and which of them are verified."""
    sizes = draft_choice.step_sizes(options)
    guessed = drafts.guess(text, prompt, prompt_length, response, slots.count, options.drafts)
    guessed = jnp.where(jnp.sum(slots.active) < sizes[-1], guessed, drafts.NONE)
    fits = drafts.verifiable(guessed, slots, options.page_size)
    chosen, _ = draft_choice.choose(fits, draft_choice.chances(recent, options.drafts), slots, options, sizes)
    return jnp.where(fits, guessed, drafts.NONE), chosen


_text_rows = jax.jit(drafts.text_rows, static_argnums=2)
_accepted, _num_compared = jax.jit(drafts.accepted), jax.jit(drafts.num_compared)


class DraftModel:
    """Texts of one replica, and counts of the current window."""

    def __init__(self, options: EngineOptions):
        self._options = options
        self._prompts = np.zeros((options.open_prompts, options.longest_prompt), np.int32)
        self._row = np.zeros(options.open_prompts, np.int32)
        self._texts = np.full((options.draft_texts, options.max_response_tokens), drafts.NONE, np.int32)
        self._recent = np.zeros((options.open_prompts, 2), np.int32)
        self._counts = np.zeros(2, np.int32)

    def open_prompt(self, row: int, tokens: Int[np.ndarray, " max_prompt"], length: int) -> None:
        """Finds the text of a prompt."""
        self._prompts[row], self._recent[row] = tokens, 0
        self._row[row] = _text_rows(tokens[None], np.array([length]), len(self._texts))[0]
        if not self._options.keep_drafts:
            self._texts[self._row[row]] = drafts.NONE

    def take_counts(self) -> dict[str, np.ndarray]:
        """Returns the counts since the last call; none if the engine guesses nothing."""
        (verified, accepted), self._counts = self._counts, np.zeros(2, np.int32)
        return dict(verified=np.asarray(verified), accepted=np.asarray(accepted)) if self._options.drafts else {}

    def step(
        self, slots: Slots, prompts: Prompts, responses: Mapping[int, tuple[np.ndarray, bool]]
    ) -> tuple[Int[np.ndarray, " active"], Int[np.ndarray, " active"]]:
        """Guesses for one decode step.

        Args:
          slots: the slots before the step.
          prompts: the open prompts.
          responses: tokens by output row.

        Returns:
          The number of guesses that are verified for each active slot, and how many of them are right.
        """
        o, active = self._options, np.flatnonzero(slots.active)
        response, left = np.zeros((o.slots, o.max_response_tokens), np.int32), np.zeros(o.slots, int)
        for slot in active.tolist():
            tokens = responses[int(slots.requests.output_row[slot])][0]
            response[slot, : len(tokens)], left[slot] = tokens, len(tokens) - slots.count[slot]
        text_row, prompt = self._row[slots.requests.prompt_row], self._prompts[slots.requests.prompt_row]
        length, ahead = prompts.length[slots.requests.prompt_row], np.arange(o.drafts)[None]
        guessed, chosen = _guess(
            o, self._texts[text_row], prompt, length, response, self._recent[slots.requests.prompt_row], slots
        )
        place = np.minimum(slots.count[:, None] + ahead, o.max_response_tokens - 1)
        tokens = np.take_along_axis(response, place, axis=1)
        stopped = ahead >= left[:, None] - 1
        right = np.asarray(_accepted(guessed, chosen, tokens, stopped))
        compared = np.asarray(_num_compared(guessed, chosen, tokens, stopped))
        np.add.at(self._recent, slots.requests.prompt_row[active], compared[active])
        self._recent = draft_choice.recent(self._recent)
        for slot in active.tolist():
            new = slice(slots.count[slot], slots.count[slot] + 1 + right[slot])
            self._texts[text_row[slot], new] = response[slot, new]
        verified = np.asarray(chosen).sum(1)
        self._counts += [verified[active].sum(), right[active].sum()]
        return verified[active], right[active]

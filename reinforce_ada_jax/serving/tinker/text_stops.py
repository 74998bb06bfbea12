"""Stops that are texts: the response that contains one ends early, and what follows the stop is cut off."""

import collections
from collections.abc import Callable, Sequence

import numpy as np

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.serving.response_text import ResponseText
from reinforce_ada_jax.serving.sampler import Sampled


class TextStops:
    """The responses of one request as they grow, until one of its stops is in them.

    `watch` is that of a `SampleJob`. `end` is called once with the index of a response that has a stop.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], end: Callable[[int], None]):
        self._end = end
        self._parts: dict[int, list[Sampled]] = collections.defaultdict(list)
        self._texts: dict[int, ResponseText] = collections.defaultdict(
            lambda: ResponseText(tokenizer, tokenizer.stop_ids, stops, keep_pieces=False)
        )

    def watch(self, index: int, new: Sampled, ended: bool) -> None:
        """Ends a response if its new tokens complete a stop; one that has ended is left to `cut`."""
        text = self._texts[index]
        if not text.at_stop_text:
            self._parts[index].append(new)
            text.add(new)
            if text.at_stop_text and not ended:
                self._end(index)

    def cut(self, index: int, found: Sampled) -> Sampled:
        """Returns a finished response, up to the first token after which its text contains a stop."""
        text, parts = self._texts[index], self._parts[index]
        if not text.at_stop_text:
            return found
        tokens = np.concatenate([each.tokens for each in parts])[: text.num_tokens]
        return Sampled(tokens, np.concatenate([each.logprobs for each in parts])[: text.num_tokens], stopped=True)

"""Stops that are texts: the response that contains one ends early, and what follows the stop is cut off."""

from collections.abc import Callable, Sequence

import numpy as np

from reinforce_ada_jax.serving.sampler import Sampled


class TextStops:
    """The responses of one request as they grow, until one of its stops is in them.

    `watch` is that of a `SampleJob`.
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[np.ndarray], str], end: Callable[[int], None]):
        """Watches for some texts.

        Args:
          texts: that end a response.
          decode: from tokens to text.
          end: is called once with the index of a response that has a stop.
        """
        self._texts, self._decode, self._end = tuple(texts), decode, end
        self._longest = max(len(text.encode()) for text in self._texts)
        self._seen: dict[int, Sampled] = {}
        self._stopped: set[int] = set()

    def watch(self, index: int, new: Sampled, ended: bool) -> None:
        """Ends a response if its new tokens complete a stop; one that has ended is left to `cut`."""
        if ended or index in self._stopped:
            return
        seen = self._seen.get(index)
        self._seen[index] = seen = new if seen is None else _joined(seen, new)
        # Nearly every token has a byte of the text or more, so the stop begins among these tokens; where it does not,
        # the response ends later, and is cut all the same.
        recent = seen.tokens[-(len(new.tokens) + self._longest) :]
        if self._contains(recent) and self._contains(seen.tokens):
            self._stopped.add(index)
            self._end(index)

    def cut(self, index: int, found: Sampled) -> Sampled:
        """Returns a finished response, up to the first token after which its text contains a stop."""
        response = self._seen[index] if index in self._stopped else found
        if not self._contains(response.tokens):
            return response
        low, high = 1, len(response.tokens)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._contains(response.tokens[:middle]) else (middle + 1, high)
        return Sampled(response.tokens[:low], response.logprobs[:low], stopped=True)

    def _contains(self, tokens: np.ndarray) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._texts)


def _joined(first: Sampled, second: Sampled) -> Sampled:
    tokens, logprobs = np.concatenate([first.tokens, second.tokens]), np.concatenate([first.logprobs, second.logprobs])
    return Sampled(tokens, logprobs, stopped=False)

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
        self._seen: dict[int, list[Sampled]] = {}
        self._stopped: dict[int, Sampled] = {}  # up to their stops

    def watch(self, index: int, new: Sampled, ended: bool) -> None:
        """Ends a response if its new tokens complete a stop; one that has ended is left to `cut`."""
        if ended:
            return
        seen = self._seen.setdefault(index, [])
        seen.append(new)
        if index in self._stopped:
            return
        # Nearly every token has a byte of the text or more, so the stop begins among these tokens; where it does not,
        # the response ends later, and is cut all the same.
        recent, wanted = [], len(new.tokens) + self._longest
        for part in reversed(seen):
            recent.insert(0, part.tokens)
            if sum(map(len, recent)) >= wanted:
                break
        if self._contains(np.concatenate(recent)):
            whole = self._cut(_joined(seen))
            if whole.stopped:
                self._stopped[index] = whole
                self._end(index)

    def cut(self, index: int, found: Sampled) -> Sampled:
        """Returns a finished response, up to the first token after which its text contains a stop."""
        return self._stopped.get(index) or self._cut(found)

    def _contains(self, tokens: np.ndarray) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._texts)

    def _cut(self, response: Sampled) -> Sampled:
        if not self._contains(response.tokens):
            return response
        low, high = 1, len(response.tokens)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._contains(response.tokens[:middle]) else (middle + 1, high)
        return Sampled(response.tokens[:low], response.logprobs[:low], stopped=True)


def _joined(parts: Sequence[Sampled]) -> Sampled:
    tokens, logprobs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "logprobs"))
    return Sampled(tokens, logprobs, stopped=False)

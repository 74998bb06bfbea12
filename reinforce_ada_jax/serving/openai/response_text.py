"""Text of one response while its tokens come: stops are cut exactly, and tokens keep their share of the text."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.environments.tool_calls import partial_length
from reinforce_ada_jax.serving.sampler import Sampled
from reinforce_ada_jax.serving.text_stream import TextStream


class Piece(NamedTuple):
    """Text that a token adds, where it begins in the response's text, and the token's log-probability."""

    text: str
    begin: int
    logprob: float


class ResponseText:
    """Growing text of a response.

    Attributes:
      text: what there is of it, up to a stop text.
      pieces: the tokens of the text, if asked for. Joined, they are the text: bytes of a character that is not complete
        belong to the token that completes it.
      num_tokens: generated tokens up to the end of the response, which a stop text or a stop token may be.
      at_stop_text: True if a stop text has come.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int], stops: Sequence[str], keep_pieces: bool):
        self.text, self.pieces, self.num_tokens, self.at_stop_text = "", [], 0, False
        self._stream, self._stop_ids, self._stops = TextStream(tokenizer), frozenset(stop_ids), tuple(stops)
        self._keep_pieces, self._longest = keep_pieces, max(map(len, stops), default=0)

    def add(self, sampled: Sampled) -> None:
        """Adds tokens; those after a stop text are dropped."""
        tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
        if not self._stops and not self._keep_pieces:
            self.num_tokens += len(tokens)
            self.text += self._stream.add([token for token in tokens if token not in self._stop_ids])
            return
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self.at_stop_text:
                return
            self.num_tokens += 1
            if token not in self._stop_ids:
                self._append(self._stream.add([token]), logprob)

    def finish(self) -> None:
        """Adds what is left of a character that is not complete."""
        rest = "" if self.at_stop_text else self._stream.flush()
        if rest and self.pieces:  # it belongs to the last token
            last = self.pieces.pop()
            self.text = self.text[: last.begin]
            self._append(last.text + rest, last.logprob)
        elif rest:
            self._append(rest, 0.0)

    def _append(self, piece: str, logprob: float) -> None:
        begin = len(self.text)
        self.text += piece
        if self._keep_pieces:
            self.pieces.append(Piece(piece, begin, logprob))
        found = [at for stop in self._stops if (at := self.text.find(stop, max(0, begin - self._longest))) >= 0]
        if found:
            self.at_stop_text, self.text = True, self.text[: min(found)]
            kept = [each for each in self.pieces if each.begin < len(self.text)]
            self.pieces = [Piece(self.text[p.begin : p.begin + len(p.text)], p.begin, p.logprob) for p in kept]

    @property
    def settled_length(self) -> int:
        """Characters that no stop text can take away any more."""
        if self.at_stop_text:
            return len(self.text)
        return len(self.text) - max((partial_length(self.text, stop) for stop in self._stops), default=0)

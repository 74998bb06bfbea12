"""Text of a response that grows with its tokens."""

from collections.abc import Sequence

import numpy as np

from reinforce_ada_jax.data.tokenizer import Tokenizer


class TextStream:
    """Text of a response in pieces, which joined are the text of all its tokens.

    Decoding token by token would split characters whose UTF-8 spans several tokens, and lose the spaces with which
    SentencePiece's words begin. So each piece is the difference that new tokens make after the ones before them, and
    it is held back while it ends in U+FFFD, which stands for an incomplete character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Tokens of the last piece, which the next one needs before it; then new ones.
        self._tokens: list[int] = []
        self._num_shown = 0

    def _unseen(self) -> str:
        shown, text = (
            self._tokenizer.decode(np.array(tokens, np.int32))
            for tokens in (self._tokens[: self._num_shown], self._tokens)
        )
        return text[len(shown) :]

    def add(self, tokens: Sequence[int]) -> str:
        """Returns the text that the new tokens complete; "" while a character is incomplete."""
        self._tokens += tokens
        piece = self._unseen()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._tokens = self._tokens[self._num_shown :]
        self._num_shown = len(self._tokens)
        return piece

    def flush(self) -> str:
        """Returns the rest after the last token: U+FFFD for an incomplete character."""
        return self._unseen()

"""Text of responses while tokens arrive. It ends exactly before a stop text, and each token keeps its part of it."""

import collections
import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.environments.tool_calls import partial_length
from reinforce_ada_jax.serving.sampler import Sampled

# The last token before a response that has a text is looked for among this many.
LAST = 16


class TextStream:
    """Text of a response in pieces. Joined, the pieces are the text of all its tokens.

    Decoding token by token would split characters whose UTF-8 spans several tokens, and lose the space at the start of
    SentencePiece's words. So new tokens are decoded together with the tokens of the last piece, and the new piece is
    the text that they add. It is held back while it ends in U+FFFD, which stands for an incomplete character.

    The text goes on with that of the tokens `after`, as a response with its prompt.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # Tokens of the last piece, which are decoded again before those of the next piece; then the new tokens.
        last = next((token for token in reversed(after[-LAST:]) if _has_text(tokenizer, token)), None)
        self._tokens = [] if last is None else [last]
        self._num_shown = len(self._tokens)

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


class Piece(NamedTuple):
    """Text that a token adds, where it begins in the whole text, and the token with its log-probability when drawn."""

    text: str
    begin: int
    logprob: float
    token: int


def _has_text(tokenizer: Tokenizer, token: int) -> bool:
    """Returns False for a special token, and for one that is only a part of a character."""
    text = tokenizer.decode(np.array([token]))
    return bool(text) and "\ufffd" not in text


@functools.lru_cache(2**18)
def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of a single token; for a special token, its name."""
    return tokenizer.decode(np.array([token])) or tokenizer.token(token)


def prompt_pieces(tokenizer: Tokenizer, tokens: Int[np.ndarray, " T"], given: str | None) -> list[Piece]:
    """Returns a piece for each token of a prompt; the text of a special token is its name.

    If the client gave the prompt as a text (`given`), the joined pieces are this text: a BOS that the tokenizer added
    has the text "".
    """
    stream, texts = TextStream(tokenizer), []
    for token in tokens.tolist():
        piece = stream.add([token])
        texts.append(piece if piece or tokenizer.decode(np.array([token])) else tokenizer.token(token))
    texts[-1] += stream.flush()
    if given is not None and "".join(texts[1:]) == given:
        texts[0] = ""
    begins = np.cumsum([0, *map(len, texts)]).tolist()
    return [Piece(*each) for each in zip(texts, begins, [np.nan] * len(texts), tokens.tolist(), strict=False)]


class ResponseText:
    """Growing text of a response, up to a stop text; the text of the prompt comes first if the request wants it.

    The text goes on with that of the tokens `after`; without them it begins without the space of its first word.
    `num_tokens` counts the generated tokens, including those of a stop text and a stop token. Joined, the `pieces` are
    the text; bytes of an incomplete character belong to the token that completes it. With `keep_end` the token that
    ended the response has a last piece, whose text is its name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        stops: Sequence[str],
        keep_pieces: bool,
        *,
        keep_end: bool = False,
        prompt: Sequence[Piece] = (),
        after: Sequence[int] = (),
    ):
        self.text, self.num_tokens, self.at_stop_text = "".join(piece.text for piece in prompt), 0, False
        self.pieces = list(prompt) if keep_pieces else []
        self._tokenizer, self._stream = tokenizer, TextStream(tokenizer, after)
        self._stop_ids, self._stops, self._longest = frozenset(stop_ids), tuple(stops), max(map(len, stops), default=0)
        self._keep_pieces, self._keep_end, self._end = keep_pieces, keep_end, None
        self._begin, self._num_prompt_pieces = len(self.text), len(self.pieces)

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
                self._append(self._stream.add([token]), logprob, token)
            elif self._keep_end:
                self._end = token, logprob

    def finish(self) -> None:
        """Adds the bytes of an incomplete last character, and the token that ended the response."""
        rest = "" if self.at_stop_text else self._stream.flush()
        if rest and self._keep_pieces:  # it belongs to the last token
            last = self.pieces.pop()
            self.text = self.text[: last.begin]
            self._append(last.text + rest, last.logprob, last.token)
        elif rest:
            self._append(rest, 0.0, -1)
        if self._end is not None and not self.at_stop_text:
            token, logprob = self._end
            self.pieces.append(Piece(self._tokenizer.token(token), len(self.text), logprob, token))

    def _append(self, piece: str, logprob: float, token: int) -> None:
        begin = len(self.text)
        self.text += piece
        if self._keep_pieces:
            self.pieces.append(Piece(piece, begin, logprob, token))
        first = max(self._begin, begin - self._longest)
        found = [at for stop in self._stops if (at := self.text.find(stop, first)) >= 0]
        if found:
            self.at_stop_text, self.text = True, self.text[: min(found)]
            prompt, own = self.pieces[: self._num_prompt_pieces], self.pieces[self._num_prompt_pieces :]
            before_stop = [each for each in own if each.begin < len(self.text)]
            self.pieces = prompt + [p._replace(text=self.text[p.begin : p.begin + len(p.text)]) for p in before_stop]

    @property
    def has_prompt(self) -> bool:
        """True if the pieces begin with those of the prompt."""
        return self._num_prompt_pieces > 0

    @property
    def settled_length(self) -> int:
        """Number of characters that no later stop text can remove."""
        if self.at_stop_text:
            return len(self.text)
        own = self.text[self._begin :]
        return len(self.text) - max((partial_length(own, stop) for stop in self._stops), default=0)


class TextStops:
    """Texts of the responses of one request while they grow; each response ends when its text contains a stop.

    `watch` is for `SampleJob.watch`. `end` is called once, with its index, for a running response that has a stop, or
    tokens that the tokenizer can't decode.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], end: Callable[[int], None]):
        self._end = end
        self._errors: dict[int, ValueError] = {}  # of the tokenizer
        self._parts: dict[int, list[Sampled]] = collections.defaultdict(list)
        self._texts: dict[int, ResponseText] = collections.defaultdict(
            lambda: ResponseText(tokenizer, tokenizer.stop_ids, stops, keep_pieces=False)
        )

    def watch(self, index: int, new: Sampled, ended: bool) -> None:
        """Ends a response if its new tokens complete a stop; if it has ended already, only `cut` is needed."""
        text = self._texts[index]
        if text.at_stop_text or index in self._errors:
            return
        self._parts[index].append(new)
        try:
            text.add(new)
        except ValueError as error:  # `cut` raises it: here it would end the requests of all clients
            self._errors[index] = error
        if (text.at_stop_text or index in self._errors) and not ended:
            self._end(index)

    def cut(self, index: int, found: Sampled) -> Sampled:
        """Returns a finished response, up to the first token after which its text contains a stop.

        Raises ValueError if the tokenizer can't decode its tokens.
        """
        if index in self._errors:
            raise self._errors[index]
        text, parts = self._texts[index], self._parts[index]
        if not text.at_stop_text:
            return found
        tokens = np.concatenate([each.tokens for each in parts])[: text.num_tokens]
        return Sampled(tokens, np.concatenate([each.logprobs for each in parts])[: text.num_tokens], stopped=True)

"""The policy's tokenizer behind JetStream's tokenizer interface."""

import numpy as np

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.serving import jetstream

_api = jetstream.tokenizer_api()


class ServedTokenizer(_api.Tokenizer):
    """JetStream's interface to a tokenizer. Text is encoded as it is: a chat template is the client's."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, s: str, *, max_prefill_length: int, **_) -> tuple[np.ndarray, int]:
        """Returns int32[bucket] ids, padded with 0 to a power of two, and their number."""
        tokens = self._tokenizer.encode(s)
        bucket = min(max_prefill_length, 1 << max(4, (len(tokens) - 1).bit_length()))
        padded = np.zeros(bucket, np.int32)
        padded[: len(tokens)] = tokens[:bucket]
        return padded, len(tokens)

    def decode(self, token_ids: list[int], **_) -> str:
        """Returns the text of the ids without special tokens."""
        return self._tokenizer.decode(np.asarray(token_ids, np.int32))

    @property
    def stop_tokens(self) -> set[int]:
        """All ids that end a response."""
        return set(self._tokenizer.stop_ids)

    @property
    def eos_id(self) -> int:
        """One of the stop ids; JetStream looks at `stop_tokens`."""
        return self._tokenizer.stop_ids[0]

    @property
    def pad_id(self) -> int:
        """Not used: lengths are explicit."""
        return 0

    @property
    def bos_id(self) -> int:
        """No token: JetStream puts this before every token request, and the engine removes it again."""
        return jetstream.NO_TOKEN

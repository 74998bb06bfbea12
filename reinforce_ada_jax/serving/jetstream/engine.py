"""An engine and its tokenizer under JetStream's interfaces.

The orchestrator owns the slots, and returns to the host after every token.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import Engine, buckets
from reinforce_ada_jax.sampling.state import DecodeState, Prefix, SamplingParams
from reinforce_ada_jax.serving import jetstream

# First word of the addresses of served responses; the last word numbers them in the order of their start.
SERVED_STREAM = 2**32 - 1
_engine_api, _tokenizer_api = jetstream.load("engine.engine_api"), jetstream.load("engine.tokenizer_api")


class ServedTokenizer(_tokenizer_api.Tokenizer):
    """JetStream's interface to a tokenizer. Text is encoded as it is: the client applies a chat template."""

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
        return self._tokenizer.decode(np.asarray(token_ids, np.int32))

    @property
    def stop_tokens(self) -> set[int]:
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


class JetStreamEngine(_engine_api.Engine):
    """JetStream's methods, over one engine; all responses are drawn with the parameters `sampling`."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, sampling: SamplingParams):
        self.engine, self.tokenizer, self.sampling = engine, tokenizer, sampling
        self._num_draws = 0

    def init_decode_state(self) -> DecodeState:
        return self.engine.init_decode_state()

    def load_params(self, params: Params) -> Params:
        """Returns the weights in the form for decoding; `policy.huggingface.load` reads the folder."""
        return self.engine.decode_weights(params)

    def prefill(
        self, *, params: Params, existing_prefix: object = None, padded_tokens: jax.Array | np.ndarray, true_length: int
    ) -> Prefix:
        """Returns the prefix of one prompt. JetStream deletes it after `insert`, so it shares no array."""
        if existing_prefix is not None:
            raise ValueError("continuing an existing prefix is not supported: send the whole prompt.")
        tokens = np.asarray(padded_tokens, np.int32)
        if tokens[0] == jetstream.NO_TOKEN:
            tokens, true_length = np.append(tokens[1:], np.int32(0)), true_length - 1
        return self.engine.prefill(params, tokens, true_length)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Starts a prefilled prompt in `slot`, and releases what the slot held before."""
        address = np.array([SERVED_STREAM, 0, 0, self._num_draws], np.uint32)
        self._num_draws += 1
        return self.engine.insert(decode_state, prefix, slot, address, self.sampling)

    def generate(self, params: Params, decode_state: DecodeState) -> tuple[DecodeState, Any]:
        """Decodes one token in every active slot; returns them as JetStream's ResultTokens."""
        state, result = self.engine.decode_token(params, decode_state)
        tokens = _engine_api.ResultTokens(
            data=result, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )
        return state, tokens

    def get_prefix_destination_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def get_tokenizer(self) -> None:
        """Returns no metadata: `build_tokenizer` has the tokenizer itself."""

    def build_tokenizer(self, metadata: None) -> ServedTokenizer:
        return ServedTokenizer(self.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return self.engine.options.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The longest bucket: a power of two, as JetStream requires, with room for the token that it prepends."""
        return buckets(self.engine.options.max_prompt_tokens + 1)[-1]

    @property
    def mesh(self) -> Mesh:
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        """Not used."""

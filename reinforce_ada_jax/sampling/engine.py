"""The engine: compiled programs over one decode state, under JetStream's interface.

JetStream's words (`prefill`, `insert`, `generate`) serve its orchestrator, which owns the slots and comes back to the
host after every token. Rollouts use the other words (`open_prompts`, `decode_window`, `close_prompts`) on the same
object, the same state and the same functions of `decode.py`.

The engine holds no weights. Every call gets the learner's own arrays, or the copy that `decode_weights` makes where
layout or dtype differ.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax.config import longest_response
from reinforce_ada_jax.mesh import tensor_spec
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params, merge, nest, weight_shapes
from reinforce_ada_jax.sampling import decode, jetstream
from reinforce_ada_jax.sampling.paged_attention import choose_backend
from reinforce_ada_jax.sampling.state import (
    DecodeState,
    EngineOptions,
    Handover,
    Prefix,
    Report,
    SamplingParams,
    empty_state,
)

# Where JetStream isn't installed, the engine still decodes for rollouts; only an orchestrator needs the real base.
EngineInterface: type = jetstream.engine_api().Engine if jetstream.installed() else object
# Responses asked for through JetStream draw from a stream of their own, numbered as they come.
SERVED_STREAM = 2**32 - 1
SHORTEST_BUCKET = 16


def options_from_config(config: Any, stop_ids: tuple[int, ...]) -> EngineOptions:
    """The engine that a run's configuration describes, with its zeros ("count it for me") filled in."""
    sampling = config.sampling
    options = EngineOptions(
        slots=sampling.slots,
        window=sampling.window,
        page_size=sampling.page_size,
        pages=sampling.pages,
        open_prompts=sampling.open_prompts or sampling.slots,
        prefill_rows=sampling.prefill_rows,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=longest_response(config),
        stop_ids=stop_ids,
        seed=config.seed,
        dtype=config.model.compute_dtype,
        attention=choose_backend(sampling.attention),
    )
    return options if options.pages else dataclasses.replace(options, pages=enough_pages(options))


def enough_pages(options: EngineOptions) -> int:
    """Pages with which no request ever waits for one: every slot and every open prompt at its longest."""
    return options.slots * options.table_width + options.open_prompts * options.prompt_width + 1


def buckets(longest: int) -> list[int]:
    """Prefill lengths, each compiled once: powers of two from 16 to the first that holds `longest`."""
    lengths = [SHORTEST_BUCKET]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return lengths


class Engine(EngineInterface):
    """Paged decoding for one architecture on one mesh. State goes in and comes out; nothing is kept but programs."""

    def __init__(
        self,
        architecture: Architecture,
        options: EngineOptions,
        *,
        mesh: Mesh,
        tokenizer: Any = None,
        served: SamplingParams | None = None,
    ):
        """`served`: how responses asked for through JetStream are drawn; else at temperature 1, as long as may be."""
        self.architecture, self.options, self._mesh, self.tokenizer = architecture, options, mesh, tokenizer
        self.dtype = jnp.dtype(options.dtype)
        self._served, self._served_draws = served or SamplingParams(limit=options.max_response_tokens), 0
        how = dict(dtype=self.dtype, backend=options.attention, mesh=mesh)
        replicated, by_kv_head = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("tensor",)))
        new_state = functools.partial(empty_state, architecture, options)
        layout = jax.tree.map(lambda _: replicated, jax.eval_shape(new_state))
        layout = layout.replace(key_pages=by_kv_head, value_pages=by_kv_head)

        # The old state is donated: nobody reads it again, and the pages are updated in place. The layout is named at
        # every exit: a state that came back laid out otherwise would compile everything once more.
        @functools.partial(jax.jit, donate_argnums=1, out_shardings=(layout, replicated))
        def decode_window(params, state, handover):
            return decode.decode_window(merge(architecture, params), state, handover, window=options.window, **how)

        @functools.partial(jax.jit, donate_argnums=1, out_shardings=layout)
        def open_prompts(params, state, tokens, length, rows):
            prefix = decode.prefill(merge(architecture, params), tokens, length, dtype=self.dtype)
            return decode.open_prompts(state, prefix, rows)

        @functools.partial(jax.jit, donate_argnums=1, out_shardings=(layout, replicated))
        def generate(params, state):
            before = state.slots
            state, ended = decode.decode_token(merge(architecture, params), state, **how)
            result = jnp.stack([state.slots.token, before.active, state.slots.count], axis=1).astype(jnp.int32)
            return decode.release_slots(state, ended), result

        self._prefill = jax.jit(
            lambda params, tokens, length: decode.prefill(merge(architecture, params), tokens, length, dtype=self.dtype)
        )
        self._generate = generate
        self._init_state = jax.jit(new_state, out_shardings=layout)
        self._insert = jax.jit(decode.insert, donate_argnums=0, out_shardings=layout)
        self._decode_window = decode_window
        self._open_prompts = open_prompts
        self._decode_weights = self._make_decode_weights()

    # ---- weights -------------------------------------------------------------------------------------------------

    def _make_decode_weights(self):
        """Decoding keeps weights split over `tensor` only: a gather over fsdp shards would sit in the token loop."""
        shapes = weight_shapes(self.architecture)
        shardings = nest({name: NamedSharding(self._mesh, tensor_spec(axes)) for name, (_, axes) in shapes.items()})
        cast = jax.jit(lambda params: jax.tree.map(lambda w: w.astype(self.dtype), params), out_shardings=shardings)
        return shardings, cast

    def decode_weights(self, params: Params) -> Params:
        """`params` themselves where they are already laid out for decoding; else one jitted cast and reshard."""
        shardings, cast = self._decode_weights
        same = jax.tree.map(
            lambda w, sharding: w.dtype == self.dtype and w.sharding.is_equivalent_to(sharding, w.ndim),
            params,
            shardings,
        )
        return params if all(jax.tree.leaves(same)) else cast(params)

    @property
    def cache_bytes(self) -> int:
        """Of all pages, keys and values, all layers."""
        a, o = self.architecture, self.options
        token_bytes = 2 * a.num_layers * a.num_kv_heads * o.columns(a) * self.dtype.itemsize
        return o.pages * o.page_size * token_bytes

    def _check_prompt(self, length: int) -> None:
        if not 1 <= length <= self.options.max_prompt_tokens:
            raise ValueError(
                f"a prompt has {length} tokens, the engine takes 1 to {self.options.max_prompt_tokens}: a longer one "
                "would have been cut. Send a shorter one, or raise data.max_prompt_tokens."
            )

    # ---- rollouts ------------------------------------------------------------------------------------------------

    def init_decode_state(self) -> DecodeState:
        """An empty state: no prompt open, no slot active, every page free."""
        return self._init_state()

    def prefill_batches(self, rows: Sequence[int], prompts: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
        """(tokens, length, rows) of each prefill: `prefill_rows` prompts of one bucket of length, padded.

        Raises:
          ValueError: a prompt is empty, or longer than the engine's limit.
        """
        by_bucket: dict[int, list[tuple[int, np.ndarray]]] = {}
        for row, tokens in zip(rows, prompts, strict=True):
            self._check_prompt(len(tokens))
            fits = next(length for length in buckets(self.options.max_prompt_tokens) if length >= len(tokens))
            by_bucket.setdefault(fits, []).append((row, tokens))
        size = self.options.prefill_rows
        for bucket, members in sorted(by_bucket.items()):
            for first in range(0, len(members), size):
                tokens, length = np.zeros((size, bucket), np.int32), np.zeros(size, np.int32)
                target = np.full(size, self.options.open_prompts, np.int32)  # out of range: dropped
                for index, (row, prompt) in enumerate(members[first : first + size]):
                    tokens[index, : len(prompt)], length[index], target[index] = prompt, len(prompt), row
                yield tokens, length, target

    def open_prompts(
        self, params: Params, state: DecodeState, tokens: np.ndarray, length: np.ndarray, rows: np.ndarray
    ) -> DecodeState:
        """One dispatch: prefills one of `prefill_batches` into pages of its own and the prompt table's rows."""
        return self._open_prompts(params, state, tokens, length, rows)

    def decode_window(self, params: Params, state: DecodeState, handover: Handover) -> tuple[DecodeState, Report]:
        """One dispatch: up to `window` tokens for all slots, refilled from the queue (`decode.decode_window`)."""
        return self._decode_window(params, state, handover)

    # ---- JetStream -----------------------------------------------------------------------------------------------

    def prefill(self, *, params: Params, existing_prefix=None, padded_tokens: jax.Array, true_length: int):
        """The prefix of one prompt. JetStream deletes it after `insert`, so it holds arrays of its own only."""
        if existing_prefix is not None:
            raise ValueError("continuing an existing prefix is not supported: send the whole prompt.")
        tokens = np.asarray(padded_tokens, np.int32)
        if tokens[0] == jetstream.NO_TOKEN:
            tokens, true_length = np.append(tokens[1:], np.int32(0)), true_length - 1
        self._check_prompt(true_length)
        return self._prefill(params, tokens[None], np.array([true_length], np.int32))

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prefilled prompt into `slot`; what the slot held before is given up."""
        o = self.options
        if o.pages <= o.slots * o.table_width:
            raise ValueError(
                f"{o.slots} slots of {o.table_width} pages do not fit into a pool of {o.pages} (one is reserved), and "
                "an orchestrator fills them all: set sampling.pages = 0 to have them counted, or fewer slots."
            )
        address = np.array([SERVED_STREAM, 0, 0, self._served_draws], np.uint32)
        self._served_draws += 1
        return self._insert(decode_state, prefix, jnp.int32(slot), address, self._served.as_arrays())

    def generate(self, params: Params, decode_state: DecodeState):
        """One token for every active slot, as JetStream's ResultTokens: token, valid, generated length."""
        state, result = self._generate(params, decode_state)
        tokens = jetstream.engine_api().ResultTokens(
            data=result, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )
        return state, tokens

    def load_params(self, params: Params) -> Params:
        """The weights as decoding wants them; the folder is read by `policy.huggingface.load`."""
        return self.decode_weights(params)

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Prefixes stay on this mesh."""
        return NamedSharding(self._mesh, PartitionSpec())

    def get_tokenizer(self) -> None:
        """No metadata: `build_tokenizer` has the tokenizer itself."""

    def build_tokenizer(self, metadata: None):
        """JetStream's view of the policy's own tokenizer."""
        del metadata
        from reinforce_ada_jax.sampling.served_tokenizer import ServedTokenizer  # noqa: PLC0415  (needs JetStream)

        return ServedTokenizer(self.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self.options.slots

    @property
    def samples_per_slot(self) -> int:
        """Always one."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The longest bucket: a power of two, as JetStream demands, with room for the token that it puts in front."""
        return buckets(self.options.max_prompt_tokens + 1)[-1]

    @property
    def mesh(self) -> Mesh:
        """Where decoding runs."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """Not used."""

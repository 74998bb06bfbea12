"""The engine: compiled programs over one decode state, under JetStream's interface.

JetStream's words (`prefill`, `insert`, `generate`) serve its orchestrator, which owns the slots and comes back to the
host after every token. Rollouts use the other words (`open_prompts`, `decode_window`, `close_prompts`) on the same
object, the same state and the same functions of `decode.py`.

The engine holds no weights. Every call gets the learner's own arrays, or the copy that `decode_weights` makes where
layout or dtype differ.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reinforce_ada_jax.distributed.mesh import local_mesh, local_view, tensor_spec
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params, merge, nest, weight_shapes
from reinforce_ada_jax.sampling import decode
from reinforce_ada_jax.sampling.state import (
    ADDRESS_WORDS,
    DecodeState,
    EngineOptions,
    PrefillBatch,
    Prefix,
    Sampling,
    SamplingParams,
    WindowInputs,
    WindowOutputs,
    empty_state,
)
from reinforce_ada_jax.serving import jetstream

EngineInterface: type = jetstream.engine_interface()
# Responses asked for through JetStream draw from a stream of their own, numbered as they come.
SERVED_STREAM = 2**32 - 1
SHORTEST_BUCKET = 16
# Along these axes of the mesh decoding has copies of the weights; each copy has slots, pages and a queue of its own.
REPLICA_AXES = ("data", "fsdp")


def enough_pages(options: EngineOptions) -> int:
    """Pages with which no request ever waits for one: every slot and every open prompt at its longest."""
    return options.slots * options.table_width + options.open_prompts * options.prompt_width + 1


def buckets(longest: int) -> list[int]:
    """Prefill lengths, each compiled once: powers of two from 16 to the first that holds `longest`."""
    lengths = [SHORTEST_BUCKET]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return lengths


def check_prompt(options: EngineOptions, length: int) -> None:
    """Raises ValueError where a prompt of so many tokens can't be opened."""
    if not 1 <= length <= options.max_prompt_tokens:
        raise ValueError(
            f"a prompt has {length} tokens, the engine takes 1 to {options.max_prompt_tokens}: a longer one would have "
            "been cut. Send a shorter one, or raise data.max_prompt_tokens."
        )


def prefill_batches(
    options: EngineOptions, opened: Sequence[Sequence[tuple[int, np.ndarray]]]
) -> Iterator[list[PrefillBatch]]:
    """What to prefill, one dispatch after the other: a batch for each replica, all of one bucket of length.

    Args:
      options: `prefill_rows` prompts stand in a batch, fewer are padded.
      opened: each replica's prompts, (row, tokens).

    Raises:
      ValueError: a prompt is empty, or longer than the engine's limit.
    """
    by_bucket: dict[int, list[list[tuple[int, np.ndarray]]]] = {}
    for replica, prompts in enumerate(opened):
        for row, tokens in prompts:
            check_prompt(options, len(tokens))
            fits = next(length for length in buckets(options.max_prompt_tokens) if length >= len(tokens))
            by_bucket.setdefault(fits, [[] for _ in opened])[replica].append((row, tokens))
    size = options.prefill_rows
    for bucket, members in sorted(by_bucket.items()):
        for first in range(0, max(map(len, members)), size):
            yield [_prefill_batch(options, bucket, prompts[first : first + size]) for prompts in members]


def _prefill_batch(options: EngineOptions, bucket: int, prompts: Sequence[tuple[int, np.ndarray]]) -> PrefillBatch:
    size = options.prefill_rows
    tokens, length = np.zeros((size, bucket), np.int32), np.zeros(size, np.int32)
    rows = np.full(size, options.open_prompts, np.int32)  # out of range: dropped
    for index, (row, prompt) in enumerate(prompts):
        tokens[index, : len(prompt)], length[index], rows[index] = prompt, len(prompt), row
    return PrefillBatch(tokens=tokens, length=length, rows=rows)


class Engine(EngineInterface):
    """Paged decoding for one architecture on one mesh. State goes in and comes out; nothing is kept but programs.

    Along `data` and `fsdp` the mesh holds replicas, which decode side by side; `options` are those of one of them.
    """

    def __init__(
        self,
        architecture: Architecture,
        options: EngineOptions,
        *,
        mesh: Mesh,
        tokenizer: Any = None,
        served: SamplingParams | None = None,
        process: int | None = None,
    ):
        """An engine on `mesh`; of several processes' mesh, each one's engine has its own devices.

        `served`: how responses asked for through JetStream are drawn; else at temperature 1, as long as may be.
        `process`: whose devices the engine has; this one's, unless its programs are only to be compiled.
        """
        self._learner_mesh, mesh = mesh, local_mesh(mesh, process)
        self.architecture, self.options, self._mesh, self.tokenizer = architecture, options, mesh, tokenizer
        self.dtype = jnp.dtype(options.dtype)
        self._served, self._served_draws = served or SamplingParams(max_tokens=options.max_response_tokens), 0
        self.replicas = mesh.shape["data"] * mesh.shape["fsdp"]
        how = dict(dtype=self.dtype, backend=options.attention, mesh=mesh)
        replica_axes = () if self.replicas == 1 else (REPLICA_AXES,)
        by_replica, by_kv_head = (
            NamedSharding(mesh, PartitionSpec(*replica_axes, *axes)) for axes in ((), ("tensor",))
        )
        new_state = functools.partial(empty_state, options, architecture)
        layout = jax.tree.map(lambda _: by_replica, jax.eval_shape(new_state))
        layout = layout.replace(key_pages=by_kv_head, value_pages=by_kv_head)

        def all_empty():
            state = new_state()
            if self.replicas == 1:
                return state
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *x.shape)), state)

        # The old state is donated: nobody reads it again, and the pages are updated in place. The layout is named at
        # every exit: a state that came back laid out otherwise would compile everything once more.
        @functools.partial(jax.jit, donate_argnums=1, out_shardings=(layout, by_replica))
        @self._on_each_replica
        def decode_window(params, state, inputs):
            return decode.decode_window(merge(architecture, params), state, inputs, window=options.window, **how)

        @functools.partial(jax.jit, donate_argnums=1, out_shardings=layout)
        @self._on_each_replica
        def open_prompts(params, state, batch):
            prefix = decode.prefill(merge(architecture, params), batch.tokens, batch.length, dtype=self.dtype)
            return decode.open_prompts(state, prefix, batch.rows)

        @functools.partial(jax.jit, donate_argnums=1, out_shardings=(layout, by_replica))
        def generate(params, state):
            before = state.slots
            state, ended = decode.decode_token(merge(architecture, params), state, **how)
            result = jnp.stack([state.slots.token, before.active, state.slots.count], axis=1).astype(jnp.int32)
            return decode.release_slots(state, ended), result

        self._prefill = jax.jit(
            lambda params, tokens, length: decode.prefill(merge(architecture, params), tokens, length, dtype=self.dtype)
        )
        self._generate = generate
        self._init_state = jax.jit(all_empty, out_shardings=layout)
        self._insert = jax.jit(decode.insert, donate_argnums=0, out_shardings=layout)
        self._decode_window = decode_window
        self._open_prompts = open_prompts
        self._decode_weights = self._make_decode_weights()

    def _on_each_replica(self, program):
        """`program(params, state, work)` on every replica's devices, each with its own state and work.

        Nothing passes between replicas, so each goes at its own pace. One replica: no axis for them, nothing to map.
        """
        if self.replicas == 1:
            return program

        def on_one(params, *own):
            outputs = program(params, *jax.tree.map(lambda x: x[0], own))
            return jax.tree.map(lambda x: x[None], outputs)

        everyones, own = PartitionSpec(), PartitionSpec(REPLICA_AXES)
        return jax.shard_map(
            on_one,
            mesh=self._mesh,
            in_specs=(everyones, own, own),
            out_specs=own,
            axis_names=set(REPLICA_AXES),
            check_vma=False,  # replicas' loops take different numbers of decode_steps
        )

    def _stack(self, of_replicas: Sequence[Any]) -> Any:
        return of_replicas[0] if self.replicas == 1 else jax.tree.map(lambda *x: np.stack(x), *of_replicas)

    # ---- weights -------------------------------------------------------------------------------------------------

    def _make_decode_weights(self):
        """Decoding keeps weights split over `tensor` only: a gather over fsdp shards would sit in the token loop."""
        shapes = weight_shapes(self.architecture)
        mesh = self._learner_mesh
        shardings = nest({name: NamedSharding(mesh, tensor_spec(axes)) for name, (_, axes) in shapes.items()})
        cast = jax.jit(functools.partial(lora.merged, dtype=self.dtype), out_shardings=shardings)
        return shardings, cast

    def decodes_from(self, params: Params) -> bool:
        """Whether decoding reads `params` as they are; else `decode_weights` makes a copy."""
        shardings, _ = self._decode_weights

        def as_decoded(w, sharding):
            return not lora.is_adapted(w) and w.dtype == self.dtype and w.sharding.is_equivalent_to(sharding, w.ndim)

        return all(jax.tree.leaves(jax.tree.map(as_decoded, params, shardings, is_leaf=lora.is_adapted)))

    def decode_weights(self, params: Params) -> Params:
        """`params` themselves where they are already laid out for decoding; else one jitted cast and reshard, in which
        all processes take part.

        Adapters are merged into their weights by the same program.
        """
        if not self.decodes_from(params):
            _, cast = self._decode_weights
            params = cast(params)
        if self._learner_mesh is self._mesh:
            return params
        return jax.tree.map(lambda w: local_view(w, self._mesh), params)

    def abstract_weights(self) -> Params:
        """Shapes, dtypes and shardings of the weights as decoding has them."""
        return nest({
            name: jax.ShapeDtypeStruct(shape, self.dtype, sharding=NamedSharding(self._mesh, tensor_spec(axes)))
            for name, (shape, axes) in weight_shapes(self.architecture).items()
        })  # fmt: skip

    def programs(self) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """What rollouts run, lowered on demand for the mesh's devices, which need not be here."""
        o, params, state = self.options, self.abstract_weights(), self._init_state.eval_shape()

        def own(*shape, dtype=jnp.int32):
            replicas = () if self.replicas == 1 else (self.replicas,)
            axes = () if self.replicas == 1 else (REPLICA_AXES,)
            return jax.ShapeDtypeStruct(
                (*replicas, *shape), dtype, sharding=NamedSharding(self._mesh, PartitionSpec(*axes))
            )

        rows, size = o.output_rows, o.prefill_rows
        inputs = WindowInputs(
            prompt_row=own(rows), output_row=own(rows), address=own(rows, ADDRESS_WORDS, dtype=jnp.uint32),
            sampling=Sampling(
                max_tokens=own(rows), temperature=own(rows, dtype=jnp.float32),
                top_k=own(rows), top_p=own(rows, dtype=jnp.float32),
            ),
            count=own(), closing=own(o.open_prompts, dtype=jnp.bool), reserve=own(),
        )  # fmt: skip

        def prefill(tokens):
            batch = PrefillBatch(tokens=own(size, tokens), length=own(size), rows=own(size))
            return lambda: self._open_prompts.lower(params, state, batch)

        window = {"decode window": lambda: self._decode_window.lower(params, state, inputs)}
        return window | {f"prefill {tokens}": prefill(tokens) for tokens in buckets(o.max_prompt_tokens)}

    @property
    def cache_bytes(self) -> int:
        """Of a replica's pages, keys and values, all layers."""
        a, o = self.architecture, self.options
        token_bytes = 2 * a.num_layers * a.num_kv_heads * o.padded_head_dim(a) * self.dtype.itemsize
        return o.pages * o.page_size * token_bytes

    # ---- rollouts ------------------------------------------------------------------------------------------------

    def init_decode_state(self) -> DecodeState:
        """An empty state: no prompt open, no slot active, every page free."""
        return self._init_state()

    def open_prompts(self, params: Params, state: DecodeState, batches: Sequence[PrefillBatch]) -> DecodeState:
        """One dispatch: each replica prefills its own of `prefill_batches` into pages and rows of its prompt table."""
        return self._open_prompts(params, state, self._stack(batches))

    def decode_window(
        self, params: Params, state: DecodeState, all_inputs: Sequence[WindowInputs]
    ) -> tuple[DecodeState, WindowOutputs]:
        """One dispatch: up to `window` tokens for all slots, refilled from the queue (`decode.decode_window`).

        `all_inputs` has one for each replica; `all_outputs` takes their all_outputs apart.
        """
        return self._decode_window(params, state, self._stack(all_inputs))

    def fetch_outputs(self, outputs: WindowOutputs) -> list[WindowOutputs]:
        """Waits for a window: each replica's outputs, on the host."""
        outputs = jax.device_get(outputs)
        if self.replicas == 1:
            return [outputs]
        return [jax.tree.map(operator.itemgetter(replica), outputs) for replica in range(self.replicas)]

    def fetch(self, state: DecodeState) -> list[DecodeState]:
        """Waits for a state: each replica's pool, prompts, queue and slots, on the host; no cache and no outputs."""
        state = jax.device_get(state.replace(key_pages=None, value_pages=None, outputs=None))
        if self.replicas == 1:
            return [state]
        return [jax.tree.map(operator.itemgetter(replica), state) for replica in range(self.replicas)]

    # ---- JetStream -----------------------------------------------------------------------------------------------

    def prefill(self, *, params: Params, existing_prefix=None, padded_tokens: jax.Array, true_length: int):
        """The prefix of one prompt. JetStream deletes it after `insert`, so it holds arrays of its own only."""
        if existing_prefix is not None:
            raise ValueError("continuing an existing prefix is not supported: send the whole prompt.")
        tokens = np.asarray(padded_tokens, np.int32)
        if tokens[0] == jetstream.NO_TOKEN:
            tokens, true_length = np.append(tokens[1:], np.int32(0)), true_length - 1
        check_prompt(self.options, true_length)
        return self._prefill(params, tokens[None], np.array([true_length], np.int32))

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prefilled prompt into `slot`; what the slot held before is given up."""
        o = self.options
        if self.replicas > 1:
            raise ValueError(
                f"an orchestrator feeds one replica, and there are {self.replicas}: use a mesh with data = fsdp = 1."
            )
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
        from reinforce_ada_jax.serving.tokenizer import ServedTokenizer  # noqa: PLC0415  (needs JetStream)

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

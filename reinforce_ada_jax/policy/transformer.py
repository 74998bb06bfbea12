"""The decoder: one definition for the learner and for the sampler, over one tree of parameters.

`params` everywhere is a plain nested dict of arrays (the state of `Decoder`, without flax's wrappers), so that optax,
Orbax and `jax.tree` see nothing but arrays. `merge` makes a `Decoder` of it; that costs nothing at run time, and
happens inside compiled programs only.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import experts
from reinforce_ada_jax.policy.apart import over_layers
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.layers import MLP, Declare, Layer, choose_adapters, norm, norm_start, row_adapters
from reinforce_ada_jax.policy.quantization import Quantized
from reinforce_ada_jax.policy.rounded import Rounded, round_to_bfloat16, rounding, whole_products

Params = dict[str, Any]
Declared = tuple[tuple[int, ...], tuple[str | None, ...]]  # shape, logical axes
# attend(query, key, value, layer, carry) -> (mixed, carry, of_layer): the attention of one layer, a `LayerPlace`.
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any, Any]]
# attend(query, key, value, layer, segment_ids) -> mixed: over whole rows; a token attends to its own segment, if any.
RowAttend = Callable[..., jax.Array]
# rowwise(function, *arrays) applies a function of rows to arrays of rows ([B, ...]).
Rowwise = Callable[..., Any]

# Name under which the result of attention is stored for the backward pass.
ATTENTION_RESULT = "attention result"
# Activations of a layer that are kept for the backward pass; it computes the others again from the layer's input.
REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with weights: not attention's scores
        jax.checkpoint_policies.save_only_these_names(ATTENTION_RESULT),
    ),
}


class LayerValues(NamedTuple):
    """Values of each layer in a forward pass, along a leading axis."""

    of_attention: Any  # the last result of `Attend`
    load: Float[Array, "L E"] | None = None  # number of counted tokens of each expert
    chosen: Int[Array, "L B T C"] | None = None  # experts of each token, where they are recorded


class LayerPlace(NamedTuple):
    """The place of a layer among others, and how far its tokens see."""

    number: Int[Array, ""] | int
    window: int = 0  # of a sliding layer, as of `Architecture`
    slides: Bool[Array, ""] | None = None  # None: no layer of the model does
    sinks: Float[Array, " N"] | None = None  # scores in the denominators of the softmax of each head, in float32

    @property
    def reach(self) -> Int[Array, ""] | None:
        """Number of tokens that a token sees, itself included; None: all before it."""
        return None if self.slides is None else jnp.where(self.slides, self.window, jnp.iinfo(jnp.int32).max // 2)

    def sees(self, token: Int[Array, "..."], length: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns True where the last of `length` tokens sees a token."""
        seen = token < length
        return seen if (reach := self.reach) is None else seen & (token >= length - reach)


FULL_LAYER = LayerPlace(0)  # without a window, and without sinks


def all_rows(function: Callable[..., Any], *rows: jax.Array) -> Any:
    """Computes all rows at once."""
    return function(*rows)


@dataclasses.dataclass(frozen=True)
class Execution:
    """Choices for computing the layers. All but `dtype` and `rounds` give the same results up to rounding."""

    dtype: DTypeLike  # of activations and matrix products; weights are cast where they are used
    rounds: bool = False  # inputs of products, and the final hidden states, are rounded to bfloat16 (`rounded.py`)
    remat: str | None = None  # of `REMAT`; None: all activations are kept for the backward pass
    rows: NamedSharding | None = None  # sharding of the residual stream; None: the compiler chooses it
    mesh: Mesh | None = None  # for experts that are split over `tensor`, if `rows` is None
    rowwise: Rowwise = all_rows  # all but attention: all rows at once, or by `invariant.by_tiles`, which takes no banks

    def constrain(self, x: jax.Array) -> jax.Array:
        """Returns x with the sharding of `rows`."""
        return x if self.rows is None else jax.lax.with_sharding_constraint(x, self.rows)


class Decoder(nnx.Module):
    """Embedding, stacked layers, final norm, and an output head where it isn't the embedding's transpose."""

    def __init__(self, architecture: Architecture, key: jax.Array, dtype: DTypeLike = jnp.float32):
        outer_key, layers_key = jax.random.split(key)
        declare = Declare(outer_key, dtype)
        v, d = architecture.vocab_size, architecture.hidden_size
        self.architecture = architecture
        self.embedding = declare((v, d), ("vocab", "embed"), fan_in=d)
        self.layers = Layer(architecture, Declare(layers_key, dtype, layers=architecture.num_layers))
        self.final_norm = declare((d,), ("embed",), constant=norm_start(architecture))
        if not architecture.tied_embedding:
            self.head = declare((d, v), ("embed", "vocab"), fan_in=d)


@functools.lru_cache
def _abstract(architecture: Architecture) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(architecture, jax.random.key(0))))


def merge(architecture: Architecture, params: Params) -> Decoder:
    """Returns a decoder that holds these arrays."""
    return nnx.merge(_abstract(architecture)[0], params)


def weight_shapes(architecture: Architecture) -> dict[str, Declared]:
    """Returns every weight's (shape, logical axes), by dotted path into `params`."""
    flat = nnx.to_flat_state(_abstract(architecture)[1])
    return {".".join(map(str, path)): (leaf.shape, leaf.get_metadata("axes")) for path, leaf in flat}


def nest(flat: dict[str, Any]) -> Params:
    """Returns a tree from dotted paths, the inverse of `flatten`."""
    return traverse_util.unflatten_dict(flat, sep=".")


def flatten(params: Params) -> dict[str, Any]:
    """Returns the leaves of a tree by dotted path."""
    return traverse_util.flatten_dict(params, sep=".")


def shardings(mesh: Mesh, declared: Mapping[str, Declared]) -> Params:
    """Returns the shardings of declared weights on `mesh`, nested as the weights are."""
    return nest({name: mesh_lib.weight_sharding(mesh, name, *shape_axes) for name, shape_axes in declared.items()})


def param_shardings(architecture: Architecture, mesh: Mesh) -> Params:
    """Returns the sharding of every weight on `mesh`, in the shape of `params`."""
    return shardings(mesh, weight_shapes(architecture))


def init(architecture: Architecture, key: jax.Array, mesh: Mesh | None = None, dtype=jnp.float32) -> Params:
    """Returns random weights, sharded from the start if a mesh is given."""

    def make(key):
        return nnx.to_pure_dict(nnx.split(Decoder(architecture, key, dtype))[1])

    return jax.jit(make, out_shardings=None if mesh is None else param_shardings(architecture, mesh))(key)


def embed(model: Decoder, tokens: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T D"]:
    """Returns rows of the embedding, in its own dtype; quantised ones in float32."""
    table = model.embedding.get_value()
    if isinstance(table, Quantized):
        return jnp.take(table.values, tokens, axis=0).astype(jnp.float32) * jnp.take(table.scale, tokens)[..., None]
    if isinstance(table, Rounded):
        return Rounded(jnp.take(table.values, tokens, axis=0)).matrix
    return jnp.take(table, tokens, axis=0)


def _first_states(model: Decoder, tokens: Int[Array | np.ndarray, "B T"], execution: Execution) -> Array:
    """Returns the input of the first layer; Gemma scales embeddings by sqrt(D)."""
    mesh = None if execution.rows is None else execution.rows.mesh
    if isinstance(mesh, Mesh) and mesh_lib.num_slices(mesh) > 1:
        x = mesh_lib.rows_of_table(model.embedding.get_value(), tokens, mesh).astype(execution.dtype)
    else:
        x = embed(model, tokens).astype(execution.dtype)
    x = round_to_bfloat16(x) if execution.rounds else x  # as decoding reads the embedding
    return x * jnp.asarray(model.architecture.hidden_size**0.5, x.dtype) if model.architecture.is_gemma else x


def _after_attention(architecture: Architecture, layer: Layer, execution: Execution, x, mixed, replayed=None):
    """Adds a layer's attention and feed-forward to x; returns it, and the experts of each token if there are any."""

    def normed(x, scale):
        return norm(architecture, x, scale[...])

    def mlp(x):
        if isinstance(layer.mlp, MLP):
            return layer.mlp(x), None
        return layer.mlp(x, replayed, rows=execution.rows, mesh=execution.mesh)

    mixed = layer.attention.merge_heads(mixed)
    if architecture.norm_place == "after":
        x = x + normed(mixed, layer.attention_norm)
        mixed, chosen = mlp(x)
        mixed = normed(mixed, layer.mlp_norm)
    elif architecture.norm_place == "around":
        x = x + normed(mixed, layer.attention_out_norm)
        mixed, chosen = mlp(normed(x, layer.mlp_norm))
        mixed = normed(mixed, layer.mlp_out_norm)
    else:
        x = x + mixed
        mixed, chosen = mlp(normed(x, layer.mlp_norm))
    return execution.constrain(x + mixed), chosen


def run(
    model: Decoder,
    tokens: Int[Array | np.ndarray, "B T"],
    positions: Int[Array | np.ndarray, "B T"],
    attend: Attend,
    carry: Any = None,
    *,
    execution: Execution,
    adapter: Int[Array, " B"] | None = None,
    routing: experts.Routing = experts.FREE,
) -> tuple[Float[Array, "B T D"], Any, LayerValues]:
    """Runs all layers over `tokens`: by a scan, or one by one where their weights are arrays of their own.

    `positions` count in each sequence, from 0. `carry` passes from layer to layer through `attend`, e.g. the pages of
    the cache. `adapter` is the index of each row's adapter in the banks of `model` (`lora.bank`); -1 for none. Experts
    are counted (`routing`) where all rows are computed at once.

    Returns (hidden states after the final norm, last carry, values of the layers).
    """
    graph, state = nnx.split(model.layers)
    stacked, architecture = nnx.to_pure_dict(state), model.architecture
    if execution.rounds:
        stacked = rounding(stacked)
    adapter_rows = None if adapter is None else row_adapters(stacked, adapter)
    numbers = np.arange(architecture.num_layers)
    is_rotated = ~np.isin(numbers, architecture.unrotated_layers)
    is_sliding = np.isin(numbers, architecture.sliding_layers)
    remat, rowwise = execution.remat, execution.rowwise

    def one_layer(state, inputs):
        x, carry = state
        weights, index = inputs
        if adapter_rows is not None:
            weights = choose_adapters(weights, adapter_rows)
        layer = nnx.merge(graph, weights)
        slides = jnp.asarray(is_sliding)[index] if is_sliding.any() else None
        rotates = None if is_rotated.all() else jnp.asarray(is_rotated)[index]

        def before(x, positions):
            x = x if architecture.norm_place == "after" else norm(architecture, x, layer.attention_norm[...])
            return layer.attention.project(x, positions, slides, rotates)

        # At position 0 nothing is rotated.
        where = positions if rotates is None else jnp.where(rotates, positions, 0)
        query, key, value = rowwise(before, x, where)
        place = LayerPlace(index, architecture.window, slides, layer.attention.sinks_of(execution.dtype))
        mixed, carry, of_layer = attend(query, key, value, place, carry)
        recorded = ()
        if routing.replayed is not None:
            recorded = (experts.of_layer(architecture, routing.replayed, index),)
        x, chosen = rowwise(functools.partial(_after_attention, architecture, layer, execution), x, mixed, *recorded)
        load = None
        if routing.counted is not None:
            load = experts.load(architecture.num_experts, chosen, routing.counted)
        return (x, carry), LayerValues(of_layer, load, chosen if routing.records else None)

    if remat is not None:
        # A scan's body is compiled once for all layers, so nothing could be shared across it: no barrier is needed.
        one_layer = jax.checkpoint(one_layer, prevent_cse=False, policy=REMAT[remat])
    x = _first_states(model, tokens, execution)
    with whole_products(execution.dtype, execution.rounds):
        (x, carry), values = over_layers(one_layer, (execution.constrain(x), carry), stacked, architecture.num_layers)
    x = rowwise(lambda x: norm(architecture, x, model.final_norm[...]), x)
    return round_to_bfloat16(x).astype(jnp.bfloat16) if execution.rounds else x, carry, values


def causal_attend(query, key, value, layer, segment_ids=None):
    """Computes causal attention: a token sees itself and those before it, in its segment, within its window."""
    own = None if segment_ids is None else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    if layer.reach is not None:
        place = jnp.arange(query.shape[1])
        near = (place[:, None] - place[None] < layer.reach)[None, None]
        own = near if own is None else own & near
    with jax.numpy_dtype_promotion("standard"):  # jax promotes bfloat16 to float32 inside
        if layer.sinks is not None:
            return _attend_with_sinks(query, key, value, layer.sinks, own)
        return jax.nn.dot_product_attention(query, key, value, mask=own, is_causal=True)


def _attend_with_sinks(query, key, value, sinks, own):
    """Computes causal attention with one more key, whose score is the sink of a head and whose value is 0."""
    length = query.shape[1]
    seen = jnp.tril(jnp.ones((1, 1, length, length), bool))
    seen = seen if own is None else seen & own
    last = ((0, 0), (0, 0), (0, 0), (0, 1))
    score = jnp.pad(jnp.zeros((1, len(sinks), 1, length)), last).at[:, :, :, -1].set(sinks[None, :, None])
    key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (key, value))
    return jax.nn.dot_product_attention(query, key, value, score, jnp.pad(seen, last, constant_values=True))


def of_rows(attend: RowAttend, segment_ids: Int[Array | np.ndarray, "B T"] | None = None) -> Attend:
    """Returns the attention of whole rows as `run` takes it."""
    return lambda query, key, value, layer, carry: (attend(query, key, value, layer, segment_ids), carry, None)


def hidden_states(
    model: Decoder, tokens: Int[Array | np.ndarray, "B T"], *, execution: Execution, attend: RowAttend = causal_attend
) -> Float[Array, "B T D"]:
    """Computes hidden states in a causal forward pass over rows of one sequence each, padded on the right."""
    return hidden_states_and_load(model, tokens, attend=attend, execution=execution)[0]


def hidden_states_and_load(
    model: Decoder,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
    segment_ids: Int[Array | np.ndarray, "B T"] | None = None,
    attend: RowAttend = causal_attend,
    execution: Execution,
    routing: experts.Routing = experts.FREE,
) -> tuple[Float[Array, "B T D"], Float[Array, "L E"] | None]:
    """Computes hidden states, and the number of counted tokens of each expert; None where none are counted.

    Rows may be padded on the right: a token never sees what follows it, so padding changes nothing before it. Where a
    row has several sequences, `positions` count in each of them, and a token sees only the sequence of its own segment
    id. Without them a row is one sequence. `attend` is `causal_attend` or another implementation of it.
    """
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attention = of_rows(attend, segment_ids)
    hidden, _, values = run(model, tokens, positions, attention, execution=execution, routing=routing)
    return hidden, values.load


def head_logits(model: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Returns float32 logits of the next token."""
    tied = model.architecture.tied_embedding
    weight, letters = (model.embedding.get_value(), "VD") if tied else (model.head.get_value(), "DV")

    def logits(matrix: Array) -> Array:
        matrix = matrix.astype(hidden.dtype)
        with whole_products(hidden.dtype):
            return jnp.einsum(f"BTD,{letters}->BTV", hidden, matrix, preferred_element_type=jnp.float32)

    if isinstance(weight, Quantized):
        return logits(weight.values) * weight.scale[None, None]
    if isinstance(weight, Rounded):
        if not tied:
            return logits(weight.matrix)
        # With the embedding on the right, XLA would copy its transpose in each step.
        product = jnp.einsum("VD,BTD->VBT", weight.matrix, hidden, preferred_element_type=jnp.float32)
        return jnp.moveaxis(jax.lax.optimization_barrier(product), 0, 2)
    return logits(weight)


def distribution(logits: Float[Array, "... V"], temperature: float | Float[Array, "... 1"]) -> Float[Array, "... V"]:
    """Returns log-probabilities at `temperature`, without truncation; sampling and scoring both use them."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)


@functools.partial(jax.jit, static_argnames=("architecture", "dtype"))
def logits(
    architecture: Architecture, params: Params, tokens: Int[Array, "B T"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "B T V"]:
    """Computes all logits in a plain forward pass, for checks: [B, T, V] exists here and nowhere else."""
    model = merge(architecture, params)
    return head_logits(model, hidden_states(model, tokens, execution=Execution(dtype)))

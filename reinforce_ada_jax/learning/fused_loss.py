"""From hidden states and the output head straight to the policy loss and its gradient. [B, T, V] exists at no time.

Logits are made tile by tile (some rows, some words), folded into running statistics and forgotten; the backward pass
makes them again. A first sweep has to end before any slope is known: the slope of a token depends on its ratio, and so
on its log-probability.

Here are the function that losses call, what makes it one function over several devices, and the backend for CPU and
GPU; the kernels for TPU are in pallas_loss.py. The formulas of the loss are those of loss.py, on the results.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import loss as loss_lib
from reinforce_ada_jax.learning import pallas_loss

BACKENDS = ("scan", "pallas_tpu")
# Rows and words of a tile of the scan. 4 MiB of logits stay in a CPU's cache: the products ran at 200 GFLOP/s on two
# cores, and at half of it with tiles of 32 MiB.
SCAN_ROWS, SCAN_WORDS = 1024, 1024


class Plan(NamedTuple):
    """How statistics are computed: everything about a call that isn't an array.

    Attributes:
      temperature: divides the logits.
      tied: the head is an embedding [V, D], not [D, V].
      mesh: over which rows and vocabulary are split; None where everything is on one device.
      backend: one of `BACKENDS`.
      tile: (rows, words) whose logits exist at a time.
      interpret: run a Pallas kernel without its device.
      frozen_head: only hidden states have a gradient.
    """

    temperature: float
    tied: bool
    mesh: Mesh | None
    backend: str
    tile: tuple[int, int]
    interpret: bool
    frozen_head: bool

    def of_kernel(self) -> dict[str, Any]:
        """What the kernels of pallas_loss.py are told."""
        return dict(temperature=self.temperature, tied=self.tied, tile=self.tile, interpret=self.interpret)


class Statistics(NamedTuple):
    """Of the logits z of each row, over a part of the vocabulary; all Float[Array, "M"]."""

    best: Array  # max z
    total: Array  # sum exp(z - best)
    weighted: Array  # sum exp(z - best) (z - best)
    target: Array  # z of the target, 0 where it isn't in this part


class Slopes(NamedTuple):
    """What the backward sweep knows of each row; all Float[Array, "M"]."""

    log_total: Array  # log sum exp z, over the whole vocabulary
    entropy: Array
    logprob_slope: Array  # d loss / d logprob
    entropy_slope: Array  # d loss / d entropy


# ---- scan --------------------------------------------------------------------------------------------------------


def _tiles(length: int, size: int, body: Callable[[Any, int, Any], Any], carry: Any) -> Any:
    """carry = body(start, size, carry) for consecutive pieces of `length`; the last one may be smaller."""
    whole, rest = divmod(length, size)
    if whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, carry: body(i * size, size, carry), carry)
    return body(whole * size, rest, carry) if rest else carry


def _logits(how: Plan, hidden: Float[Array, "m D"], words: Array) -> Float[Array, "m v"]:
    """Float32 logits of some words, at the temperature, by a product in the hidden states' dtype."""
    dims = ((1,), (1 if how.tied else 0,))
    return jax.lax.dot_general(hidden, words, (dims, ((), ())), preferred_element_type=jnp.float32) / how.temperature


def _own(logits: Float[Array, "m v"], targets: Int[Array, " m"], start: int | Array) -> Array:
    """True at each row's target, where it is among the words from `start` on."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == (targets - start)[:, None]


_piece = jax.lax.dynamic_slice_in_dim
_with_piece = jax.lax.dynamic_update_slice_in_dim


def scan_statistics(
    how: Plan, hidden: Float[Array, "M D"], head: Float[Array, "V D"] | Float[Array, "D V"], targets: Int[Array, " M"]
) -> Statistics:
    """The statistics over this head, whole or a part; targets count from its first word."""
    words_axis = 0 if how.tied else 1

    def fold(hidden, targets, start, size, so_far: Statistics) -> Statistics:
        logits = _logits(how, hidden, _piece(head, start, size, words_axis).astype(hidden.dtype))
        best = jnp.maximum(so_far.best, logits.max(axis=1))
        shrink, below = jnp.exp(so_far.best - best), logits - best[:, None]
        weights = jnp.exp(below)
        return Statistics(
            best=best,
            total=so_far.total * shrink + weights.sum(axis=1),
            weighted=(so_far.weighted + so_far.total * (so_far.best - best)) * shrink + (weights * below).sum(axis=1),
            target=so_far.target + jnp.where(_own(logits, targets, start), logits, 0.0).sum(axis=1),
        )

    def some_rows(row, size, found):
        mine = _piece(hidden, row, size), _piece(targets, row, size)
        zeros = jnp.zeros(size, jnp.float32)
        of_rows = _tiles(
            head.shape[words_axis], how.tile[1], functools.partial(fold, *mine),
            Statistics(zeros + pallas_loss.NO_LOGIT, zeros, zeros, zeros),
        )  # fmt: skip
        return jax.tree.map(lambda all_rows, some: _with_piece(all_rows, some, row, 0), found, of_rows)

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    return _tiles(hidden.shape[0], how.tile[0], some_rows, Statistics(zeros, zeros, zeros, zeros))


def scan_gradients(
    how: Plan,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " M"],
    slopes: Slopes,
    dtype: DTypeLike,
) -> tuple[Float[Array, "M D"], Float[Array, "V D"] | Float[Array, "D V"] | None]:
    """(d_hidden in float32, d_head in `dtype`) over this head, whole or a part; a frozen head's is None.

    Words outside, rows inside: what a tile adds to d_head is summed in float32 and written once, and only d_hidden is
    carried. No second d_head exists, whatever its dtype.
    """
    words_axis = 0 if how.tied else 1

    def some_words(start, size, carry):
        d_hidden, d_head = carry
        words = _piece(head, start, size, words_axis).astype(hidden.dtype)

        def some_rows(row, rows, carry):
            d_hidden, d_words = carry
            x, target, of_rows = jax.tree.map(lambda x: _piece(x, row, rows), (hidden, targets, slopes))
            log_total, entropy, logprob_slope, entropy_slope = (x[:, None] for x in of_rows)
            logprobs = _logits(how, x, words) - log_total
            # d logprob = 1[target] - p, d entropy = -p (log p + entropy); and all logits were divided.
            d_logits = jnp.where(_own(logprobs, target, start), logprob_slope, 0.0)
            d_logits -= jnp.exp(logprobs) * (logprob_slope + entropy_slope * (logprobs + entropy))
            d_logits = (d_logits / how.temperature).astype(x.dtype)
            dims = ((1,), (words_axis,))
            d_x = jax.lax.dot_general(d_logits, words, (dims, ((), ())), preferred_element_type=jnp.float32)
            d_hidden = _with_piece(d_hidden, _piece(d_hidden, row, rows) + d_x, row, 0)
            if how.frozen_head:
                return d_hidden, None
            # As [D, v], whatever the head's layout: transposing the hidden states is cheaper than transposing a tile.
            more = jax.lax.dot_general(x, d_logits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            return d_hidden, d_words + more

        nothing = None if how.frozen_head else jnp.zeros((hidden.shape[1], size), jnp.float32)
        d_hidden, d_words = _tiles(hidden.shape[0], how.tile[0], some_rows, (d_hidden, nothing))
        if how.frozen_head:
            return d_hidden, None
        d_words = (d_words.T if how.tied else d_words).astype(dtype)
        return d_hidden, _with_piece(d_head, d_words, start, words_axis)

    nothing = jnp.zeros(hidden.shape, jnp.float32), None if how.frozen_head else jnp.zeros(head.shape, dtype)
    return _tiles(head.shape[words_axis], how.tile[1], some_words, nothing)


# ---- one function over several devices ---------------------------------------------------------------------------


def _specs(how: Plan, gathered: bool) -> tuple[PartitionSpec, PartitionSpec]:
    """How row arrays and the head are split; `gathered`: the head along its vocabulary only, as a sweep needs it."""
    embed = None if gathered else "embed"
    return mesh_lib.spec(("rows",)), mesh_lib.spec(("vocab", embed) if how.tied else (embed, "vocab"))


def _first_word(how: Plan, head: Array) -> int | Array:
    """The number of the first word of this device's part of the head."""
    return 0 if how.mesh is None else jax.lax.axis_index("tensor") * head.shape[0 if how.tied else 1]


def _readable(how: Plan, head: Array, hidden: Array) -> Array:
    """The head as sweeps are given it. Where it is gathered over fsdp, in the products' dtype: so less is gathered."""
    return head if how.mesh is None or how.mesh.shape["fsdp"] == 1 else head.astype(hidden.dtype)


def _statistics(how: Plan, hidden: Array, head: Array, targets: Array) -> tuple[Array, Array, Array]:
    """(logprob, entropy, log_total) of every row."""

    def local(hidden, head, targets):
        targets -= _first_word(how, head)
        if how.backend == "pallas_tpu":
            best, total, weighted, target = pallas_loss.statistics(hidden, head, targets, **how.of_kernel())
        else:
            best, total, weighted, target = scan_statistics(how, hidden, head, targets)
        if how.mesh is not None:
            here = best
            best = jax.lax.pmax(here, "tensor")
            shrink = jnp.exp(here - best)
            weighted, total = shrink * (weighted + total * (here - best)), shrink * total
            total, weighted, target = jax.lax.psum((total, weighted, target), "tensor")
        # sum p (z - best) = weighted / total, and the entropy is log sum exp z less sum p z.
        log = jnp.log(total)
        return target - (best + log), log - weighted / total, best + log

    if how.mesh is not None:
        rows, of_head = _specs(how, gathered=True)
        # Sums over axes are written out; a kernel doesn't say along which axes its result varies.
        specs = dict(in_specs=(rows, of_head, rows), out_specs=rows, check_vma=False)
        local = jax.shard_map(local, mesh=how.mesh, **specs)
    return local(hidden, _readable(how, head, hidden), targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head_statistics(how: Plan, hidden: Array, head: Array, targets: Array) -> tuple[Array, Array]:
    return _statistics(how, hidden, head, targets)[:2]


def _forward(how, hidden, head, targets):
    logprob, entropy, log_total = _statistics(how, hidden, head, targets)
    return (logprob, entropy), (hidden, head, targets, log_total, entropy)


def _backward(how, kept, slopes):
    hidden, head, targets, log_total, entropy = kept

    def local(hidden, part, targets, *slopes):
        targets -= _first_word(how, part)
        if how.backend == "pallas_tpu":
            d_hidden, d_head = pallas_loss.gradients(
                hidden, part, targets, *slopes, dtype=head.dtype, frozen_head=how.frozen_head, **how.of_kernel()
            )
        else:
            d_hidden, d_head = scan_gradients(how, hidden, part, targets, Slopes(*slopes), head.dtype)
        if how.mesh is not None:
            d_hidden = jax.lax.psum(d_hidden, "tensor")
        if how.mesh is not None and not how.frozen_head:
            columns_axis = 1 if how.tied else 0
            d_head = jax.lax.psum_scatter(d_head, "fsdp", scatter_dimension=columns_axis, tiled=True)
            d_head = jax.lax.psum(d_head, "data")
        return d_hidden.astype(hidden.dtype), d_head

    if how.mesh is not None:
        rows, of_head = _specs(how, gathered=True)
        of_slope = None if how.frozen_head else _specs(how, gathered=False)[1]
        in_specs, out_specs = (rows, of_head, *[rows] * 5), (rows, of_slope)
        local = jax.shard_map(local, mesh=how.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    d_hidden, d_head = local(hidden, _readable(how, head, hidden), targets, log_total, entropy, *slopes)
    return d_hidden, d_head, None


_head_statistics.defvjp(_forward, _backward)


def default_tile(backend: str, columns: int, dtype: DTypeLike) -> tuple[int, int]:
    """(rows, words) whose logits exist at a time, for hidden states of so many columns."""
    return pallas_loss.default_tile(columns, dtype) if backend == "pallas_tpu" else (SCAN_ROWS, SCAN_WORDS)


def head_statistics(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, "*B"],
    *,
    temperature: float,
    tied: bool,
    mesh: Mesh | None = None,
    backend: str = "scan",
    tile: tuple[int, int] | None = None,
    interpret: bool = False,
    frozen_head: bool = False,
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """log pi(target | hidden) and the entropy of pi, by an online log-sum-exp over tiles of the vocabulary.

    With z = hidden . head / temperature:  logprob = z[target] - log sum exp z,  entropy = log sum exp z - sum p z.
    Backward:  dz = g_logprob (1[target] - p) - g_entropy p (log p + entropy), tile by tile, the logits made anew.

    Source: online softmax, arXiv 1805.02867; cut cross-entropy, 2411.09009, here with entropy and its slope.

    Differentiated in `hidden` and `head`; both gradients come in the dtype of what they belong to, summed in float32
    (d_head, over data and fsdp: in its own dtype). Logits and statistics are float32. The products have the dtype of
    `hidden`, to which the head is cast tile by tile: a float32 head beside bfloat16 states needs no copy.

    On a mesh the rows, all axes of `targets` together, are split over data and fsdp, and the vocabulary over tensor:
    four numbers a row cross it in the forward pass, and d_hidden in the backward one. The head is gathered over fsdp
    in the products' dtype, for either pass anew, and its gradient is scattered over it.

    Args:
      hidden: states that predict `targets`.
      head: the output head [D, V], or with `tied` the embedding [V, D].
      targets: ids in [0, V). Elsewhere the result is finite and means nothing, and there are no further consequences.
      temperature: > 0.
      tied: which layout `head` has.
      mesh: of `mesh.make_mesh`, where arrays are split.
      backend: "scan" for CPU and GPU, "pallas_tpu".
      tile: (rows, words) whose logits exist at a time; by default what suits the backend (the scan's is a CPU's).
      interpret: run Pallas kernels without their device.
      frozen_head: the head has no gradient, and none is computed: its cotangent is 0.

    Raises:
      ValueError: an unknown backend, sizes that don't belong together, or ones that the mesh doesn't divide.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}.")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0.")
    num_words, columns = head.shape if tied else head.shape[::-1]
    if columns != hidden.shape[-1] or hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden {hidden.shape}, head {head.shape} and targets {targets.shape} don't belong together: with "
            f"tied={tied} the head is {'[V, D]' if tied else '[D, V]'}, and there is a target for each hidden state."
        )
    if mesh is not None:
        over_rows = mesh.shape["data"] * mesh.shape["fsdp"]
        sizes = (
            (num_words, "words", "tensor", mesh.shape["tensor"]),
            (columns, "columns", "fsdp", mesh.shape["fsdp"]),
            (targets.size, "rows", "data * fsdp", over_rows),
        )
        for size, what, axes, parts in sizes:
            if size % parts:
                raise ValueError(f"{size:,} {what} can't be split over mesh {axes} = {parts}: choose a divisor.")
    if tile is None:
        tile = default_tile(backend, columns, hidden.dtype)
    how = Plan(float(temperature), tied, mesh, backend, tile, interpret, frozen_head)
    logprob, entropy = _head_statistics(how, hidden.reshape(-1, columns), head, targets.reshape(-1))
    return logprob.reshape(targets.shape), entropy.reshape(targets.shape)


# ---- the loss ----------------------------------------------------------------------------------------------------


def advantage(
    reward: Float[Array, "*B"], baseline: Float[Array, "*B"], weight: Float[Array, "*B"]
) -> Float[Array, "*B"]:
    """weight * (reward - baseline) of each response, a constant: the pool's mean, and 1 or 1 / its deviation."""
    reward, baseline, weight = (x.astype(jnp.float32) for x in (reward, baseline, weight))
    return jax.lax.stop_gradient(weight * (reward - baseline))


def policy_loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    *,
    old_logprobs: Float[Array, "B T"],
    reward: Float[Array, " B"] | Float[Array, "B T"],
    baseline: Float[Array, " B"] | Float[Array, "B T"],
    weight: Float[Array, " B"] | Float[Array, "B T"],
    mask: loss_lib.Mask,
    members: Array | None = None,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    aggregation: str,
    ratio: str = "token",
    behaviour_logprobs: Float[Array, "B T"] | None = None,
    truncated_is_cap: float | None = None,
    reference_logprobs: Float[Array, "B T"] | None = None,
    kl_kind: str = "k3",
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
    num_tokens: Float[Array, ""] | float | None = None,
    num_rows: Float[Array, ""] | float | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The policy loss of a minibatch, or its share of one, from what `head_statistics` gives.

    loss = aggregate(L) - entropy_coefficient aggregate(H) + kl_coefficient aggregate(KL), with L of
    `loss.policy_terms` at the advantages weight * (reward - baseline), H the entropy and KL of `loss.kl_estimate`.

    At positions under the mask the per-token arrays may hold anything, nan included, and slopes are 0.

    Args:
      logprobs: of the sampled tokens, under the policy being updated; differentiated, as is `entropy`.
      entropy: of the policy where it chose them.
      old_logprobs: under the policy before the iteration's first update.
      reward: of the response; of each token's own response where several are packed into a row.
      baseline: of the pool, its mean; in the shape of `reward`.
      weight: factor of their difference; in the shape of `reward`.
      mask: True or 1 at tokens of responses.
      members: Bool[Array, "B T S"], which tokens are one response, where several are packed into a row.
      clip_low: as for `loss.policy_terms`, like `clip_high`, `dual_clip`, `ratio`, `behaviour_logprobs` and
        `truncated_is_cap`.
      aggregation: as for `loss.aggregate`.
      reference_logprobs: under the reference policy; without them the metric "kl" is 0.
      kl_kind: as for `loss.kl_estimate`.
      kl_coefficient: of the KL term.
      entropy_coefficient: of the entropy bonus.
      num_tokens: of the whole minibatch, of which these rows may be a part; by default these rows are all.
      num_rows: its responses that have tokens; given or left out with `num_tokens`.

    Returns:
      The loss, and sums over tokens divided by `num_tokens`: "entropy", "clip_fraction", "dual_clip_fraction",
      "approx_kl" and "kl".

    Raises:
      ValueError: as loss.py does, or a KL coefficient without `reference_logprobs`.
    """
    if kl_coefficient and reference_logprobs is None:
        raise ValueError(f"kl_coefficient is {kl_coefficient}, which needs reference_logprobs.")
    if (num_tokens is None) != (num_rows is None):
        raise ValueError("give both of num_tokens and num_rows, or neither.")
    if num_tokens is None:
        num_tokens, num_rows = loss_lib.denominators(mask, members)
    advantages = advantage(reward, baseline, weight)
    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], logprobs.shape)
    terms = loss_lib.policy_terms(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        behaviour_logprobs=behaviour_logprobs,
        truncated_is_cap=truncated_is_cap,
        ratio=ratio,
        members=members,
    )

    def aggregate(values, name):
        return loss_lib.aggregate(values, mask, name, num_tokens=num_tokens, num_rows=num_rows, members=members)

    loss = aggregate(terms.loss, aggregation)
    if entropy_coefficient:
        loss = loss - entropy_coefficient * aggregate(entropy, aggregation)
    kl = jnp.zeros_like(logprobs)
    if reference_logprobs is not None:
        # Masked before the difference: what stands under the mask must reach neither the value nor its slope.
        here, there = (jnp.where(mask.astype(bool), x, 0.0) for x in (logprobs, reference_logprobs))
        kl = loss_lib.kl_estimate(here, there, kl_kind)
    if kl_coefficient:
        loss = loss + kl_coefficient * aggregate(kl, aggregation)
    per_token = {
        "entropy": entropy,
        "clip_fraction": terms.clipped,
        "dual_clip_fraction": terms.dual_clipped,
        "approx_kl": terms.old_minus_new,
        "kl": kl,
    }
    means = {name: jax.lax.stop_gradient(aggregate(values, "token-mean")) for name, values in per_token.items()}
    return loss, means


def fused_policy_loss(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    tied: bool,
    mesh: Mesh | None = None,
    backend: str = "scan",
    tile: tuple[int, int] | None = None,
    interpret: bool = False,
    **terms: Any,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """`policy_loss` of hidden states and the output head: `head_statistics`, the only passes over the vocabulary.

    Differentiated in `hidden` and `head` only. Hidden states under the mask must be finite; their gradients are 0.

    Args:
      hidden: as for `head_statistics`, like everything down to `interpret`.
      **terms: what `policy_loss` takes, from `old_logprobs` on.
    """
    logprobs, entropy = head_statistics(
        hidden, head, targets,
        temperature=temperature, tied=tied, mesh=mesh, backend=backend, tile=tile, interpret=interpret,
    )  # fmt: skip
    return policy_loss(logprobs, entropy, **terms)

"""The loop over the micro-batches of a minibatch, in one program or in a chain of them.

A run can end between two programs of a chain. A minibatch has a fixed number of rows, of which any number may be
padding at its end. The loop ends at the last micro-batch that has a token, so padding costs memory, not time, and any
amount of it compiles nothing again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from reinforce_ada_jax.distributed.compilation import Lower, with_shardings
from reinforce_ada_jax.learning.batch import Batch
from reinforce_ada_jax.policy.transformer import Params


def num_live(batch: Batch) -> Int[Array, ""]:
    """Counts the micro-batches up to the last one with a token."""
    live = (batch.response_length > 0).any(axis=(1, 2))
    return jnp.max(jnp.where(live, 1 + jnp.arange(live.size), 0))


def micro_batch(batch: Batch, index: Int[Array, ""]) -> Batch:
    """Returns the micro-batch at `index`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch)


def loop_bounds(batch: Batch, first: Int[Array, ""] | None, count: int) -> tuple[Any, Int[Array, ""]]:
    """Returns (begin, end) of the micro-batches of one program: `count` from `first` on, or all for None."""
    live = num_live(batch)
    return (0, live) if first is None else (first, jnp.minimum(first + count, live))


class Chain:
    """Programs that sum over the micro-batches of a minibatch, `count` at a time.

    begin(params, batch) -> (the copy of weights that they share, sums of none, `num_live`)
    add(sums, params, copy, batch, *others, first) -> sums with those from micro-batch `first` on
    """

    def __init__(self, begin: Callable[..., Any], add: Callable[..., Any], shardings: tuple[Any, Any, Any], count: int):
        """Makes the programs; nothing is compiled. `shardings` are those of what `begin` returns.

        Output layouts are fixed: sums in another layout would compile everything again. Old sums are donated.
        """
        self._begun, self._shardings, self._count = begin, shardings, count
        self._begin = jax.jit(begin, out_shardings=shardings)
        self._add = jax.jit(add, donate_argnums=0, out_shardings=shardings[1])

    def num_programs(self, batch: Batch) -> int:
        """Returns the number of `add` programs for a minibatch without padding."""
        return -(-batch.tokens.shape[0] // self._count)

    def sums(self, params: Params, batch: Batch, *others: Any, between: Callable[[], None] | None) -> Any:
        """Runs all programs; on return the copy of weights is released.

        `between` is called when an `add` has ended. Without it the programs are queued, and the host waits for none.
        """
        copy, sums, live = self._begin(params, batch)
        for first in range(0, int(live), self._count):
            sums = self._add(sums, params, copy, batch, *others, np.int32(first))
            if between is not None:
                jax.block_until_ready(sums)
                between()
        return sums

    def programs(
        self, names: tuple[str, str], params: Params, batch: Batch, *others: Any
    ) -> tuple[dict[str, Lower], Any]:
        """Returns the two programs by name, lowered on demand for abstract arguments, and the abstract sums."""
        copy, sums, _ = with_shardings(jax.eval_shape(self._begun, params, batch), self._shardings)
        begin, add = names
        return {
            begin: lambda: self._begin.lower(params, batch),
            add: lambda: self._add.lower(sums, params, copy, batch, *others, np.int32(0)),
        }, sums

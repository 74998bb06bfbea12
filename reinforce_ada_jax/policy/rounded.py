"""Products in bfloat16 between activations in float32: how a model is computed in bfloat16 on a CPU.

On CPUs XLA has fast products of bfloat16 numbers, with sums in float32. It computes everything else in float32:
products with a bfloat16 result, and the values that a loop carries. Stacked weights and the pool of pages would then be
converted in each step. So activations and pages are float32 there, a product rounds its inputs, and weights that are
stored in bfloat16 are carried as their bits.
"""

import contextlib
import functools
import math
import timeit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array

from reinforce_ada_jax.policy.quantization import SUMMED_AXES
from reinforce_ada_jax.policy.record import Record


class Rounded(Record):
    """A matrix whose products round it and the activations to bfloat16, and sum in float32."""

    values: jax.Array  # float32 or bfloat16; or uint16, the bits of bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def matrix(self) -> jax.Array:
        """The matrix in bfloat16."""
        return _matrix(self.values)


def applies(dtype: DTypeLike, platform: str) -> bool:
    """Returns True if a model in `dtype` has rounded products on a platform: bfloat16 on CPUs."""
    return platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16


def whole_products(dtype: DTypeLike, rounds: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which products of a float32 model do not round their inputs, unless `rounds` asks for it.

    By default GPUs round the inputs of products to TF32, and TPUs to bfloat16. A backward pass that is written by hand
    is traced elsewhere, and needs a context of its own; the backward pass of splash attention on TPUs has none.
    """
    is_whole = jnp.dtype(dtype) == jnp.float32 and not rounds
    return jax.default_matmul_precision("float32") if is_whole else contextlib.nullcontext()


def _matrix(values: Array) -> Array:
    if values.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(values, jnp.bfloat16)
    return round_to_bfloat16(values).astype(jnp.bfloat16)


def round_to_bfloat16(x: Array) -> Array:
    """Returns x rounded to a number of bfloat16, in its own type. XLA would remove a cast to bfloat16 and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def as_bits(weights: dict[str, Array]) -> dict[str, Array | Rounded]:
    """Returns weights by dotted path, matrices as the bits of bfloat16 and the others (norms, biases) in float32."""

    def bits(matrix: Array) -> Rounded:
        return Rounded(jax.lax.bitcast_convert_type(matrix.astype(jnp.bfloat16), jnp.uint16))

    return {
        name: bits(weight) if name in SUMMED_AXES else weight.astype(jnp.float32) for name, weight in weights.items()
    }


def rounding(layers: dict[str, Any]) -> dict[str, Any]:
    """Returns nested stacked weights of layers, in which matrices that are plain arrays become `Rounded`."""

    def mark(path, leaf):
        name = ".".join(key.key for key in path)
        return Rounded(leaf) if isinstance(leaf, jax.Array) and f"layers.{name}" in SUMMED_AXES else leaf

    return jax.tree_util.tree_map_with_path(mark, layers, is_leaf=lambda x: not isinstance(x, dict))


def of_columns(x: Array, y: Array) -> Array:
    """Returns x^T y in float32, x [M, K] and y [M, N] rounded."""
    return _product(x.T, y, 1, 0)


def _product(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    # XLA has the fast product only for rows that are contiguous in memory, and chooses it before it fixes the layouts.
    # If it then folds a transpose into the product, the program fails at run time.
    x, y = (with_layout_constraint(_matrix(a), Layout(major_to_minor=(0, 1))) for a in (x, y))
    dims = ((x_axis,), (y_axis,)), ((), ())
    return jax.lax.optimization_barrier(jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32))


@jax.custom_vjp
def _of_rows(x: Array, values: Array) -> Array:
    """Returns x W in float32, x [M, K] and W [K, N] rounded."""
    return _product(x, _matrix(values), 1, 0)


def _forwards(x: Array, values: Array) -> tuple[Array, tuple[Array, Array]]:
    return _of_rows(x, values), (x, values)


def _backwards(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, values = residuals
    of_x = _product(gradient, _matrix(values), 1, 1)
    return of_x.astype(x.dtype), of_columns(x, gradient).astype(values.dtype)


_of_rows.defvjp(_forwards, _backwards)


def product(x: Array, matrix: Rounded, num_inputs: int) -> Array:
    """Contracts the last axes of x [M, *in] with the first of a matrix [*in, *out], in float32."""
    inputs, outputs = matrix.shape[:num_inputs], matrix.shape[num_inputs:]
    values = matrix.values.reshape(math.prod(inputs), math.prod(outputs))
    return _of_rows(x.reshape(len(x), -1), values).reshape(len(x), *outputs)


@functools.cache
def is_faster() -> bool:
    """Returns True if this processor computes rounded products in at most two thirds of the time of float32 products.

    It times 256 rows by a matrix of 576 x 1,536, as in a small language model, forwards and backwards. It compares the
    shortest of fifteen runs of each, which alternate, since other programs may be running. It also returns False where
    XLA can't run rounded products.
    """
    x, matrix = jnp.ones((256, 576)), jnp.ones((576, 1536))

    def compiled(product: Callable[[Array, Array], Array]) -> Callable[[], object]:
        gradients = jax.jit(jax.grad(lambda x, matrix: jnp.sum(product(x, matrix) ** 2), argnums=(0, 1)))
        jax.block_until_ready(gradients(x, matrix))
        return lambda: jax.block_until_ready(gradients(x, matrix))

    try:
        run_rounded, run_whole = compiled(_of_rows), compiled(jnp.matmul)
        pairs = [(timeit.timeit(run_rounded, number=1), timeit.timeit(run_whole, number=1)) for _ in range(15)]
    except jax.errors.JaxRuntimeError:
        return False
    rounded_s, whole_s = map(min, zip(*pairs, strict=True))
    return 1.5 * rounded_s <= whole_s

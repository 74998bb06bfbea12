"""In float32 products of layers and head round nothing: GPUs would to TF32 and TPUs to bfloat16, by default.

The kernels of attention on TPUs, splash and paged, keep their own rule.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.policy import blocked_attention, transformer
from reinforce_ada_jax.sampling.engine import Engine
from tests.sampling import tiny


def products(text):
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


# test_invariant_logprobs.py has the bits of the other one.
@pytest.mark.parametrize("attention", ["jnp", pytest.param("invariant", marks=pytest.mark.slow)])
def test_of_decoding(attention):
    """All products of the decode window are of the highest precision."""
    options = dataclasses.replace(tiny.OPTIONS, pages=14, attention=attention)
    engine = Engine(tiny.ARCHITECTURE, options, mesh=mesh_lib.make_mesh())
    found = products(engine.programs()["decode window"]().as_text())
    assert len(found) > 10 and all("HIGHEST" in line for line in found)


@pytest.mark.parametrize(
    ("dtype", "attend"),
    [
        ("float32", blocked_attention.attend),
        ("bfloat16", transformer.causal_attend),
        pytest.param("float32", transformer.causal_attend, marks=pytest.mark.slow),
        pytest.param("bfloat16", blocked_attention.attend, marks=pytest.mark.slow),
    ],
)
def test_of_an_update(dtype, attend):
    """Forwards and backwards, through layers, attention and the head."""
    tokens = jnp.zeros((2, 80), jnp.int32)
    config = HeadConfig(1.0, tied=True, backend="scan", tile=(16, 16), interpret=False)

    def loss(params):
        model = transformer.merge(tiny.ARCHITECTURE, params)
        execution = transformer.Execution(jnp.dtype(dtype), remat="full")
        hidden = transformer.hidden_states(model, tokens, attend=attend, execution=execution)
        return sum(map(jnp.sum, token_logprobs(config, hidden, params["embedding"], tokens)))

    with jax.numpy_dtype_promotion("standard"):  # jax's own attention mixes dtypes in its gradient
        found = products(jax.jit(jax.grad(loss)).lower(tiny.params()).as_text())
    assert len(found) > 20
    assert {"HIGHEST" in line for line in found} == {dtype == "float32"}

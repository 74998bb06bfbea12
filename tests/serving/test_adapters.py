"""The bank of adapters of a server: places, and adapters that do not fit."""

import jax
import pytest

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import lora, transformer
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.serving.tinker.adapters import AdapterBank
from tests.policy import recording
from tests.policy.adapting import random_adapters
from tests.serving.test_failures import OPTIONS


def test_an_adapter_that_does_not_fit_takes_no_place():
    architecture, base, _ = recording.golden("qwen2")
    mesh = mesh_lib.make_mesh()
    base = jax.device_put(base, transformer.param_shardings(architecture, mesh))
    engine = Engine(architecture, OPTIONS, mesh=mesh)
    bank = AdapterBank(engine, base, lora.Lora(2, 4.0, ("q_proj",)), num_adapters=1)
    loaded = {}
    for name, rank in (("large", 4), ("fits", 2)):
        chosen = lora.Lora(rank, 4.0, ("q_proj",))
        loaded[name] = chosen, random_adapters(architecture, chosen)
    bank.load = loaded.__getitem__
    # As after a new start of a server with a smaller --max_rank. The second error would find all places in use.
    for _ in range(2):
        with pytest.raises(ValueError, match="an adapter has rank 4, and there is room for 2 at most"):
            bank.use("large", ())
    assert bank.use("fits", ())
    assert (bank.place("fits"), bank.place("large")) == (0, -1)

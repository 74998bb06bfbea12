"""A cache that a CPU's machine has no memory for is refused, before the system kills the process for it."""

import dataclasses

import numpy as np
import pytest

from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import host_memory, startup, summary
from reinforce_ada_jax.types import Prompt
from tests import standins
from tests.running import tiny

PROMPTS = [Prompt("0", "", "", np.zeros(8, np.int32))]


@pytest.fixture
def engine():
    config = tiny(**{"sampling.slots": 32})
    return components_lib.build(config, components_lib.model_folder(config.model.path)).engine


def test_weights_and_cache_fit_the_machine(engine, monkeypatch):
    cache = engine.cache_bytes * engine.replicas
    monkeypatch.setattr(host_memory, "of_machine", lambda: cache + 100)
    host_memory.check(engine, 100)
    with pytest.raises(ValueError, match=r"need .* GiB, and this machine has .*\. The cache is that of 32 slots with"):
        host_memory.check(engine, 101)


def test_the_memory_of_a_container_is_its_limit(tmp_path, monkeypatch):
    standins.constants(monkeypatch, host_memory, _GROUP=tmp_path / "memory.max")
    physical = host_memory.of_machine()
    assert physical > 2**28
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.of_machine() == physical
    (tmp_path / "memory.max").write_text("268435456\n")
    assert host_memory.of_machine() == 2**28


def test_few_responses_are_checked_with_their_own_slots(monkeypatch):
    config = tiny(**{"sampling.slots": 32})
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    components = dataclasses.replace(components, slots_reason="on a CPU")
    few = components_lib.for_responses(config, components, PROMPTS, 8).engine
    least = few.cache_bytes * few.replicas + 4 * components.architecture.num_parameters
    monkeypatch.setattr(host_memory, "of_machine", lambda: least)
    components_lib.for_responses(config, components, PROMPTS, 8)
    with pytest.raises(ValueError, match="The cache is that of 16 slots"):
        components_lib.for_responses(config, components, PROMPTS, 9)


def test_the_copy_for_decoding_is_checked_and_stated(tmp_path, monkeypatch):
    """Adapters are merged into a copy of the weights, as large as their base."""
    config = tiny(**{"lora.rank": 4})
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    trained, base = summary.weight_bytes(config, components)
    assert base == 4 * 107_392

    def read():
        return startup.read_inputs(config, tmp_path, lambda *_: None)

    needed = trained + 2 * base + components.engine.cache_bytes * components.engine.replicas
    monkeypatch.setattr(host_memory, "of_machine", lambda: needed)
    assert "their base 0.4 MiB, copy for decoding 0.4 MiB, cache" in read().summary
    monkeypatch.setattr(host_memory, "of_machine", lambda: needed - 1)
    with pytest.raises(ValueError, match="this machine has"):
        read()

"""The time of an iteration that a dry run states, from products that are timed."""

import pytest

from reinforce_ada_jax.collection import slot_choice, strategies
from reinforce_ada_jax.config import replaced
from reinforce_ada_jax.planning import here
from reinforce_ada_jax.training import components as components_lib
from tests import standins
from tests.running import tiny


def test_the_line_of_a_dry_run(monkeypatch):
    # A product of 128 rows takes 2 us a weight, one of 512 rows 5.12 us: 10 ns a token.
    monkeypatch.setattr(here, "product_seconds", lambda rows, columns, dtype: {128: 2e-6, 512: 5.12e-6}[rows])
    monkeypatch.setattr(slot_choice, "simulated", lambda *_: (0.0, 3.0))  # lengths of a response
    config = components_lib.for_devices(replaced(tiny(), {"iterations": 100}))
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    weights = components.architecture.num_parameters
    assert weights == 107_392
    line = here.iteration_line(config, components, strategies.build(config.collection, regularized=False))
    # Draws: 3 * 8 steps of 0.2148 s, and 32 prompts of 8 tokens at 1.074 ms: 5.43 s.
    # Update: 3 products for 128 responses with their prompts of 16 tokens: 3 * 2048 * 1.074 ms = 6.60 s.
    assert line == (
        "time        about 12 s an iteration here: 5.4 s to draw, 6.6 s to update, if responses have 8 tokens; "
        "20 min for all iterations"
    )

    # Two updates score their minibatches before, and a KL term needs the scores of the reference: 5 products, 11 s.
    config = replaced(config, {"learning.prompts_per_update": 16, "learning.kl_coefficient": 0.01})
    line = here.iteration_line(config, components, strategies.build(config.collection, regularized=True))
    assert "5.4 s to draw, 11 s to update" in line


def test_the_line_of_draws_alone(monkeypatch):
    # A step of 128 slots takes 107,392 * 2 us = 0.2148 s. 300 responses of 50 tokens fill the slots three times: 32 s.
    monkeypatch.setattr(here, "product_seconds", lambda rows, *_: {128: 2e-6}[rows])
    config = components_lib.for_devices(tiny())
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    assert here.drawing_line(config, components, 300, 50) == (
        "time        about 32 s here to draw 300 responses, if all have 50 tokens"
    )
    # 2 million responses: 15,625 times 10.74 s, 47 hours; 20 million: 19 days.
    assert "about 47 h here" in here.drawing_line(config, components, 2_000_000, 50)
    assert "about 19 days here" in here.drawing_line(config, components, 20_000_000, 50)
    assert "about 1942 days here" in here.drawing_line(config, components, 2_000_000_000, 50)


def test_slots_of_all_processes_draw(monkeypatch):
    """Each of two processes has one of the two replicas, and both draw: 256 slots, in steps of 0.2148 s."""
    monkeypatch.setattr(here, "product_seconds", lambda rows, *_: {128: 2e-6, 512: 5.12e-6}[rows])
    seen = []
    monkeypatch.setattr(slot_choice, "simulated", lambda *given: seen.append(given[2]) or (0.0, 1.0))
    config = components_lib.for_devices(tiny(**{"mesh.data": 2}))
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    monkeypatch.setattr(components.engine, "replicas", 1)
    here.iteration_line(config, components, strategies.build(config.collection, regularized=False))
    assert seen == [256]
    # 2,048 responses of 50 tokens fill the slots eight times: 400 steps.
    assert "about 1.4 min here" in here.drawing_line(config, components, 2048, 50)


def test_a_product_is_timed(monkeypatch):
    standins.constants(monkeypatch, here, WEIGHTS=2**16)
    assert 0 < here.product_seconds(64, 32, "float32") < 1.0
    with pytest.raises(TypeError):
        here.product_seconds(64, 32, "no type")

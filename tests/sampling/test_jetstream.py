import logging
import sys

import jax
import pytest

from reinforce_ada_jax.sampling import jetstream


def test_the_orchestrator_leaves_the_root_logger_alone(monkeypatch):
    # Importing it sets the root logger to DEBUG and adds a handler to stdout: a line for every token served.
    monkeypatch.delitem(sys.modules, "jetstream.core.orchestrator", raising=False)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    module = jetstream.orchestrator()
    assert (root.level, root.handlers) == before
    assert jax.tree_map is jax.tree_util.tree_map  # what the orchestrator calls
    assert {"Driver", "LLMOrchestrator"} <= set(dir(module))


def test_tensorflow_stays_out():
    jetstream.engine_api()
    assert "seqio" in sys.modules and "tensorflow" not in sys.modules


def test_without_the_wheel_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(jetstream, "installed", lambda: False)
    for load in (jetstream.engine_api, jetstream.tokenizer_api, jetstream.orchestrator):
        with pytest.raises(ModuleNotFoundError, match="pip install --no-deps google-jetstream==0.2.2"):
            load()

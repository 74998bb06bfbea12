"""JetStream's packages as a server imports them: what they must leave alone."""

import logging
import pathlib
import sys

import jax
import pytest

from reinforce_ada_jax.serving import jetstream
from tests import standins
from tests.running import run_python


def test_the_orchestrator_leaves_the_root_logger_alone(monkeypatch):
    # Importing it sets the root logger to DEBUG and adds a handler to stdout: a line for every token served.
    monkeypatch.delitem(sys.modules, "jetstream.core.orchestrator", raising=False)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    module = jetstream.orchestrator.__wrapped__()
    assert (root.level, root.handlers) == before
    assert jax.tree_map is jax.tree_util.tree_map  # what the orchestrator calls
    assert {"Driver", "LLMOrchestrator"} <= set(dir(module))


def test_training_needs_neither_jetstream_nor_what_it_imports():
    code = "import sys; sys.modules['jetstream'] = sys.modules['tiktoken'] = None\n"
    code += "import reinforce_ada_jax.train, reinforce_ada_jax.sampling.engine; print('imported')"
    assert run_python("-c", code).stdout == "imported\n"


def test_the_generate_thread_survives_that_all_requests_end_at_once():
    idle = "At this point we must have some requests inserted into the slots."
    calls = []

    class Driver:
        def _generate_thread(self, idx):
            calls.append(idx)
            assert len(calls) > 2, idle

    class Broken:
        def _generate_thread(self, idx):
            raise AssertionError("something else")

    jetstream._survive_idling(Driver)
    Driver()._generate_thread(5)
    assert calls == [5, 5, 5]
    jetstream._survive_idling(Broken)
    with pytest.raises(AssertionError, match="something else"):
        Broken()._generate_thread(0)
    # The words are the orchestrator's own.
    assert idle in pathlib.Path(jetstream.orchestrator().__file__).read_text()


def test_tensorflow_stays_out():
    jetstream.load("engine.engine_api")
    assert "seqio" in sys.modules and "tensorflow" not in sys.modules


def test_without_the_wheel_the_remedy_is_named(monkeypatch):
    standins.without_packages(monkeypatch, "jetstream")
    for load in (jetstream.protocol, jetstream.orchestrator.__wrapped__):
        with pytest.raises(ModuleNotFoundError, match="pip install --no-deps google-jetstream==0.2.2"):
            load()

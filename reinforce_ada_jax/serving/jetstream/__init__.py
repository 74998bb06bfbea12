"""The one place through which JetStream (`google-jetstream` 0.2.2) is imported.

The wheel's own dependencies pull in seqio and with it TensorFlow (3 GB), for two names that are never used here. So it
is installed with `--no-deps`, and the two names get a placeholder where seqio is absent. `orchestrator` fixes three
things: a call of `jax.tree_map`, which JAX has removed; log lines on stdout; and a generate thread that dies when all
requests end at once (`_survive_idling`).
"""

import functools
import importlib
import importlib.util
import logging
import sys
import types

import jax

REMEDY = (
    "google-jetstream is not installed: `pip install --no-deps google-jetstream==0.2.2` (its own dependencies would "
    "bring TensorFlow) and `pip install 'reinforce_ada_jax[serve]'`."
)

# JetStream puts the tokenizer's `bos_id` before every token request. But some models have no BOS, and for others the
# client's tokens include it. So the tokenizer has this id, and `JetStreamEngine.prefill` removes it again.
NO_TOKEN = -1


def _stand_in_for_seqio() -> None:
    if "seqio" in sys.modules or importlib.util.find_spec("seqio") is not None:
        return
    seqio, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
    vocabulary = type("Vocabulary", (), {})
    sentence_piece = type("SentencePieceVocabulary", (vocabulary,), {})
    vars(vocabularies).update(Vocabulary=vocabulary, SentencePieceVocabulary=sentence_piece)
    vars(seqio).update(vocabularies=vocabularies)
    sys.modules |= {"seqio": seqio, "seqio.vocabularies": vocabularies}


def load(name: str) -> types.ModuleType:
    """Returns the module `jetstream.NAME`; ModuleNotFoundError says how to install the wheel."""
    if importlib.util.find_spec("jetstream") is None:
        raise ModuleNotFoundError(REMEDY)
    _stand_in_for_seqio()
    return importlib.import_module(f"jetstream.{name}")


def protocol() -> tuple[types.ModuleType, types.ModuleType]:
    """Returns the messages of JetStream's gRPC service, and its stubs."""
    return load("core.proto.jetstream_pb2"), load("core.proto.jetstream_pb2_grpc")


def _survive_idling(driver: type) -> None:
    """Restarts the generate thread when it would die, and kill the process, because no slot is active.

    The thread checks that a slot is taken, and a moment later asserts it again. If the detokenize thread frees the last
    slot in between, the assertion fails (3 times in 300 bursts of up to 11 short requests on 3 slots). No request is
    running then, so nothing is lost with the thread's decode state.
    """
    generate_thread = driver._generate_thread

    @functools.wraps(generate_thread)
    def restarted(self, idx: int) -> None:
        while True:
            try:
                return generate_thread(self, idx)
            except AssertionError as error:
                if "we must have some requests inserted" not in str(error):
                    raise

    driver._generate_thread = restarted


@functools.cache
def orchestrator() -> types.ModuleType:
    """Returns JetStream's `orchestrator` (Driver, LLMOrchestrator), and leaves the root logger as it was."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    module = load("core.orchestrator")
    root.setLevel(level)
    root.handlers[:] = handlers
    if not hasattr(jax, "tree_map"):
        setattr(jax, "tree_map", jax.tree_util.tree_map)  # noqa: B010  (a removed name, unknown to type checkers)
    _survive_idling(module.Driver)
    return module

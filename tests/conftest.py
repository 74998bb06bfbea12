"""The test process: eight CPU devices, decided before jax is imported, no silent promotion, and Ctrl-C."""

import atexit
import gc
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from tests import compiling, forked, typechecking

# A shell has what it starts in the background ignore SIGINT, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without bytecode each process that a test starts compiles the package again, and pytest rewrites all tests: 10 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks huggingface.co
# XLA has a thread for each device, or as many as this says. With eight threads, devices that wait for each other in two
# collectives of one program can take all of them before the last device has begun: a deadlock, seen twice.
os.environ["NPROC"] = "16"
FLAGS = (f"{compiling.DEVICES}8", compiling.QUICKLY)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()
os.environ |= compiling.keeping()

import jax  # noqa: E402

compiling.share_programs()
compiling.share_contexts()

# With Python's numbers collections of garbage take 3 % of the processor's time: they visit what files compiled, again
# and again. Each file begins with one.
gc.set_threshold(10_000, 10, 30)

# Hypothesis fails a case that takes 0.2 s of the clock, as any does on a busy machine, and draws others in each run.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Exempts what earlier files left from collections of garbage, which would visit it again for seconds each time."""
    gc.collect()
    gc.freeze()
    yield


# Files and folders that share the programs of engines and learners among all their tests.
SHARING = (
    "evaluation", "serving", "training", "bench/test_iteration.py", "bench/test_rollout.py", "test_rivals.py",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def shared(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shares programs in the files of SHARING."""
    if not request.path.relative_to(pathlib.Path(__file__).parent).as_posix().startswith(SHARING):
        yield
        return
    from tests import sharing  # noqa: PLC0415  (the package is imported when its annotations are checked)

    with sharing.shared_programs():
        yield


# Files that take longest: begun last, one of them would keep a worker busy after the others have ended.
LONGEST = (
    "training/test_train.py", "distributed/test_processes.py", "learning/test_learner.py",
    "sampling/test_rollouts.py", "training/test_checkpoint.py", "rewards/test_workers.py",
    "learning/test_fused_logprobs.py", "serving/test_tinker.py", "policy/test_lora.py", "evaluation/test_evaluate.py",
    "learning/test_loss.py", "test_mistakes.py", "training/test_environments.py", "serving/test_serve.py",
    "bench/test_rollout.py", "test_docs.py", "sampling/test_pallas_attention.py", "training/test_train_lora.py",
    "serving/test_openai.py", "sampling/test_engine.py", "analysis/test_enumeration.py", "policy/test_transformer.py",
    "training/test_train_strategies.py", "training/test_reward_check.py", "training/test_draw_ahead.py",
    "policy/test_huggingface.py", "training/test_loop.py", "planning/test_compile_check.py",
    "sampling/test_invariants.py", "bench/test_update.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first."""
    tests = pathlib.Path(__file__).parent
    ranks = {tests / file: rank for rank, file in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_runtest_setup() -> None:
    typechecking.begin_test()


def pytest_unconfigure() -> None:
    forked.close()
    compiling.close_programs()
    atexit.unregister(jax._src.api.clean_up)  # clears all caches, for seconds, where the process ends anyway

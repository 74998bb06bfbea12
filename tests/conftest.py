"""The test process: eight CPU devices, decided before jax is imported, no silent promotion, and Ctrl-C."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest

from tests import compiling, forked, typechecking

# A shell has what it starts in the background ignore SIGINT, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks huggingface.co
FLAGS = (f"{compiling.DEVICES}8", compiling.QUICKLY)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()
os.environ |= compiling.keeping()

import jax  # noqa: E402

compiling.share_programs()

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Exempts what earlier files left from collections of garbage, which would visit it again for seconds each time."""
    gc.collect()
    gc.freeze()
    yield


def pytest_runtest_setup() -> None:
    typechecking.begin_test()


def pytest_unconfigure() -> None:
    forked.close()
    compiling.close_programs()

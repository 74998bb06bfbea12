"""Configurations as tests load and change them, the environment in which they start commands, and what runs left."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.distributed import compilation
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.learning.update import LearnerState
from reinforce_ada_jax.reporting import writers
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import loop, startup
from reinforce_ada_jax.training.checkpoint import Checkpoints
from reinforce_ada_jax.training.response_journal import ResponseJournal
from reinforce_ada_jax.training.state import abstract_state
from tests import compiling
from tests.forked import Forked

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
# Metrics of the engine's work: after an interruption between turns it draws again what was lost in the slots.
OF_THE_ENGINE = re.compile(
    "collection/(slot_utilisation|redone_tokens|prefills|.*(prefilled|shared|continued)_tokens|dispatches|waited_share)"
)


def load(file: pathlib.Path) -> types.ModuleType:
    """The module of a configuration file."""
    spec = importlib.util.spec_from_file_location(f"configs_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(**changes: object) -> Config:
    """configs/tiny.py in float32, with some keys set: tiny(**{"seed": 1, "mesh.data": 2})."""
    settings = {"model.compute_dtype": "float32"} | changes
    return config_lib.replaced(config_lib.resolve(load(CONFIGS / "tiny.py").get_config()), settings)


def compiles_nothing_early(patch: pytest.MonkeyPatch) -> None:
    """A start of a run in this process compiles nothing: for tests that use few of its programs, or none."""
    patch.setattr(compilation.EarlyCompilation, "add", lambda early, programs: compilation.always_ready)


def train(
    config: Config, workdir: pathlib.Path, load_benchmarks: startup.LoadBenchmarksFn = lambda *_: None
) -> loop.Outcome:
    """The outcome of a run in this process; by default it evaluates nothing."""
    with contextlib.ExitStack() as stack:
        run, state = startup.start(startup.read_inputs(config, workdir, load_benchmarks), workdir, stack, quiet=True)
        return loop.run_to_end(run, state)


@contextlib.contextmanager
def responses_kept() -> Iterator[None]:
    """Runs keep the responses of an iteration beside its checkpoint, as a run that is killed before it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResponseJournal, "forget", lambda *_: None)
        yield


def environment(xla_flags: str = compiling.COMMANDS) -> dict[str, str]:
    """Environment of a user's command on one CPU device."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags} | compiling.keeping()


def run_python(
    *arguments: str, env: dict[str, str] | None = None, cwd: pathlib.Path = ROOT, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Returns what a Python process of these arguments said, and its exit code."""
    env = environment() if env is None else env
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False, **options
    )


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port at which nothing listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def cipher_file(file: pathlib.Path, count: int, **changes: object) -> str:
    """The first `count` held-out words of the built-in task as a JSONL file; some fields of all of them changed."""
    lines = [json.dumps(problem | changes) + "\n" for problem in cipher.problems("heldout")[:count]]
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


def killed_after(process: Forked, file: pathlib.Path, lines: int, how: int = signal.SIGKILL) -> str:
    """Ends a command as soon as a file that it writes has this number of lines; returns its stderr."""
    while not file.exists() or file.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(how)
    return process.communicate()[1]


def saved_config(workdir: pathlib.Path) -> Config:
    """Returns the configuration in config.json of a work directory."""
    return config_lib.from_json((workdir / "config.json").read_text())


def restored(workdir: pathlib.Path, iteration: int | None = None) -> tuple[LearnerState, dict[str, Any]]:
    """(learner state as numpy, the JSON record without the run's random id) of a checkpoint, the newest by default."""
    config = saved_config(workdir)
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    learner, checkpoints = Learner(components.architecture, config, components.mesh), Checkpoints(workdir, keep=2)
    state, record, _ = checkpoints.restore(iteration or checkpoints.latest(), abstract_state(learner))
    checkpoints.close()
    return jax.tree.map(np.asarray, state), {key: value for key, value in record.items() if key != "run_id"}


def refused(
    capture: pytest.CaptureFixture[str], command: Callable, *arguments: Any, code: int = cli.BAD_INPUT, **options: Any
) -> Any:
    """Runs a command that must end with this exit code; returns what it wrote (`out` and `err`)."""
    with pytest.raises(SystemExit) as ended:
        command(*arguments, **options)
    assert ended.value.code == code
    return capture.readouterr()


def assert_same_state(workdir: pathlib.Path, other: pathlib.Path) -> dict[str, Any]:
    """The newest checkpoints of two runs are the same, to the last bit; returns their record."""
    (state, record), (expected, expected_record) = restored(workdir), restored(other)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert record == expected_record
    return record


def texts(folder: pathlib.Path) -> dict[str, str]:
    """Returns the text of each file of a folder by its name."""
    return {file.name: file.read_text() for file in sorted(folder.iterdir())}


def reproducible(workdir: pathlib.Path) -> list[dict[str, float]]:
    """metrics.jsonl without what may differ between equal runs."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("time/", "compile/", "memory/"))}
        for line in writers.read_metrics(workdir)
    ]

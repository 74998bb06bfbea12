"""Which way the modules depend on each other (docs/architecture.md), and what importing them costs."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "reinforce_ada_jax"
# A folder, or a file beside the folders, is a room; whatever is not named is an entry point, above all of these.
# `checkpoint` stands beside `learning` in the picture, but what it saves is the learner's state: one higher.
LAYERS = (
    {"types", "collection_rules", "lifeline", "user_code"},
    {"config_rules"},
    {"config", "mesh", "metrics", "distributed"},
    {"policy", "rewards", "data", "collection"},
    {"sampling", "learning"},
    {"checkpoint"},
)
# Stages are joined by functions that the entry points hand over. The policy is no stage: it is what they are about.
STAGES = {"rewards", "data", "collection", "sampling", "learning"}
HOST_ROOMS = (
    "types", "user_code", "collection", "rewards", "data", "plot", "simulate", "simulate_output", "simulate_questions",
)  # fmt: skip
FOREIGN = {"torch", "tensorflow", "pickle", "dill", "cloudpickle", "joblib", "shelve"}


@functools.cache
def sources() -> dict[str, str]:
    """Every module of the package by its dotted name."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text() for file in files}


def imported(source: str) -> set[str]:
    """Dotted names that a module imports anywhere in it, functions included; "a.b" for `from a import b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def room(module: str) -> str:
    return module.split(".")[1]


def layer(room_name: str) -> int:
    return next((level for level, rooms in enumerate(LAYERS) if room_name in rooms), len(LAYERS))


def allowed(importer: str, target: str) -> bool:
    """Whether room `importer` may import from room `target`."""
    if importer == target:
        return True
    if importer in STAGES and target in STAGES:
        return False
    return layer(target) < layer(importer) or layer(importer) == len(LAYERS)


def violations(modules: dict[str, str]) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, source in modules.items()
        for name in sorted(imported(source))
        if name.startswith(f"{PACKAGE}.") and not allowed(room(module), room(name))
    ]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_imports_point_downward_and_stages_do_not_know_each_other():
    assert len(sources()) > 30
    assert violations(sources()) == []


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("types", "import reinforce_ada_jax.config"),
        ("mesh", "from reinforce_ada_jax import config"),
        ("policy.layers", "from reinforce_ada_jax.learning.loss import aggregate"),
        ("policy.layers", "from reinforce_ada_jax.data import tokenizer"),
        ("collection.collect", "from reinforce_ada_jax.rewards import cipher"),
        ("rewards.cipher", "from reinforce_ada_jax.data import cipher"),
        ("sampling.rollouts", "def f():\n    from reinforce_ada_jax.collection import collect"),
        ("learning.learner", "from reinforce_ada_jax.checkpoint import Checkpoints"),
        ("checkpoint", "from reinforce_ada_jax import train"),
    ],
)
def test_a_forbidden_import_is_seen(importer, line):
    assert len(violations({f"{PACKAGE}.{importer}": line})) == 1


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("policy.layers", "from reinforce_ada_jax.policy import architecture"),
        ("sampling.engine", "from reinforce_ada_jax.policy.transformer import Params, merge"),
        ("learning.learner", "from reinforce_ada_jax import mesh"),
        ("train", "from reinforce_ada_jax import assembly, checkpoint"),
        ("collection.collect", "import numpy"),
    ],
)
def test_what_is_allowed_is_no_violation(importer, line):
    assert violations({f"{PACKAGE}.{importer}": line}) == []


def test_no_torch_and_nothing_that_unpickles():
    found = {(module, name) for module, source in sources().items() for name in imported(source)}
    assert [entry for entry in sorted(found) if entry[1].split(".")[0] in FOREIGN] == []


def test_host_code_imports_no_jax():
    modules = [name.removesuffix(".__init__") for name in sources() if name.split(".")[1] in HOST_ROOMS]
    assert len(modules) > 15
    loaded = run_python(f"import sys, {', '.join(modules)}; print(*sys.modules)").split()
    assert set(modules) <= set(loaded)
    assert [name for name in loaded if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax")] == []


def test_the_trainer_imports_within_five_seconds():
    # Of the processor's time, which other processes hardly change: about 2.6 s where this was written.
    seconds = float(run_python(f"import time, {PACKAGE}.train; print(time.process_time())"))
    print(f"import {PACKAGE}.train: {seconds:.1f} s")
    assert seconds < 5.0

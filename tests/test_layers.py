"""Dependencies between modules (docs/architecture.md), and the cost of importing them."""

import ast
import functools
import pathlib

import pytest

from reinforce_ada_jax.__main__ import COMMANDS
from tests.running import run_python

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "reinforce_ada_jax"
# A room is a folder, or a file beside the folders. Each imports from earlier lines, and from itself.
LAYERS = (
    {"types", "user_code", "files", "isolation"},
    {"config"},
    {"cli"},
    {"distributed"},
    {"data", "rewards", "environments", "policy", "collection"},
    {"sampling", "learning"},
    {"reporting"},
    {"analysis", "serving"},
    {"training"},
    {"evaluation", "planning"},
    {
        "train",
        "evaluate",
        "prepare",
        "export",
        "serve",
        "sft",
        "simulate",
        "plot",
        "compile_check",
        "benchmark",
        "__main__",
    },
)
# Stages are joined by functions that `training` and the commands hand over. The policy is no stage: it is what they
# are about.
STAGES = {"rewards", "environments", "data", "collection", "sampling", "learning"}
HOST_ROOMS = (
    "types",
    "user_code",
    "files",
    "isolation",
    "config",
    "collection",
    "rewards",
    "environments",
    "data",
    "analysis",
    "reporting",
)
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
    """The folder or file of the package that a dotted name below it lies in; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def layer(room_name: str) -> int:
    """The layer of a room.

    Raises:
      ValueError: the room is in none.
    """
    for level, rooms in enumerate(LAYERS):
        if room_name in rooms:
            return level
    raise ValueError(f"{room_name!r} is in no layer: name it in LAYERS and in docs/architecture.md.")


def allowed(importer: str, target: str) -> bool:
    """Returns True if room `importer` may import from room `target`."""
    if importer == target:
        return True
    if importer in STAGES and target in STAGES:
        return False
    return layer(target) < layer(importer)


def outside(modules: dict[str, str]) -> list[str]:
    """Imports of `bench`, which no wheel has."""
    return [
        f"{module} imports {name}"
        for module, source in modules.items()
        for name in sorted(imported(source))
        if name.split(".")[0] == "bench"
    ]


def violations(modules: dict[str, str]) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, source in modules.items()
        if room(module) not in ("", "__init__")
        for name in sorted(imported(source))
        if name.startswith(f"{PACKAGE}.") and not allowed(room(module), room(name))
    ]


def test_imports_point_downward_and_stages_do_not_know_each_other():
    assert len(sources()) > 30
    assert violations(sources()) == []


def test_the_package_imports_nothing_that_a_wheel_lacks():
    assert outside(sources()) == []
    assert len(outside({f"{PACKAGE}.sampling.engine": "def f():\n    from bench.simulation import Cost"})) == 1


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("types", "import reinforce_ada_jax.config"),
        ("config.values", "from reinforce_ada_jax.distributed import mesh"),
        ("policy.layers", "from reinforce_ada_jax.learning.loss import aggregate"),
        ("policy.layers", "from reinforce_ada_jax.data import tokenizer"),
        ("collection.collect", "from reinforce_ada_jax.rewards import cipher"),
        ("rewards.cipher", "from reinforce_ada_jax.data import cipher"),
        ("sampling.rollouts", "def f():\n    from reinforce_ada_jax.collection import collect"),
        ("learning.learner", "from reinforce_ada_jax.training.checkpoint import Checkpoints"),
        ("training.loop", "from reinforce_ada_jax.evaluation import evaluator"),
        ("evaluation.scores", "from reinforce_ada_jax.planning import plan"),
        ("prepare", "from reinforce_ada_jax import evaluate"),
    ],
)
def test_a_forbidden_import_is_seen(importer, line):
    assert len(violations({f"{PACKAGE}.{importer}": line})) == 1


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("policy.layers", "from reinforce_ada_jax.policy import architecture"),
        ("sampling.engine", "from reinforce_ada_jax.policy.transformer import Params, merge"),
        ("learning.learner", "from reinforce_ada_jax.distributed import mesh"),
        ("train", "from reinforce_ada_jax.training import components, checkpoint"),
        ("collection.collect", "import numpy"),
    ],
)
def test_what_is_allowed_is_no_violation(importer, line):
    assert violations({f"{PACKAGE}.{importer}": line}) == []


def test_nothing_but_its_command_imports_the_grpc_interface():
    interface = f"{PACKAGE}.serving.jetstream"
    importers = {
        name
        for name, source in sources().items()
        if any(each.startswith(interface) for each in imported(source)) and not name.startswith(interface)
    }
    assert importers == {f"{PACKAGE}.serve"}


def test_a_room_that_no_layer_names_is_an_error():
    with pytest.raises(ValueError, match="'helpers' is in no layer"):
        violations({f"{PACKAGE}.helpers.text": "from reinforce_ada_jax import types"})


def test_at_most_15_files_beside_the_rooms():
    assert len(list((ROOT / PACKAGE).glob("*.py"))) <= 15


def test_no_torch_and_nothing_that_unpickles():
    found = {(module, name) for module, source in sources().items() for name in imported(source)}
    assert [entry for entry in sorted(found) if entry[1].split(".")[0] in FOREIGN] == []


def test_host_code_imports_no_jax():
    # Two files need a package that is not here: tests/parity imports them.
    optional = ("verifiers_adapter", "verifiers_agent")
    hosts = [name for name in sources() if name.split(".")[1] in HOST_ROOMS and not name.endswith(optional)]
    modules = [name.removesuffix(".__init__") for name in hosts]
    assert len(modules) > 15
    loaded = run_python("-c", f"import sys, {', '.join(modules)}; print(*sys.modules)").stdout.split()
    assert set(modules) <= set(loaded)
    assert [name for name in loaded if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax")] == []


def test_commands_import_jax_only_after_their_flags():
    # `simulate` needs numpy, and is imported last.
    others = sorted(set(COMMANDS) - {"simulate"})
    modules = ", ".join(f"{PACKAGE}.{name}" for name in others)
    show = "print(*sys.modules)"
    shown = run_python("-c", f"import sys, {modules}; {show}; import {PACKAGE}.simulate; {show}").stdout
    before, after = shown.splitlines()
    assert f"{PACKAGE}.serve" in before.split() and f"{PACKAGE}.simulate" in after.split()
    assert {"jax", "matplotlib", "numpy", "orbax"}.isdisjoint(before.split())
    assert {"jax", "matplotlib", "orbax"}.isdisjoint(after.split())


def test_the_trainer_imports_little_beside_jax():
    # Processor time, as a multiple of the same process's for the libraries: 1.4 times where this was written.
    modules, show = f"{PACKAGE}.training.loop, {PACKAGE}.evaluation.evaluator", "print(time.process_time())"
    libraries = "jax, flax, optax, orbax.checkpoint"
    before, after = run_python("-c", f"import time, {libraries}; {show}; import {modules}; {show}").stdout.split()
    assert float(after) < 3.0 * float(before)

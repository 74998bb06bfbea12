"""Reference to an environment, "file.py:NAME" or "verifiers:NAME": checked in the parent, which never runs the code.

Workers load it.
"""

import hashlib
import importlib.util
import inspect
import pathlib
import sys
from typing import Any

from reinforce_ada_jax import user_code

VERIFIERS = "verifiers"


def file_reference(reference: str) -> str:
    """Returns the reference, a file with its absolute path. Files are parsed and packages are found; nothing is run."""
    path_name, _, name = reference.rpartition(":")
    if path_name == VERIFIERS:
        _package(name)
        return reference
    path = pathlib.Path(path_name).resolve()
    user_code.check(path, f"environment.path is {reference!r}", name)
    return f"{path}:{name}"


def _package(name: str) -> pathlib.Path:
    """Returns the file of an environment of verifiers; "owner/my-game@1" is the module `my_game`."""
    setting = f"environment.path is '{VERIFIERS}:{name}'"
    library = importlib.util.find_spec(VERIFIERS)
    if library is None or library.origin is None:
        raise ValueError(f"{setting}, but verifiers is not installed: pip install 'verifiers>=0.4,<0.5'.")
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    if not module.isidentifier():  # for a name with a dot find_spec would run the package before the dot
        raise ValueError(f"{setting}, but {module!r} is no name of a package: name it as in verifiers:owner/my-game@1.")
    its_own = pathlib.Path(library.origin).parent / "v1" / "tasksets" / module / "__init__.py"
    if its_own.exists():
        return its_own
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ValueError(f"{setting}, but there is no Python package {module!r}: install the environment.")
    return pathlib.Path(found.origin)


def file_hash(reference: str) -> str:
    """Returns a hash of the code of an environment, which every edit changes; "" without a reference."""
    if not reference:
        return ""
    path_name, _, name = reference.rpartition(":")
    path = _package(name) if path_name == VERIFIERS else pathlib.Path(path_name)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def load(reference: str) -> type:
    """Returns the class of a reference; TypeError unless it has `reset` and `step`. For workers only."""
    found, settings = named(reference)
    if settings is not None:
        from reinforce_ada_jax.environments import verifiers_adapter  # noqa: PLC0415  (verifiers is optional)

        return verifiers_adapter.adapt(settings)
    name = reference.rpartition(":")[2]
    if not inspect.isclass(found):
        raise TypeError(f"{name} is {found!r:.100}, and not a class")
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if missing:
        raise TypeError(f"the class {name} has no method {missing[0]}()")
    return found


def named(reference: str) -> tuple[Any, Any]:
    """Returns the object that a reference names, and its settings if it is an environment of verifiers, else None.

    In a file, an environment of verifiers is a subclass of `Env` or `Taskset`, or an `EnvConfig`. The settings of a
    subclass are the file's name, as that of a package; an `EnvConfig` is the settings itself.
    """
    path_name, _, name = reference.rpartition(":")
    if path_name == VERIFIERS:
        return None, name
    path = pathlib.Path(path_name)
    found = getattr(user_code.run(path), name)
    library: Any = sys.modules.get("verifiers.v1")
    if library is not None and isinstance(found, library.EnvConfig):
        return found, found
    if library is not None and inspect.isclass(found) and issubclass(found, (library.Env, library.Taskset)):
        return found, path.stem
    return found, None

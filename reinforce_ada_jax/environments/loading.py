"""Reference to an environment, "file.py:Class": checked in the parent, which never runs the file; loaded by workers."""

import inspect
import pathlib

from reinforce_ada_jax import user_code


def file_reference(reference: str) -> str:
    """Returns "file.py:Class" with an absolute path; the file is parsed, not run.

    Raises:
      ValueError: the file is missing or not Python, or it defines no such class.
    """
    path_name, _, name = reference.rpartition(":")
    path, setting = pathlib.Path(path_name).resolve(), f"environment.path is {reference!r}"
    bound = list(user_code.bound(user_code.parse(path, setting).body))
    if name not in bound and "*" not in bound:
        raise ValueError(f"{setting}, but {path} defines no {name!r} (it defines {', '.join(bound) or 'nothing'}).")
    return f"{path}:{name}"


def load(reference: str) -> type:
    """Returns the class of a reference. For workers only.

    Raises:
      TypeError: it is no class with the methods `reset` and `step`.
    """
    path, _, name = reference.rpartition(":")
    found = getattr(user_code.run(pathlib.Path(path)), name)
    if not inspect.isclass(found):
        raise TypeError(f"{name} is {found!r:.100}, and not a class")
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if missing:
        raise TypeError(f"the class {name} has no method {missing[0]}()")
    return found

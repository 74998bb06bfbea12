"""How a grade function is named so that a worker process finds it: "module:qualname", or "file.py:function".

The parent names and checks, the worker loads. A user's file is never run in the parent, where it could import jax,
start threads, or hang.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable, Iterable

from reinforce_ada_jax import user_code
from reinforce_ada_jax.types import Verdict

# A user's function may return a bool or any number instead of a Verdict; `worker.guarded` makes one of it.
GradeFn = Callable[[str, str], Verdict | float | bool]

_REMEDY = "move it to the top level of a module that can be imported, or use workers=0."


def address(grade_fn: GradeFn) -> str:
    """The "module:qualname" under which a fresh interpreter finds `grade_fn`; ValueError when it can't."""
    try:
        module_name, qualname = grade_fn.__module__, grade_fn.__qualname__
    except AttributeError as error:
        raise ValueError(f"grade_fn {grade_fn!r} has no name that a worker could import: {_REMEDY}") from error
    name = f"{module_name}:{qualname}"
    if "<" in qualname:
        raise ValueError(f"grade_fn {name} is a lambda or a local function, which a worker can't import: {_REMEDY}")
    module = sys.modules.get(module_name)
    if module_name == "__main__" or module is None or module.__spec__ is None:
        raise ValueError(f"grade_fn {name} is not in a module that a worker can import: {_REMEDY}")
    if functools.reduce(getattr, qualname.split("."), module) is not grade_fn:
        raise ValueError(f"grade_fn is not what {name} names (a bound method, or redefined since): {_REMEDY}")
    return name


def is_file(name: str) -> bool:
    """Whether an address has the form "file.py:function"."""
    path, _, function = name.rpartition(":")
    return path.endswith(".py") and function.isidentifier()


def _bound(statements: Iterable[ast.stmt]) -> Iterable[str]:
    """The names that a module's statements bind, "*" for an import of everything; function bodies are not entered."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in statement.names)
            case ast.Assign():
                yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
            case ast.If():
                yield from _bound([*statement.body, *statement.orelse])
            case ast.Try():
                yield from _bound([*statement.body, *statement.orelse, *statement.finalbody])
                yield from (name for handler in statement.handlers for name in _bound(handler.body))


def file_address(name: str) -> str:
    """`name`, of the form "file.py:function", with an absolute path; the file is parsed, not run.

    Raises:
      ValueError: it has another form, there is no such file, it isn't Python, or it defines no such function.
    """
    if not is_file(name):
        raise ValueError(f"a grade function of yours is named as file.py:function, which {name!r} is not.")
    path_name, _, function = name.rpartition(":")
    path = pathlib.Path(path_name).resolve()
    bound = list(_bound(user_code.parse(path, f"the grade function is {name!r}").body))
    if function not in bound and "*" not in bound:
        found = ", ".join(entry for entry in bound if "." not in entry) or "nothing"
        raise ValueError(f"the grade function is {name!r}, but {path} defines no {function!r} (it defines {found}).")
    return f"{path}:{function}"


def load(name: str) -> GradeFn:
    """The function of an address, after its module's `warm_up()` where there is one. For workers only."""
    place, _, qualname = name.rpartition(":")
    module = user_code.run(pathlib.Path(place)) if is_file(name) else importlib.import_module(place)
    grade_fn = functools.reduce(getattr, qualname.split("."), module)
    if not callable(grade_fn):
        raise TypeError(f"{name} is {grade_fn!r}, not a function of (response, answer)")
    with contextlib.suppress(ValueError):  # what is written in C may not say what it takes
        signature = inspect.signature(grade_fn)
        try:
            signature.bind("response", "answer")
        except TypeError as error:
            raise TypeError(f"{name} takes {signature}, and is called with (response, answer)") from error
    if hasattr(module, "warm_up"):
        module.warm_up()
    return grade_fn

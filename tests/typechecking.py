"""Execution of the package's annotations in tests: by beartype, with ints where floats are annotated (PEP 484).

jaxtyping's own decorator binds the arguments of each call and checks them twice: 24 of the 33 s of test_enumeration.py.
Here beartype checks the function itself, and only functions of arrays get a scope for the sizes of their axes. Of their
calls the first `CHECKED` in each test are checked. So are the first `MADE` functions that an inner `def` makes: each
costs 1.5 ms.
"""

import collections
import dataclasses
import functools
import inspect
import types
import typing
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

CHECKED = 8
MADE = 1
# By the identity of their code.
_made: collections.Counter[int] = collections.Counter()
_called: collections.Counter[int] = collections.Counter()

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
_scope = jaxtyping.jaxtyped


def _has_arrays(hint: Any) -> bool:
    return (inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)) or any(
        map(_has_arrays, typing.get_args(hint))
    )


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """Returns a hint without strings; Any where they name what is defined later, or in another package."""
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"": hint}), names, include_extras=True)[""]
    except NameError:
        return Any


def begin_test() -> None:
    """Begins to count again."""
    _made.clear()
    _called.clear()


def checked(function: Any) -> Any:
    """Decorator of each class of the package, and the innermost of each function."""
    if getattr(function, "__no_type_check__", False):
        return function
    if inspect.isclass(function):
        if dataclasses.is_dataclass(function) and not hasattr(function.__init__, "__wrapped__"):
            function.__init__ = checked(function.__init__)
        return function
    code = id(function.__code__)
    if "<locals>" in function.__qualname__:
        if _made[code] >= MADE or not function.__annotations__:
            return function
        _made[code] += 1
    hints = {name: _resolved(hint, function.__globals__) for name, hint in function.__annotations__.items()}
    function.__annotations__ = hints
    with_checks = typechecked(function)
    if not any(map(_has_arrays, hints.values())):
        return with_checks

    @functools.wraps(function)
    def scoped(*args: object, **kwargs: object) -> object:
        if _called[code] >= CHECKED:
            return function(*args, **kwargs)
        _called[code] += 1
        with _scope("context"):
            return with_checks(*args, **kwargs)

    return scoped


# The import hook of --jaxtyping-packages decorates with jaxtyping.jaxtyped(typechecker=...).
jaxtyping.jaxtyped = lambda typechecker: checked

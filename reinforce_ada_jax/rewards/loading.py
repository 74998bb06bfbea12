"""References to grade functions: "module:qualname" or "file.py:function", by which a worker process finds a function.

The parent makes and checks references; only workers load functions: a user's file could import jax, start threads, or
hang.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from reinforce_ada_jax import user_code
from reinforce_ada_jax.rewards import dialects
from reinforce_ada_jax.rewards.dialects import RewardFn

# A function of any signature that `dialects` knows; the first one is (response, answer) -> Verdict, number or bool.
GradeFn = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Made:
    """Grader that each worker makes for itself."""

    reference: str  # "module:function" of the function that returns the grader, which this process need not import
    settings: Mapping[str, Any]  # its keyword arguments, as JSON


_EXAMPLE = "a.py:f,b.py:g=0.5"
_REMEDY = "move it to the top level of a module that can be imported, or use workers=0."


def function_reference(grade_fn: GradeFn) -> str:
    """Returns the "module:qualname" under which a new interpreter finds `grade_fn`; ValueError if it can't."""
    module_name, qualname = getattr(grade_fn, "__module__", None), getattr(grade_fn, "__qualname__", None)
    if module_name is None or qualname is None:
        raise ValueError(f"grade_fn {grade_fn!r} has no name that a worker could import: {_REMEDY}")
    reference = f"{module_name}:{qualname}"
    if "<" in qualname:
        raise ValueError(
            f"grade_fn {reference} is a lambda or a local function, which a worker can't import: {_REMEDY}"
        )
    module = sys.modules.get(module_name)
    if module_name == "__main__" or module is None or module.__spec__ is None:
        raise ValueError(f"grade_fn {reference} is not in a module that a worker can import: {_REMEDY}")
    if functools.reduce(getattr, qualname.split("."), module) is not grade_fn:
        raise ValueError(
            f"{reference} names another object than grade_fn (a bound method, or a name defined twice): {_REMEDY}"
        )
    return reference


def _is_file(reference: str) -> bool:
    path, _, function = reference.rpartition(":")
    return path.endswith(".py") and function.isidentifier()


def file_reference(reference: str) -> str:
    """Returns "file.py:function" with an absolute path; the file is parsed, not run."""
    if not _is_file(reference):
        raise ValueError(f"a grade function in a file is named file.py:function, not {reference!r}.")
    path_name, _, function = reference.rpartition(":")
    path = pathlib.Path(path_name).resolve()
    user_code.check(path, f"the grade function is {reference!r}", function)
    return f"{path}:{function}"


def split(path: str) -> list[tuple[str, float]]:
    """Returns (reference, weight) of each function in `reward.path`: "a.py:f,b.py:g=0.5" has the weights 1 and 0.5."""
    entries = [re.fullmatch(r"(.+?)\s*(?:=([^:=]+))?", entry.strip()) for entry in path.split(",")]
    return [(entry[1], _weight(entry[2] or "1", entry[0])) for entry in entries if entry]


def _weight(text: str, entry: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(weight := float(text)):
            return weight
    raise ValueError(f"reward.path has the weight {text!r} in {entry!r}: it must be a finite number, as in {_EXAMPLE}.")


def files_hash(path: str) -> str:
    """Returns a hash of the files in `reward.path`, which every edit changes; "" for none."""
    texts = [pathlib.Path(reference.rpartition(":")[0]).read_bytes() for reference, _ in split(path)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16] if texts else ""


def judge_template(setting: str) -> str:
    """Returns the text of `judge.template`: the setting itself if it contains "{{", else the file that it names."""
    if not setting or "{{" in setting:
        return setting
    try:
        return pathlib.Path(setting).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"judge.template is {setting!r}, which can't be read ({error}): name a text file, or give the "
            "template itself, with {{ response }}."
        ) from None


def settings_hash(path: str, judge: str) -> str:
    """Returns a hash of the files in `reward.path`, or of `judge.template` if there are none; "" without both."""
    template = judge_template(judge)
    return files_hash(path) or (hashlib.sha256(template.encode()).hexdigest()[:16] if template else "")


def source_text(grade_fn: GradeFn) -> str:
    """Returns the source of a function, by which a resumed run recognises it; its name where Python has no source."""
    try:
        return inspect.getsource(grade_fn)
    except (OSError, TypeError):  # typed at the prompt of `python`, written in C, or a callable object
        return getattr(grade_fn, "__qualname__", type(grade_fn).__qualname__)


def load(reference: str, settings: Mapping[str, Any] | None = None) -> RewardFn:
    """Returns the function of a reference and calls `warm_up()` of its module, if it has one. For workers only.

    With `settings` the reference is the factory of `Made`. Raises TypeError if it is no function.
    """
    module_name, _, qualname = reference.rpartition(":")
    if _is_file(reference):
        module = user_code.run(pathlib.Path(module_name))
    else:
        module = importlib.import_module(module_name)
    grade_fn = functools.reduce(getattr, qualname.split("."), module)
    if not callable(grade_fn):
        raise TypeError(f"{reference} is {grade_fn!r}, not a function of (response, answer)")
    try:
        adapted = dialects.adapt(grade_fn) if settings is None else grade_fn(**settings)
    except TypeError as error:
        raise TypeError(f"{reference} {error}") from error
    if hasattr(module, "warm_up"):
        module.warm_up()
    return adapted

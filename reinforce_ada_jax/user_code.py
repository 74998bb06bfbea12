"""A user's own Python file, named as "file.py:function": parsed and run.

`collection.strategy`, `reward.path` and `environment.path` name such files. They are trusted (docs/security.md). The
caller checks the function or class itself.
"""

import ast
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
import warnings
import zlib
from collections.abc import Iterable


def parse(path: pathlib.Path, setting: str) -> ast.Module:
    """Returns the file's syntax tree, without running it.

    Args:
      path: the file.
      setting: beginning of an error message: "collection.strategy is 'mine.py:triple'".

    Raises:
      ValueError: the file does not exist, its name doesn't end in .py, or it is not valid Python.
    """
    if not path.is_file():
        raise ValueError(f"{setting}, but there is no file {str(path)!r}.")
    if path.suffix != ".py":
        raise ValueError(f"{setting}, but {str(path)!r} is no Python file: its name must end in .py.")
    try:
        with warnings.catch_warnings(action="ignore"):  # `run` shows them
            tree = ast.parse(path.read_bytes(), filename=str(path))
            compile(tree, str(path), "exec", dont_inherit=True)  # finds more than parsing: a return outside a function
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ValueError(f"{setting}, but {path} is not valid Python: {error}.") from error
    return tree


def bound(statements: Iterable[ast.stmt]) -> Iterable[str]:
    """Yields the names that a module's statements bind, "*" for an import of everything, without function bodies."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in statement.names)
            case ast.Assign():
                names = (each for target in statement.targets for each in ast.walk(target))
                yield from (each.id for each in names if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                yield name
            case ast.If() | ast.For() | ast.While():
                yield from bound([*statement.body, *statement.orelse])
            case ast.With():
                yield from bound(statement.body)
            case ast.Try() | ast.TryStar():
                yield from bound([*statement.body, *statement.orelse, *statement.finalbody])
                yield from (name for handler in statement.handlers for name in bound(handler.body))


class _WithoutBytecode(importlib.machinery.SourceFileLoader):
    """A loader that leaves no `__pycache__` in the user's folder."""

    def set_data(self, path, data, *, _mode=0o666):
        """Writes nothing."""


def run(path: pathlib.Path) -> types.ModuleType:
    """Runs a file as a module, at every call again; it may import files in its folder, as a script may.

    The module's name is unique, so it never replaces a module that has the file's name; it is registered while the
    file runs, which dataclasses need.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that files there hide no module either
    name = f"{path.stem.replace('.', '_')}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_WithoutBytecode(name, str(path)))
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

"""A user's own Python file, named as "file.py:function": read and checked, and run.

`collection.strategy` and `reward.path` name such files. They are trusted (docs/security.md). What such a function must
be, whoever asks for it says.
"""

import ast
import importlib.util
import pathlib
import sys
import types
import warnings
import zlib


def parse(path: pathlib.Path, named: str) -> ast.Module:
    """The file's syntax tree; nothing of it is run.

    Args:
      path: the file.
      named: who named it, for errors: "collection.strategy is 'mine.py:triple'".

    Raises:
      ValueError: there is no such file, its name doesn't end in .py, or it isn't Python.
    """
    if not path.is_file():
        raise ValueError(f"{named}, but there is no file {str(path)!r}.")
    if path.suffix != ".py":
        raise ValueError(f"{named}, but {str(path)!r} is no Python file: its name must end in .py.")
    try:
        with warnings.catch_warnings(action="ignore"):  # shown when it is run
            tree = ast.parse(path.read_bytes(), filename=str(path))
            compile(tree, str(path), "exec", dont_inherit=True)  # finds what parsing doesn't: a return in no function
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ValueError(f"{named}, but {path} is not valid Python: {error}.") from error
    return tree


def run(path: pathlib.Path) -> types.ModuleType:
    """Runs a file as a module, anew each time. It may import what lies beside it, as a script may.

    Its name is its own, so it never stands in the place of a module that is called as the file is; and it is known by
    it while it runs, which dataclasses ask for.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: what lies there hides no module either
    name = f"{path.stem.replace('.', '_')}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

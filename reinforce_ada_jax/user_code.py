"""A user's own Python file, named as "file.py:function": checked and run.

`collection.strategy`, `collection.selection`, `learning.loss`, `reward.path` and `environment.path` name such files,
and --config may. They are trusted (docs/security.md). The caller checks the results of the function or class.
"""

import codecs
import contextlib
import functools
import importlib.machinery
import importlib.util
import pathlib
import re
import signal
import symtable
import sys
import threading
import traceback
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

NOTE_AFTER_S = 10.0


class UserCodeError(ValueError):
    """A user's file failed, or returned what it must not. The message names the file and the line."""


class ExitedAtOnce(SystemExit):
    """`os._exit` was called. `cli` replaces it, because it would end the process without a message or a save."""


def check(path: pathlib.Path, setting: str, name: str) -> None:
    """Checks that a file defines a function or class, without running the file.

    `setting` begins the error message: "collection.strategy is 'mine.py:triple'". If the file has `import *`, any name
    is accepted.

    Raises:
      ValueError: there is no such file, it is no valid Python file (.py), or it defines no such name.
    """
    if not path.is_file():
        raise ValueError(f"{setting}, but there is no file {str(path)!r}.")
    if path.suffix != ".py":
        raise ValueError(f"{setting}, but {str(path)!r} is no Python file: its name must end in .py.")
    try:
        source = importlib.util.decode_source(path.read_bytes())
        with warnings.catch_warnings(action="ignore"):  # `run` shows them
            compile(source, str(path), "exec", dont_inherit=True)
            symbols = symtable.symtable(source, str(path), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, or not UTF-8
        is_utf16 = path.read_bytes().startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        not_utf8 = isinstance(error, UnicodeDecodeError) or "missing encoding declaration" in str(error)
        why, remedy = "the file is UTF-16" if is_utf16 else error, ". Save it as UTF-8" * (is_utf16 or not_utf8)
        raise ValueError(f"{setting}, but {path} is not valid Python: {why}{remedy}.") from error
    defined = [symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
    if name not in defined and not re.search(r"import\s*\*", source):
        raise ValueError(f"{setting}, but {path} defines no {name!r} (it defines {', '.join(defined) or 'nothing'}).")


class _WithoutBytecode(importlib.machinery.SourceFileLoader):
    """A loader that leaves no `__pycache__` in the user's folder."""

    def set_data(self, path, data, *, _mode=0o666):
        """Writes nothing."""


def let_import_beside(path: pathlib.Path) -> None:
    """Lets a file import the files in its folder, as a script may."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that files there hide no module either


def run(path: pathlib.Path) -> types.ModuleType:
    """Runs a file as a module, again at every call; like a script it may import files in its folder.

    The module's name is unique, so it never replaces a module that has the file's name; it is registered while the
    file runs, which dataclasses need.
    """
    path = path.resolve()
    let_import_beside(path)
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


@contextlib.contextmanager
def failures(path: pathlib.Path, setting: str, place: str = "") -> Iterator[None]:
    """Raises errors of a user's file as UserCodeError: one line that begins with `setting` and has the line number.

    `place` ends the message where no line of the file ran, because a call had other arguments than its function takes.

    `sys.exit()` is such an error, and so is KeyboardInterrupt unless Ctrl-C raises it. If the file runs for
    `NOTE_AFTER_S` seconds, a note on stderr names it, because only Ctrl-C ends a loop in it.
    """
    note = threading.Timer(NOTE_AFTER_S, _say_that_it_runs, (path, setting, threading.get_ident()))
    note.daemon = True
    note.start()
    try:
        yield
    except BaseException as raised:
        _raise(raised, path, setting, place)
    finally:
        note.cancel()
        note.join()  # the caller may fork


def _raise(raised: BaseException, path: pathlib.Path, setting: str, place: str) -> NoReturn:
    """Raises an error of a user's file with its line number; Ctrl-C and UserCodeError stay as they are."""
    error, frames = raised, _frames(raised, path)
    if isinstance(raised, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        if frames:  # where it hung
            print(f"note: {path} was running, line {frames[-1].lineno}", file=sys.stderr)
        raise raised
    if isinstance(raised, UserCodeError | GeneratorExit):
        raise raised
    while not frames and (inner := error.__cause__ or error.__context__) is not None:
        error, frames = inner, _frames(inner, path)  # a library raised it again with a text of its own
    error = error if frames else raised
    where = f" ({path}, line {frames[-1].lineno})" if frames else place
    what = f"{type(error).__name__}: {error}".partition("\n")[0] if frames else str(error)
    if isinstance(error, SystemExit):
        what = f"it called {call_of(error)}, and must not end the command"
    raise UserCodeError(f"{setting}, which failed: {what}{where}") from raised


def call_of(end: SystemExit) -> str:
    """Returns the call that would end the process: "sys.exit(3)"."""
    return f"os._exit({end.code!r})" if isinstance(end, ExitedAtOnce) else f"sys.exit({end.code!r})"


def named(function: Callable[..., Any], path: pathlib.Path, setting: str) -> Callable[..., Any]:
    """Returns a function of a user's file whose errors are raised as `failures` does, for calls within a run.

    There is no note after `NOTE_AFTER_S`: it needs a thread, and a run calls such functions for each prompt.
    """

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except BaseException as raised:
            _raise(raised, path, setting, place)

    code = getattr(getattr(function, "func", function), "__code__", None)  # of a partial: of its function
    if isinstance(function, type):
        code = getattr(function.__init__, "__code__", None)
    line = f", line {code.co_firstlineno}" if code and code.co_filename == str(path.resolve()) else ""
    place = f" ({path}{line})"
    called.__dict__["place"] = setting, place
    return called


def wrong(function: Any, message: str) -> ValueError:
    """Returns an error about a function's result; for a function from `named` with setting, file and line.

    `message` may begin with the setting.
    """
    if not hasattr(function, "place"):
        return ValueError(message)
    setting, end = function.place
    begin = "" if message.startswith(setting) else f"{setting}: "
    return UserCodeError(f"{begin}{message.removesuffix('.')}{end}")


def _say_that_it_runs(path: pathlib.Path, setting: str, thread: int) -> None:
    """Prints that a file is running in a thread, and its present line."""
    frames = traceback.extract_stack(sys._current_frames().get(thread))
    lines = [each.lineno for each in frames if each.filename == str(path.resolve())]
    if lines:
        text = f"note: {path} has been running for {NOTE_AFTER_S:g} s, now at line {lines[-1]} ({setting})."
        print(f"{text} Ctrl-C ends the command.", file=sys.stderr, flush=True)


def _frames(error: BaseException, path: pathlib.Path) -> list[traceback.FrameSummary]:
    """Returns the frames of an error's stack trace that are in a file."""
    return [each for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path.resolve())]


def load(reference: str, setting: str) -> Callable[..., Any]:
    """Returns the function or class that "file.py:name" names; runs the file. `setting` is as for `check`.

    Raises:
      ValueError: the file is missing or not valid Python, fails when it runs, or defines no such function.
    """
    path_name, _, name = reference.rpartition(":")
    path = pathlib.Path(path_name)
    check(path, setting, name)
    with failures(path, setting):
        module = run(path)
    if not hasattr(module, name):  # `check` can't see what `import *` brings
        raise ValueError(f"{setting}, but {path} defines no {name!r}.")
    if not callable(function := getattr(module, name)):
        raise ValueError(f"{setting}, which is {function!r}; it must be a function or a class.")

    checked = named(function, path, setting)
    _, place = checked.__dict__["place"]

    @functools.wraps(checked)  # also its place
    def called(*arguments: Any) -> Any:
        with failures(path, setting, place):
            return function(*arguments)

    return called

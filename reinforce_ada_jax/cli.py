"""Start of a command: flags, help, and errors in the user's input as one line without a stack trace."""

import contextlib
import difflib
import errno
import functools
import gc
import itertools
import os
import pathlib
import re
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from reinforce_ada_jax import user_code
from reinforce_ada_jax.config import Config, aliases, config_files, nearest, reference, resolve, settings, with_tuples
from reinforce_ada_jax.files.buckets import BucketError

# Exit codes: the run stopped itself; the user's input is wrong; the run was interrupted and can be resumed. Another is
# distributed.watchdog.RESTART: the machine is taken away, or another process of the run is gone; start it again.
STOPPED, BAD_INPUT, INTERRUPTED = 1, 2, 130

# Functions that define a flag, by the type of its value.
DEFINE = {
    bool: flags.DEFINE_bool, int: flags.DEFINE_integer, int | None: flags.DEFINE_integer, float: flags.DEFINE_float,
    float | None: flags.DEFINE_float, str: flags.DEFINE_string, str | None: flags.DEFINE_string,
    Sequence[str] | None: flags.DEFINE_list,
}  # fmt: skip

# Errors of a path that every start of the command would meet again.
_FOR_GOOD = frozenset({
    errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR,
    errno.ENOTEMPTY, errno.EPERM, errno.EROFS, errno.EXDEV,
})  # fmt: skip
# Errors of a disk; they often name no file.
_OF_DISKS = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.ESTALE})


_PACKAGE = os.path.dirname(__file__) + os.sep

# Flags that are paths. An empty value, for example of a variable that is not set, would choose a default.
PATHS = {"benchmarks", "histogram", "initial", "input", "model", "output", "workdir"}

# Flags by their heading in `--help`; all others are left out. Empty: all flags under one heading.
Groups = Mapping[str, Collection[str]]


class _WrongConfigError(KeyError):
    pass


def _wrong_key(config: Any, key: str) -> str:
    """Returns what is wrong and what to do if a ConfigDict has no setting with this dotted key; "" if it has one."""
    section, place = config, ""
    for name in key.split("."):
        if not isinstance(section, ConfigDict):
            return f"--config.{key}: {place[:-1]} is a setting, and has no keys of its own."
        if name not in section:
            near = [repr(setting) for setting in nearest.meant(key)]
            where, page = (f"the section {place[:-1]}", f"={place[:-1]}") if place else ("a configuration", "")
            keys = f"{where} has {', '.join(section.keys())}. --help{page} describes them."
            remedy = aliases.hint(key) or (f"did you mean {' or '.join(near)}?" if near else keys)
            return f"unknown configuration key {key!r}: {remedy}"
        section, place = section[name], f"{place}{name}."
    if isinstance(section, ConfigDict):
        return f"--config.{key} is a section: set one of its keys. --help={key} describes them."
    return ""


def _plain(message: str) -> str:
    """Returns the message of `user_code.failures` on a configuration file, without the terms of ml_collections."""
    setting, _, rest = message.partition(", which failed: ")
    where = re.search(r"( \([^()]+, line \d+\))?$", rest)
    place = where[0] if where else ""
    nearest = re.search(r'Did you mean "(.+?)" instead of "(.+?)"', rest)
    unknown = re.match(r"AttributeError: .*?(?:Key \"(\w+)\" does not exist|'(\w+)')", rest)
    wrong = re.match(r"TypeError: Could not override field '(\w+)'.*?\. (.*) is of original type <class '(\w+)'>", rest)
    if nearest or unknown:
        key = nearest[2] if nearest else (unknown[1] or unknown[2] if unknown else "")
        remedy = aliases.hint(key) or (f"did you mean {nearest[1]!r}?" if nearest else "--help=all lists the keys.")
        return f"{setting}: unknown configuration key {key!r}{place}: {remedy}"
    if wrong:
        return f"{setting}: {wrong[1]} cannot be {wrong[2]!r:.80}, which is of the type {wrong[3]}{place}."
    return f"{message}."


class _ConfigParser(config_flags.ConfigFileFlagParser):
    def parse(self, path: str) -> Any:
        file = config_files.config_file(path)
        source, setting = pathlib.Path(file.partition(":")[0]), f"--config is {path!r}"
        try:
            user_code.check(source, setting, "get_config")
        except ValueError as error:  # absl would put the flag in front of its text
            raise _WrongConfigError(f"{error} Name a file such as configs/tiny.py.") from error
        try:
            user_code.let_import_beside(source)
            with _ends_are_said(), user_code.failures(source, setting):
                config = super().parse(file)
        except ValueError as error:
            raise _WrongConfigError(_plain(str(error))) from error
        if config is None or isinstance(config, dict):
            raise _WrongConfigError(f"get_config() of {file} returned {config!r:.40}, and no configuration.")
        overrides = [re.match(r"--?config\.([^=]+)", argument) for argument in sys.argv[1:]]
        if wrong := [text for override in overrides if override and (text := _wrong_key(config, override[1]))]:
            raise _WrongConfigError("\n".join(dict.fromkeys(wrong)))
        return config


def config_flag(values: flags.FlagValues, text: str, default: str | None = None) -> flags.FlagHolder[ConfigDict]:
    """Defines the flag --config=NAME or FILE.py, whose settings are flags too: --config.collection.strategy=grpo."""
    holder = config_flags.DEFINE_config_file("config", default, text, flag_values=values)
    values["config"].parser = _ConfigParser("config")
    return holder


def define_config() -> flags.FlagHolder[ConfigDict]:
    text = (
        "A packaged configuration, such as tiny, or a file with get_config(), such as configs/tiny.py; override with "
        "--config.SECTION.KEY=VALUE."
    )
    holder = config_flag(flags.FLAGS, text)
    flags.mark_flag_as_required("config")
    return holder


def resolved(holder: flags.FlagHolder[ConfigDict]) -> Config:
    """Returns the typed configuration of the flag; an error in it ends the process with one message."""
    with user_input():
        return resolve(holder.value)


def fail(message: object, code: int = BAD_INPUT, *, at_once: bool = False) -> NoReturn:
    """Ends the process with one message; control characters in it, for example from a file's name, are escaped.

    With `at_once` the process does not wait for its threads, which may be compiling.
    """
    text = "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in str(message))
    print(f"error: {text}", file=sys.stderr)
    if at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextlib.contextmanager
def user_input() -> Iterator[None]:
    """Ends the process with one line for a ValueError in the user's input, or an OSError about a file or a folder."""
    try:
        with _storage_errors():
            yield
    except ValueError as error:
        fail(error)
    except OSError as error:
        if error.filename is None:
            raise
        if error.errno in _FOR_GOOD:
            fail(f"{_text(error)}: name another path, or fix the file there or its permissions.")
        _fail_of_disk(error)


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Ends the process with one line for an error of a bucket or a disk."""
    try:
        yield
    except BucketError as error:
        fail(f"{error}. Run the same command again when the server answers.", STOPPED)
    except OSError as error:
        if error.errno not in _OF_DISKS:
            raise
        _fail_of_disk(error)


def _fail_of_disk(error: OSError) -> NoReturn:
    # This may succeed later: launch/ starts a run again that ended with STOPPED, but not with BAD_INPUT.
    fail(f"{_text(error)}. Fix this (on a full disk, free space), then run the same command.", STOPPED)


def _text(error: OSError) -> str:
    """Returns the text of an error without its number: "Not a directory: 'a/b'"."""
    names = " -> ".join(repr(str(name)) for name in (error.filename, error.filename2) if name is not None)
    return f"{error.strerror}: {names}" if names else str(error.strerror)


@contextlib.contextmanager
def interruptible(saved: str) -> Iterator[None]:
    """Ends the process at Ctrl-C, and says that the results so far are kept and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted. {saved}; the same command again goes on from there.", INTERRUPTED)


@contextlib.contextmanager
def _ends_are_said() -> Iterator[None]:
    """Names the file outside of this package that ended the process with `sys.exit` or `os._exit`.

    Without this message, an exit with code 0 would look as if the command had finished. `os._exit` is replaced in this
    process, but not in its forks: in the main thread it raises an error like that of `sys.exit`, so that a run can save
    its state.
    """
    leave, process, modules = os._exit, os.getpid(), (os, sys.modules[os.name])  # os.name: "posix"

    def said(file: str, line: int | None, call: str) -> str:
        return (
            f"{file}, line {line}, ended the command with {call} before it had finished. Remove the call; then the "
            "same command starts again from what is saved."
        )

    def exit_at_once(status: int) -> NoReturn:
        caller = sys._getframe(1)
        file = caller.f_code.co_filename
        if os.getpid() == process and not file.startswith(_PACKAGE):
            end = user_code.ExitedAtOnce(status)
            if threading.current_thread() is threading.main_thread():
                raise end
            print(f"error: {said(file, caller.f_lineno, user_code.call_of(end))}", file=sys.stderr, flush=True)
            status = status or STOPPED
        leave(status)

    for module in modules:
        module.__dict__["_exit"] = exit_at_once
    try:
        yield
    except SystemExit as end:
        frames = traceback.extract_tb(end.__traceback__)
        # Frames of `exit()`, and of the function above that replaces `os._exit`.
        hidden = ("<frozen", __file__) if isinstance(end, user_code.ExitedAtOnce) else ("<frozen",)
        place = next(each for each in reversed(frames) if not each.filename.startswith(hidden))
        if place.filename.startswith(_PACKAGE):
            raise
        code = end.code if isinstance(end.code, int) and end.code else STOPPED
        fail(said(place.filename, place.lineno, user_code.call_of(end)), code)
    finally:
        for module in modules:
            module.__dict__["_exit"] = leave


def _own_flags() -> dict[str, flags.Flag]:
    """Returns the flags of the command by name, without those of libraries."""
    package = sys.modules["__main__"].__package__ or "reinforce_ada_jax"
    ours = ("reinforce_ada_jax", package.partition(".")[0], sys.argv[0])
    return {
        flag.name: flag
        for module, members in flags.FLAGS.flags_by_module_dict().items()
        for flag in members
        if module.startswith(ours) or flag.name == "config"
    }


def _flags_text(groups: Groups) -> str:
    """Returns the flags of the command with their defaults, by groups."""
    found, lines = _own_flags(), []
    for heading, names in (groups or {"Flags": found}).items():
        lines.append(f"\n{heading}:")
        for name in sorted(found.keys() & names):
            flag = found[name]
            if flag.boolean:
                lines.append(f"  --[no]{name}")
            else:
                default = (flag.default_as_str or "").strip("'") if name != "config" else ""
                lines.append(f"  --{name}={default or 'VALUE'}")
            text = (flag.help or "").partition(";\n")[0]  # after it absl says that a flag may be repeated
            lines += textwrap.wrap(text, 112, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _show_help(section: str, groups: Groups) -> NoReturn:
    """Prints what the command does, its flags and the settings that most runs change; or the settings of one section.

    A command with its own groups of flags is no run: it shows only the names of the sections.
    """
    if section:
        with user_input():
            text = reference.help_text(section)
    else:
        text = f"{(sys.modules['__main__'].__doc__ or '').strip()}\n{_flags_text(groups)}"
        if "config" in flags.FLAGS:
            common = "" if groups else f"\n\nSettings that most runs change:\n{reference.common()}"
            text += f"{common}\n\nSections with all settings:\n{reference.overview()}\n"
            text += f"\n--help=SECTION describes the settings of a section, --help={reference.ALL} those of every one."
    try:
        print(text, flush=True)
    except BrokenPipeError:  # --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _wrong_type(message: str) -> str:
    """Returns which values a flag takes, for absl's message on a value of another type; "" for other messages."""
    if several := re.fullmatch(r"(?s)flag --([\w.]+)=(.*?): Error while parsing string: .* as tuple\..*", message):
        return f"--{several[1]} is {several[2]!r}; several values are written as --{several[1]}=A,B."
    found = re.fullmatch(r"flag --([\w.]+)=(.*?): .*(string to float|literal for int|Non-boolean).*", message)
    if not found:
        return ""
    name, value, problem = found.groups()
    expected = {"string to float": "a number", "literal for int": "a whole number"}.get(problem, "True or False")
    default = flags.FLAGS[name].default if name in flags.FLAGS else None
    example = " (None, its default: leave the flag out)" if value.lower() == "none" else ""
    example = example if default is None else f", such as {default}"
    section = re.fullmatch(r"config\.(\w+)\.\w+", name)
    described = f" --help={section[1]} describes it." if section else ""
    return f"--{name} is {value!r}; it must be {expected}{example}.{described}"


def _proposal(flag: str) -> str:
    """Returns the rest of a sentence on an unknown flag: which flag or setting it may mean."""
    near = [repr(name) for name in difflib.get_close_matches(flag, _own_flags(), 1)]
    if not near and "config" in flags.FLAGS:
        near = [f"--config.{setting}" for setting in nearest.meant(flag)]
        if not near and (other := aliases.hint(flag)):
            return f": {other}"
    return f": did you mean {' or '.join(near)}?" if near else "."


def _missing(message: str, argv: Sequence[str]) -> str:
    """Returns which flags lack a value, for absl's message on required flags; "" for other messages."""
    names = re.findall(r"Flag --([\w.]+) must have a value other than None", message)
    if not names:
        return ""
    # A word after a flag without "=" may be the flag's value.
    pairs = itertools.pairwise(["", *argv[1:]])
    stray = [word for before, word in pairs if not before.startswith("-") and not word.startswith("-")]
    text = f"{' and '.join(f'--{name}' for name in names)} must have a value"
    if stray:
        return f"{text}, and {stray[0]!r} belongs to no flag: options are written --name=value."
    return f"{text}. --help describes the flags."


def _check_paths() -> None:
    for name in PATHS & {*flags.FLAGS}:
        if flags.FLAGS[name].present and not flags.FLAGS[name].value:
            fail(f"--{name} is empty: give it a path.")


def _parse(argv: list[str], groups: Groups) -> list[str]:
    for argument in argv[1:]:
        asked = re.fullmatch(r"-h|--?help(?:full)?(?:=(\w*))?", argument)
        if asked:
            _show_help(asked[1] or "", groups)
    home = os.path.expanduser("~")  # shells replace ~ only at the start of a word
    argv[1:] = [re.sub(r"^(--?[\w.]+=)~(?=/)", lambda found: found[1] + home, argument) for argument in argv[1:]]
    if "config" in flags.FLAGS:
        with user_input():
            arguments, notes = aliases.translate(argv[1:])
            arguments = with_tuples(arguments)
        # In place, because `argv` is sys.argv, which ml_collections reads. It needs --config before changed settings.
        argv[1:] = sorted(arguments, key=lambda argument: not re.match("--?config=", argument))
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a user's folder gets no __pycache__
    try:
        arguments = flags.FLAGS(argv)
        # If a file could not be read, the first use of its configuration raises the error.
        if "config" in flags.FLAGS and flags.FLAGS.config is not None:
            flags.FLAGS.config.lock()
    except flags.Error as error:
        # If a config file fails, ml_collections puts the whole stack trace between the first and the last line.
        lines = str(error).strip().splitlines()
        if isinstance(error, flags.UnrecognizedFlagError):  # absl proposes flags of libraries
            fail(f"Unknown command line flag {error.flagname!r}{_proposal(error.flagname)} --help describes the flags.")
        fail(_missing(str(error), argv) or _wrong_type(lines[-1]) or " ".join(dict.fromkeys((lines[0], lines[-1]))))
    except _WrongConfigError as error:
        fail(error.args[0])
    finally:
        sys.dont_write_bytecode = writes_bytecode
    _check_paths()
    return arguments


def run_with_arguments(main: Callable[[list[str]], None], groups: Groups | None = None) -> None:
    """Parses the flags and calls `main` with the other arguments; `groups` orders the flags in `--help`."""

    def start(argv: list[str]) -> None:
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):  # a job in the background ignores it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.set_verbosity(logging.WARNING)
        try:
            with _ends_are_said(), _storage_errors():
                main(argv[1:])
        except KeyboardInterrupt:
            fail("interrupted. The same command starts again from what is saved.", INTERRUPTED)
        finally:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # the interpreter's end would show a stack trace
            gc.freeze()  # else Python visits all objects of JAX's modules at its end: half a second of the processor

    logging.set_verbosity(logging.ERROR)  # ml_collections warns before it raises an error that says more
    app.run(start, flags_parser=functools.partial(_parse, groups=groups or {}))


def run(main: Callable[[], None], groups: Groups | None = None) -> None:
    """Parses the flags and calls `main`; other arguments are refused. `groups` orders the flags in `--help`."""

    def without_arguments(arguments: list[str]) -> None:
        if arguments:
            name = arguments[0].partition("=")[0]
            if name != arguments[0] and (aliases.find(name) or name in dict(settings())):  # the form of Hydra
                fail(f"unexpected argument {arguments[0]!r}: settings are written --config.{arguments[0]}.")
            fail(f"unexpected argument {arguments[0]!r}: options are written --name=value.")
        main()

    run_with_arguments(without_arguments, groups)

"""Start of a command: flags, and errors in the user's input as one line without a stack trace."""

import contextlib
import errno
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from absl import app, flags, logging
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

Converted = TypeVar("Converted")
# Exit codes: the run stopped itself; the user's input is wrong; the run was interrupted and can be resumed. One more is
# distributed.watchdog.RESTART: the machine is taken away, or another process of the run is gone; start it again.
STOPPED, BAD_INPUT, INTERRUPTED = 1, 2, 130

# Errors of a path that come again however often the command is started;
_FOR_GOOD = frozenset({
    errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR,
    errno.ENOTEMPTY, errno.EPERM, errno.EROFS, errno.EXDEV,
})  # fmt: skip
# and errors of a disk, often without a name.
_OF_DISKS = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.ESTALE})


def packaged_configs() -> dict[str, pathlib.Path]:
    """Returns the files of the packaged configurations by name.

    An installed package has the folder configs/ inside, the repository has it beside the package.
    """
    package = pathlib.Path(__file__).parent
    inside = package / "configs"
    folder = inside if inside.is_dir() else package.parent / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def config_file(name: str) -> str:
    """Returns the configuration file that a name means: a path itself, "tiny" the packaged file tiny.py.

    Raises:
      ValueError: the name is no path, and no packaged configuration has it.
    """
    if "/" in name or ".py" in name:
        return name
    packaged = packaged_configs()
    if name not in packaged:
        raise ValueError(
            f"there is no packaged configuration {name!r}: name one of {', '.join(packaged)}, "
            "or a file such as configs/tiny.py."
        )
    return str(packaged[name])


class _ConfigParser(config_flags.ConfigFileFlagParser):
    def parse(self, path: str) -> Any:
        return super().parse(config_file(path))


def config_flag(values: flags.FlagValues, text: str, default: str | None = None) -> flags.FlagHolder[ConfigDict]:
    """Defines the flag --config=NAME or FILE.py, whose settings are flags too: --config.collection.strategy=grpo."""
    holder = config_flags.DEFINE_config_file("config", default, text, flag_values=values)
    values["config"].parser = _ConfigParser("config")
    return holder


def define_config(settings: str = "") -> flags.FlagHolder[ConfigDict]:
    """Defines the required flag --config of a command.

    Args:
      settings: description of the settings for --help (`config.reference.help_text`).
    """
    text = (
        "A packaged configuration, such as tiny, or a file with get_config(), such as configs/tiny.py; override with "
        "--config.SECTION.KEY=VALUE."
    )
    holder = config_flag(flags.FLAGS, f"{text}\n\n{settings}")
    flags.mark_flag_as_required("config")
    return holder


def converted(holder: flags.FlagHolder[ConfigDict], convert: Callable[[ConfigDict], Converted]) -> Converted:
    """Returns the configuration as `convert` makes it; an error in it ends the process with one message."""
    with user_input():
        return convert(holder.value)


def fail(message: object, code: int = BAD_INPUT) -> NoReturn:
    """Ends the process with one message."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


@contextlib.contextmanager
def user_input() -> Iterator[None]:
    """Ends the process with one line for a ValueError in the user's input, or an OSError about a file or a folder.

    Any other error passes.
    """
    try:
        yield
    except ValueError as error:
        fail(error)
    except OSError as error:
        if error.filename is not None and error.errno in _FOR_GOOD:
            fail(f"{_text(error)}: name another path, or fix the file there or its permissions.")
        if error.filename is not None or error.errno in _OF_DISKS:
            # This may succeed later: launch/ starts a run again that ended with STOPPED, but not with BAD_INPUT.
            fail(f"{_text(error)}. Fix this (on a full disk, free space), then run the same command.", STOPPED)
        raise


def _text(error: OSError) -> str:
    """Returns the text of an error without its number: "Not a directory: 'a/b'"."""
    names = " -> ".join(repr(str(name)) for name in (error.filename, error.filename2) if name is not None)
    return f"{error.strerror}: {names}" if names else str(error.strerror)


@contextlib.contextmanager
def interruptible(kept: str) -> Iterator[None]:
    """Ends the process at Ctrl-C, and says that the results so far are kept and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted. {kept}; the same command again goes on from there.", INTERRUPTED)


def _show_help() -> NoReturn:
    """Prints what the command does, its flags, and the settings that --config has."""
    print(sys.modules["__main__"].__doc__)
    print(flags.FLAGS.main_module_help())
    if "config" in flags.FLAGS:
        print(f"\n  --config: {flags.FLAGS['config'].help}")
    sys.exit(0)


def _parse(argv: list[str]) -> list[str]:
    if {"-h", "-help", "--help"} & {*argv[1:]}:
        _show_help()
    try:
        arguments = flags.FLAGS(argv)
        # A file that could not be read shows when its configuration is first touched.
        if "config" in flags.FLAGS and flags.FLAGS.config is not None:
            flags.FLAGS.config.lock()
    except flags.Error as error:
        # Where a config file fails, ml_collections puts the whole stack trace in between.
        lines = str(error).strip().splitlines()
        fail(" ".join(dict.fromkeys((lines[0], lines[-1]))))
    except (AttributeError, KeyError) as error:
        # ml_collections names the nearest known key, in quotes within quotes.
        nearest = re.search(r'Did you mean "(.+?)" instead of "(.+?)"', str(error))
        if nearest:
            fail(f"unknown configuration key {nearest[2]!r}: did you mean {nearest[1]!r}?")
        fail(f"--config: {error}. reinforce_ada_jax/config/settings.py lists every key.")
    except (OSError, SyntaxError, TypeError) as error:
        fail(f"--config: {str(error).splitlines()[-1].strip()}. Name a file such as configs/tiny.py.")
    return arguments


def run_with_arguments(main: Callable[[list[str]], None]) -> None:
    """Parses the flags and calls `main` with the other arguments."""
    logging.set_verbosity(logging.WARNING)
    app.run(lambda argv: main(argv[1:]), flags_parser=_parse)


def run(main: Callable[[], None]) -> None:
    """Parses the flags and calls `main`; other arguments are refused."""

    def without_arguments(arguments: list[str]) -> None:
        if arguments:
            fail(f"unexpected argument {arguments[0]!r}: options are written --name=value.")
        main()

    run_with_arguments(without_arguments)

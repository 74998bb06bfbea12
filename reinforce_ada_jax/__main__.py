"""The list of commands, and the start of one of them.

    python -m reinforce_ada_jax
    python -m reinforce_ada_jax train --config=configs/tiny.py --workdir=runs/tiny

`python -m reinforce_ada_jax NAME` runs the module `reinforce_ada_jax.NAME`, as `python -m reinforce_ada_jax.NAME` does.
"""

import ast
import difflib
import importlib.metadata
import pathlib
import platform
import runpy
import sys
from collections.abc import Sequence

PACKAGE = "reinforce_ada_jax"
COMMANDS = ("train", "sft", "prepare", "evaluate", "export", "serve", "plot", "simulate", "compile_check", "benchmark")
BAD_INPUT = 2  # cli.BAD_INPUT; this module imports nothing that takes time


def summary(command: str) -> str:
    """Returns the first line of a command's docstring, read without an import."""
    source = pathlib.Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def overview() -> str:
    """Returns the list of commands, one line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {command:<{width}}  {summary(command)}" for command in COMMANDS]
    program = pathlib.Path(sys.argv[0]).name
    program = f"python -m {PACKAGE}" if program == pathlib.Path(__file__).name else program
    usage = f"Usage: {program} COMMAND [--FLAG=VALUE ...]"
    return "\n".join(
        [usage, "", *lines, "", "COMMAND --help describes a command and lists its flags; --version names this version."]
    )


def versions() -> str:
    """Returns the versions that a report of a fault needs, on one line."""
    jax = importlib.metadata.version("jax")  # its import would take a second
    return f"{PACKAGE} {sys.modules[PACKAGE].__version__}, Python {platform.python_version()}, jax {jax}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names, with the other arguments; without any, lists the commands.

    `argv` has the arguments without the program; None: those of the process.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "-help", "--help", "help"):
        print(overview())
        return
    if name in ("-V", "-version", "--version", "version"):
        print(versions())
        return
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        remedy = f"did you mean {nearest[0]!r}?" if nearest else f"name one of {', '.join(COMMANDS)}."
        print(f"error: there is no command {name!r}: {remedy}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    sys.argv = [name, *rest]
    runpy.run_module(f"{PACKAGE}.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

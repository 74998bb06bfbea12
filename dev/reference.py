"""Writes what the code makes of docs: reference/commands.md, exit_codes.md, functions.md, tables, and line numbers.

    .venv/bin/python dev/reference.py            # writes them
    .venv/bin/python dev/reference.py --check    # fails where a page differs from the code

docs/settings.md is made by `python -m reinforce_ada_jax.config.reference`.
"""

import ast
import contextlib
import importlib
import io
import json
import os
import pathlib
import re
import runpy
import sys
import tempfile
import tomllib
import warnings

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
NOTE = "This page is made from the code by `python dev/reference.py`.\n"


def _flags_of(program: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Returns (docstring, [(flag, default, text)]) of a command, which is started up to the point where it parses."""
    from absl import app, flags  # noqa: PLC0415

    from reinforce_ada_jax import cli  # noqa: PLC0415

    cli.run = cli.run_with_arguments = app.run = lambda *_args, **_kwargs: None
    name = f"reinforce_ada_jax.{program}"
    before = set(flags.FLAGS)
    sys.modules.pop(name, None)
    sys.argv = [name]
    namespace = runpy.run_module(name, run_name="__main__")
    rows = []
    for flag in sorted(set(flags.FLAGS) - before):
        entry = flags.FLAGS[flag]
        text = re.sub(r"^<.*?>: ", "", re.split(r";?\n(?:\n|  )", entry.help or "")[0])
        choices = f" One of {', '.join(entry.parser.enum_values)}." if hasattr(entry.parser, "enum_values") else ""
        default = "" if entry.default is None else entry.serialize().partition("=")[2] or str(entry.default)
        if entry.boolean and entry.default is not None:
            default = str(entry.default).lower()
        if flag == "config" or default in ("[]", "none"):
            default = ""
        if default == sys.executable:
            default, text = "", f"{text} Default: the interpreter that runs the command."
        rows.append((flag, default, " ".join(text.split()) + choices))
    return namespace["__doc__"] or "", rows


def _in_fork(program: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Returns `_flags_of` from a process of its own: flags are defined once per process."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            code = 1
            try:
                json.dump(_flags_of(program), output)
                output.flush()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"reinforce_ada_jax.{program} failed while its flags were read: status {status}.")
        output.seek(0)
        text, rows = json.load(output)
        return text, [tuple(row) for row in rows]


def commands_page() -> str:
    """Returns docs/reference/commands.md: purpose and flags of each command."""
    sys.path.insert(0, str(ROOT))
    from reinforce_ada_jax.__main__ import COMMANDS  # noqa: PLC0415

    for program in COMMANDS:
        importlib.import_module(f"reinforce_ada_jax.{program}")
    page = io.StringIO()
    page.write(f"# Commands\n\n{NOTE}\n")
    page.write(
        "`python -m reinforce_ada_jax` lists the commands. Each heading is a module, started with `python -m`.\n"
    )
    page.write(
        "`--config.SECTION.KEY=VALUE` changes one [setting](../settings.md) of the commands that have `--config`.\n"
    )
    page.write("`--help` prints the same text.\n")
    for program in COMMANDS:
        text, rows = _in_fork(program)
        page.write(f"\n## {program}\n\n{text.strip()}\n")
        page.write("\n| flag | default | meaning |\n|---|---|---|\n")
        for flag, default, meaning in rows:
            shown = f"`{default}`" if default else ""
            page.write(f"| `--{flag}` | {shown} | {meaning.replace('|', '&#124;')} |\n")
    return page.getvalue()


EXIT_CODES = {
    "cli.STOPPED": "The run stopped itself. The last line says why, and which state is complete. Examples: a full disk, a loss that is not finite.",  # noqa: E501
    "cli.BAD_INPUT": "The input was refused, and would be refused again. One line says what to change.",
    "watchdog.RESTART": "Start the same command again. SIGTERM or a preemption notice arrived and what the time allows is saved, or another process of the run died.",  # noqa: E501
    "cli.INTERRUPTED": "Ctrl-C. The last finished iteration is saved; the same command resumes. A second Ctrl-C ends the process without saving.",  # noqa: E501
}


def exit_codes_page() -> str:
    """Returns docs/reference/exit_codes.md, with the numbers that the code has."""
    from reinforce_ada_jax import cli  # noqa: PLC0415
    from reinforce_ada_jax.distributed import watchdog  # noqa: PLC0415

    owners = {"cli": cli, "watchdog": watchdog}
    lines = [
        f"# Exit codes\n\n{NOTE}",
        "| code | name | meaning |\n|---|---|---|\n| 0 | | The command finished. |",
    ]
    for name, meaning in EXIT_CODES.items():
        module, _, constant = name.partition(".")
        lines.append(f"| {getattr(owners[module], constant)} | `{name}` | {meaning} |")
    lines.append(
        "\nSIGTERM in the first seconds, before the first line, ends the process by the signal, and nothing is lost.\n"
        "A scheduler starts the same command again after 75, and may do so after 1. It must not after 2 or 130.\n"
        "`launch/` does this on Google Cloud ([TPU](../tpu.md#5-a-host-is-taken-away)). What a restart loses is\n"
        "described in [resume](../concepts/resume.md).\n\n"
        "`compile_check` ends with code 1 where a program does not fit."
    )
    return "\n".join(lines) + "\n"


# Members that a user of a class calls; the other ones are called by the package.
MEMBERS = {"Engine": (), "Rollouts": ("sampler",), "VerifierPool": ("grade_all", "submit")}


def functions_page() -> str:
    """Returns docs/reference/functions.md: an entry of mkdocstrings for each public name, in the order of the stub."""
    import reinforce_ada_jax as ada  # noqa: PLC0415

    stub = ast.parse((ROOT / "reinforce_ada_jax" / "__init__.pyi").read_text()).body
    lines = [
        f"# Public functions\n\n{NOTE}",
        "`import reinforce_ada_jax as ada` gives the names below. [Examples](../api.md) of each part run in tests.\n",
    ]
    for node in stub:
        if not (isinstance(node, ast.ImportFrom) and node.module and node.module != "reinforce_ada_jax"):
            continue
        for alias in node.names:
            name = alias.asname or alias.name
            value = getattr(ada, name)
            options = f"      heading: ada.{name}\n      toc_label: {name}\n"
            if name in MEMBERS:
                options += f"      members: [{', '.join(MEMBERS[name])}]\n"
            lines.append(f"::: {value.__module__}.{value.__qualname__}\n    options:\n{options}")
    options = "      heading: ada.train.train\n      toc_label: train.train\n"
    lines.append(f"::: reinforce_ada_jax.train.train\n    options:\n{options}")
    return "\n".join(lines)


SIGNAL_COMMAND = "--study=signal --pass_rates=0.02,0.05,0.1,0.2,0.5,0.8,0.95"
SIGNAL_BEGIN, SIGNAL_END = "<!-- tables of simulate: begin -->\n", "<!-- tables of simulate: end -->\n"


def algorithms_page() -> str:
    """Returns docs/algorithms.md with the tables of SIGNAL_COMMAND between its two marks."""
    from absl import flags  # noqa: PLC0415

    from bench import studies  # noqa: PLC0415

    text = (FOLDER.parent / "algorithms.md").read_text()
    before, rest = text.split(SIGNAL_BEGIN)
    values = studies.define_flags(flags.FlagValues())
    values(["studies", *SIGNAL_COMMAND.split()])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of how ml_collections loads a file
        studies.main(values)
    shown = f"    python -m bench.studies {SIGNAL_COMMAND}\n\n{output.getvalue()}"
    return f"{before}{SIGNAL_BEGIN}\n{shown}\n{SIGNAL_END}{rest.split(SIGNAL_END)[1]}"


MISTAKES_BEGIN, MISTAKES_END = "<!-- table of mistakes: begin -->\n", "<!-- table of mistakes: end -->\n"


def troubleshooting_page() -> str:
    """Returns docs/troubleshooting.md with the table of tests/mistakes.toml between its two marks."""
    text = (FOLDER.parent / "troubleshooting.md").read_text()
    before, rest = text.split(MISTAKES_BEGIN)
    lines = ["| mistake | part of the message | what to do |\n|---|---|---|"]
    for mistake in tomllib.loads((ROOT / "tests" / "mistakes.toml").read_text())["mistake"]:
        lines.append(f"| {mistake['title']} | `{mistake['says']}` | {mistake['remedy']} |".replace("\n", " "))
    return f"{before}{MISTAKES_BEGIN}\n" + "\n".join(lines) + f"\n\n{MISTAKES_END}{rest.split(MISTAKES_END)[1]}"


ALIASES_BEGIN, ALIASES_END = "<!-- table of aliases: begin -->\n", "<!-- table of aliases: end -->\n"


def aliases_table() -> str:
    """Returns the settings of other programs beside ours, and those without a counterpart by what to do."""
    from reinforce_ada_jax.config.aliases import ALIASES  # noqa: PLC0415

    rows, refused = [], {}
    for name, alias in ALIASES.items():
        if not alias.keys:
            refused.setdefault(alias.note, {}).setdefault(alias.libraries, []).append(f"`{name}`")
            continue
        ours = ", ".join(f"`{key}`" for key in alias.keys)
        values = {theirs: value for theirs, value in alias.values.items() if theirs.lower() != value.lower()}
        if values:
            ours += ": " + ", ".join(f"`{theirs}` is `{value}`" for theirs, value in values.items())
        rows.append(f"| `{name}` | {alias.libraries} | {ours} | {alias.note} |")
    theirs = {
        note: "; ".join(f"{key}: {', '.join(names)}" for key, names in by.items()) for note, by in refused.items()
    }
    lines = ["| their setting | program | our setting | what differs |", "|---|---|---|---|", *rows, ""]
    lines += ["These have no counterpart:", "", "| their settings | what to do |", "|---|---|"]
    return "\n".join([*lines, *(f"| {names} | {note} |" for note, names in theirs.items())]) + "\n"


def coming_from_page() -> str:
    """Returns docs/how_to/coming_from.md with the table of aliases between its two marks."""
    before, rest = (FOLDER.parent / "how_to" / "coming_from.md").read_text().split(ALIASES_BEGIN)
    return f"{before}{ALIASES_BEGIN}\n{aliases_table()}\n{ALIASES_END}{rest.split(ALIASES_END)[1]}"


def line_of(file: str, name: str) -> int:
    """Returns the line in a file of the package where a function, a class or a method ("Class.method") begins.

    Raises:
      ValueError: the file has no such name.
    """
    body, line = ast.parse((ROOT / "reinforce_ada_jax" / file).read_text()).body, 0
    for part in name.split("."):
        nodes = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part]
        if not nodes:
            raise ValueError(f"{file} has no {name}. Name another place in CONTRIBUTING.md.")
        body, line = nodes[0].body, nodes[0].lineno
    return line


def contributing_page() -> str:
    """Returns CONTRIBUTING.md with the present line of each step of its walks, as `file.py:57`, `function`."""
    return re.sub(
        r"^(\d+\. `)([\w/]+\.py)(?::\d+)?`, `([\w.]+)`",
        lambda step: f"{step[1]}{step[2]}:{line_of(step[2], step[3])}`, `{step[3]}`",
        (ROOT / "CONTRIBUTING.md").read_text(),
        flags=re.MULTILINE,
    )


def pages() -> dict[pathlib.Path, str]:
    """Returns {file: text} of all pages."""
    return {
        FOLDER / "commands.md": commands_page(),
        FOLDER / "exit_codes.md": exit_codes_page(),
        FOLDER / "functions.md": functions_page(),
        FOLDER.parent / "algorithms.md": algorithms_page(),
        FOLDER.parent / "how_to" / "coming_from.md": coming_from_page(),
        FOLDER.parent / "troubleshooting.md": troubleshooting_page(),
        ROOT / "CONTRIBUTING.md": contributing_page(),
    }


def main() -> None:
    """Writes the pages, or compares them."""
    made = pages()
    if "--check" in sys.argv[1:]:
        different = [file.name for file, text in made.items() if not file.exists() or file.read_text() != text]
        if different:
            sys.exit(f"error: {', '.join(different)} differ from the code: run python dev/reference.py.")
        return
    FOLDER.mkdir(exist_ok=True)
    for file, text in made.items():
        file.write_text(text)


if __name__ == "__main__":
    main()

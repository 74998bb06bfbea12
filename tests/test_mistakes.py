"""Mistakes of users, from mistakes.toml: each ends at once with a short message, and leaves the folder as it was."""

import pathlib
import resource
import shutil
import subprocess
import time
import tomllib

import pytest

from reinforce_ada_jax import cli
from reinforce_ada_jax import config as config_lib
from tests import forked
from tests.running import ROOT, environment, tiny

MISTAKES = tomllib.loads((ROOT / "tests" / "mistakes.toml").read_text())["mistake"]
LIMIT_S, MAX_LINES = 30, 5
LIMITED = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {hard})); "
# A fork has imported jax, which reads these variables when it is imported.
SET = "import os, jax, runpy; os.environ[{name!r}] = {value!r}; jax.config.update({setting!r}, {changed!r}); "
START = "runpy.run_module('reinforce_ada_jax.{name}', run_name='__main__', alter_sys=True)"


def make_files(folder: pathlib.Path, files: dict[str, str]) -> None:
    """Writes the files of a mistake."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("copy:"):
            shutil.copyfile(ROOT / text.removeprefix("copy:"), file)
        else:
            file.write_text(config_lib.to_json(tiny()) if text == "settings of CONFIG" else text)


def contents(folder: pathlib.Path) -> dict[str, bytes | None]:
    """The bytes of each file below a folder; None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def commit(mistake: dict, folder: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs the command of a mistake."""
    words = mistake["command"].replace("DIR", str(folder)).replace("CONFIG", "configs/tiny.py").split()
    command = ["-m", f"reinforce_ada_jax.{words[0]}", *words[1:]]
    before = ""
    for name, value in mistake.get("environment", {}).items():
        before += SET.format(name=name, value=value, setting=name.lower(), changed=value != "false" and value)
    if "file_size" in mistake:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before += LIMITED.format(size=mistake["file_size"], hard=hard)
    if before:
        command = ["-c", before + START.format(name=words[0]), *words[1:]]
    return forked.run(command, environment(), at_once=True)


def check(mistake: dict, folder: pathlib.Path) -> None:
    """Makes a mistake in an empty folder: a short message, and the folder as it was."""
    make_files(folder, mistake.get("files", {}))
    before, began = contents(folder), time.monotonic()
    done = commit(mistake, folder)
    seconds = time.monotonic() - began
    assert seconds < LIMIT_S, f"{seconds:.0f} s"
    assert done.returncode == mistake.get("exit", cli.BAD_INPUT), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert mistake["says"] in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= MAX_LINES, done.stderr
    left = contents(folder)
    assert sorted(left.keys() - before.keys()) == mistake.get("leaves", [])
    assert {name: left.get(name) for name in before} == before


# Of the slow ones test_reward_check.py and tests/environments have the messages.
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=mistake["title"], marks=[pytest.mark.slow] * mistake.get("slow", False))
        for mistake in MISTAKES
    ],
)
def test_a_mistake_ends_with_a_short_message(tmp_path, mistake):
    check(mistake, tmp_path)

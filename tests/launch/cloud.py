"""A checkout, a Google Cloud of stand-ins, and the launch scripts run between them."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
NODE = ("--name=ada", "--zone=us-west4-a")
MADE = ("--type=v5litepod-8",)
RUN = ("--config=configs/tiny.py", "--workdir=/mnt/runs/ada")
QUICK = ("--poll=0", "--backoff=0")
ALL = (*NODE, *MADE, *RUN, *QUICK)
GIT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@b")


def git(folder: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *AUTHOR, *arguments]
    return subprocess.run(command, env=os.environ | GIT, check=True, capture_output=True, text=True).stdout


def make_checkout(folder: pathlib.Path) -> None:
    """A repository of what the scripts need, with one commit."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "configs").mkdir()
    for file in ("configs/tiny.py", "requirements.txt", "requirements-gcs.txt", "pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / file, folder / file)
    (folder / "reinforce_ada_jax").mkdir()
    (folder / "reinforce_ada_jax" / "module.py").write_text("committed\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all")


def executable(file: pathlib.Path, *command: object) -> None:
    """A program that is `command` with its own arguments after it."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'#!/bin/sh\nexec {" ".join(map(str, command))} "$@"\n')
    file.chmod(0o755)


class Cloud:
    """A world and a checkout in a folder."""

    def __init__(self, folder: pathlib.Path, checkout: pathlib.Path):
        self.folder, self.checkout = folder, folder / "checkout"
        shutil.copytree(checkout, self.checkout)
        executable(folder / "bin" / "gcloud", sys.executable, "-SE", HERE / "gcloud_stand_in.py")
        executable(folder / "host_bin" / "tmux", "bash", HERE / "host_stand_in.sh", "tmux")
        for version in ("python3", "python3.11", "python3.12", "python3.13"):
            executable(folder / "host_bin" / version, "bash", HERE / "host_stand_in.sh", "python")
        self.set(
            node="ABSENT", queue="ABSENT", hosts=1, slices=1, becomes="READY", queue_becomes="ACTIVE",
            preempt_before=[], edit_before=[],
        )  # fmt: skip
        self.set(fail=None, exit_codes=[0], python="3.12.1")

    def set(self, *, exit_codes: Sequence[int | str] = (), python: str = "", **changes: object) -> None:
        """Changes the world as it is now; the keys are the stand-ins'."""
        if exit_codes:
            (self.folder / "exit_codes").write_text("".join(f"{code}\n" for code in exit_codes))
        if python:
            (self.folder / "python_version").write_text(python)
        file = self.folder / "world.json"
        world = (json.loads(file.read_text()) if file.exists() else {}) | changes
        file.write_text(json.dumps(world))
        if changes.get("node") == "READY":
            for host in range(world["slices"] * world["hosts"]):
                (self.folder / f"host{host}").mkdir(exist_ok=True)

    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return os.environ | GIT | {"WORLD": str(self.folder), "PATH": path}

    def run(self, *arguments: str, script: str = "tpu_vm.sh", answer: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.checkout / "launch" / script), *arguments], cwd=self.folder, env=self.environment(),
            capture_output=True, text=True, check=False, input=answer,
        )  # fmt: skip

    def forget_calls(self) -> None:
        (self.folder / "calls.jsonl").unlink(missing_ok=True)

    def edit_before_call(self, number: int, file: str) -> None:
        """Work in the checkout that goes on: the file says "edited" from the given call on."""
        self.set(edit_before=[number, str(self.checkout / file)])

    def calls(self) -> list[list[str]]:
        """Every call of gcloud, its words after `compute tpus`."""
        file = self.folder / "calls.jsonl"
        return [json.loads(line)[2:] for line in file.read_text().splitlines()] if file.exists() else []

    def steps(self) -> list[str]:
        """The calls by group and verb; those through ssh by what worker.sh is to do."""
        names = []
        for group, verb, *rest in self.calls():
            command = next((word for word in rest if word.startswith("--command=")), "")
            action = command.split("worker.sh ")[-1].split()[0] if command else ""
            names.append(action or f"{group} {verb}")
        return names

    def trained(self) -> list[list[str]]:
        """The folder in the home folder, and the flags, of every start of the trainer on any host."""
        file = self.folder / "trained"
        return [call.split("\0") for call in file.read_text().split("\0\n")[:-1]] if file.exists() else []

    def installs(self) -> list[str]:
        """Returns the arguments of pip, without those that only make it quiet."""
        text = (self.folder / "installs").read_text()
        return text.replace("install --quiet --disable-pip-version-check ", "").splitlines()


def check(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, result.stderr
    return result


def check_error(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """Ended with `code`, and its message has all `parts`."""
    assert result.returncode == code, (result.returncode, result.stderr)
    assert "error: " in result.stderr
    for part in parts:
        assert part in result.stderr, (part, result.stderr)

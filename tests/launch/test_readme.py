"""launch/README.md: its commands are taken by the scripts, its slices are what their names say."""

import math
import re
import shlex
import subprocess

import pytest

from tests.launch.cloud import ROOT, check

README = (ROOT / "launch" / "README.md").read_text()
# Indented blocks, a command's continued lines joined; a line may have several commands.
LINES = re.findall(r"^ {4}(\S.*)$", README.replace("\\\n", " "), re.MULTILINE)
COMMANDS = [command for line in LINES for command in line.split(" && ") if command.startswith("launch/")]
CORES_PER_CHIP = {"v4": 2, "v5p": 2, "v5e": 1, "v6e": 1}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:2]))
def test_commands_are_taken(cloud, command):
    script, action, *flags = shlex.split(command)
    (cloud.folder / "setup.sh").write_text("")
    (cloud.checkout / "configs" / "qwen_1p5b.py").touch()
    subprocess.run(["git", "-C", cloud.checkout, "add", "configs"], check=True)
    check(cloud.run(action, "--dry-run", "--dirty", *flags, script=script.removeprefix("launch/")))


def test_there_are_commands_of_both_scripts():
    assert {command.split()[0] for command in COMMANDS} == {"launch/tpu_vm.sh", "launch/tpu_pod.sh"}
    assert len(COMMANDS) >= 6


def test_the_setup_file_can_be_read():
    (block,) = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_slices_are_what_their_names_say():
    table = README.split("| `--type` |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in table]
    assert len(rows) == 15
    sources = [file.read_text() for file in (ROOT / "reinforce_ada_jax").rglob("*.py")]
    (known,) = [match[1] for text in sources if (match := re.search(r"^CHIPS = \{\n(.*?)^\}", text, re.M | re.S))]
    for kind, topology, chips, hosts, script in rows:
        chip, _, shape = topology.partition(":")
        assert f'"{chip}"' in known
        assert kind.split("-")[0] == {"v5e": "v5litepod"}.get(chip, chip)
        assert math.prod(map(int, shape.split("x"))) == int(chips)
        assert int(kind.split("-")[1]) == int(chips) * CORES_PER_CHIP[chip]
        assert script == ("tpu_vm.sh" if hosts == "1" else "tpu_pod.sh")
        # A host has 4 chips, and 8 where they are all of the slice.
        assert int(hosts) == (1 if topology in ("v5e:2x4", "v6e:2x4") else int(chips) // 4)


def test_the_files_are_listed():
    listed = re.findall(r"^ {4}(\w+\.sh) ", README.split("## Files")[1], re.MULTILINE)
    assert sorted(listed) == sorted(file.name for file in (ROOT / "launch").glob("*.sh"))

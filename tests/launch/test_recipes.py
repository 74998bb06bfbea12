"""Recipes for XPK and SkyPilot: they have only what these tools know, and start a training that is not refused."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import rules
from reinforce_ada_jax.distributed.watchdog import RESTART
from tests.launch.cloud import HERE, ROOT
from tests.launch.test_readme import LINES
from tests.running import CONFIGS, load

# Options of `xpk ... --help` and fields of `sky.utils.schemas`, by the version that they were recorded from.
RECORDED = json.loads((HERE / "recorded.json").read_text())
XPK, SKYPILOT = RECORDED["xpk 1.16.0"], RECORDED["skypilot 0.14.1"]
COMMANDS = [shlex.split(line) for line in LINES if line.startswith("xpk ")]
RECIPE = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())


def check_training(words):
    """Checks the flags of a trainer, but for its inputs, which are elsewhere."""
    flags = dict(word.split("=", 1) for word in words if "=" in word)
    assert flags.pop("--workdir").startswith("gs://")
    source = CONFIGS / f"{flags.pop('--config').removeprefix('configs/').removesuffix('.py')}.py"
    config = config_lib.resolve(load(source).get_config())
    changes = {name.removeprefix("--config."): value for name, value in flags.items()}
    assert len(changes) == len(flags) and all(name.startswith("--config.") for name in flags)
    changes = {name: ast.literal_eval(value) if value[0] in "(0123456789" else value for name, value in changes.items()}
    rules.check(config_lib.replaced(config, changes))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[1:3]))
def test_xpk_knows_the_options(command):
    assert {word.split("=")[0] for word in command[3:]} <= set(XPK[" ".join(command[1:3])])


def test_the_workload_of_xpk_trains_and_restarts():
    (options,) = [
        dict(word.partition("=")[::2] for word in command[3:]) for command in COMMANDS if "workload" in command
    ]
    assert options["--restart-on-exit-codes"] == str(RESTART)
    program, *words = shlex.split(options["--command"])
    assert (program, words[:3]) == ("exec", ["reinforce-ada", "train", "--distributed"])
    check_training(words[3:])


def test_the_task_of_skypilot_trains_and_restarts():
    resources = RECIPE["resources"]
    for name, fields in (
        ("task", RECIPE), ("resources", resources), ("job_recovery", resources["job_recovery"]),
        ("accelerator_args", resources["accelerator_args"]),
    ):  # fmt: skip
        assert fields.keys() <= set(SKYPILOT[name]), name
    assert resources["job_recovery"]["recover_on_exit_codes"] == [RESTART]
    subprocess.run(["bash", "-n"], input=RECIPE["setup"] + RECIPE["run"], text=True, check=True)
    words = shlex.split(RECIPE["run"].replace("$BUCKET", "bucket"))
    assert words[:4] == ["exec", ".venv/bin/python", "-m", "reinforce_ada_jax.train"]
    check_training(words[4:])
    named = re.findall(r"-r (\S+)", RECIPE["setup"]) + re.findall(r"--constraint (\S+)", RECIPE["setup"])
    assert named and all((ROOT / file).is_file() for file in named)


@pytest.mark.skipif(shutil.which("xpk") is None, reason="the options are compared with recorded ones above")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[1:3]))
def test_xpk_takes_the_commands(command, tmp_path):
    more = ["--dry-run", "--quiet"] + ["--skip-validation"] * ("workload" in command)
    done = subprocess.run(
        [*command, *more], env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "Exiting XPK cleanly" in done.stdout, done.stdout + done.stderr


def test_skypilot_takes_the_task():
    sky = pytest.importorskip("sky", reason="the fields are compared with recorded ones above")
    task = sky.Task.from_yaml_config(RECIPE, env_overrides=[("BUCKET", "bucket")])
    (resources,) = task.resources
    assert resources.use_spot and resources.accelerators == {"tpu-v5litepod-8": 1}

"""worker.sh on a host: it installs, has one run at a time, and ends."""

import os
import shutil
import subprocess
import time

import pytest

from tests.launch.cloud import NODE, ROOT, RUN, check, check_error, git


def jax_version() -> str:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    (version,) = [line.removeprefix("jax==") for line in lines if line.startswith("jax==")]
    return version


def test_the_pins_are_kept(cloud):
    cloud.set(node="READY")
    check(cloud.run("install", *NODE))
    assert cloud.installs() == [
        "--no-deps -r requirements.txt -r requirements-gcs.txt",
        f"--constraint requirements.txt jax[tpu]=={jax_version()}",
        "--no-deps --no-build-isolation --editable .",
    ]


def test_the_setup_file_comes_first(cloud):
    # It runs in the code's folder, before the interpreter is looked for: it may be what installs it.
    cloud.set(node="READY", python="3.10.12")
    setup = cloud.folder / "my setup.sh"
    setup.write_text('test -f requirements.txt && printf 3.12.1 >"$WORLD/python_version"\n')
    check(cloud.run("install", *NODE, f"--setup={setup}"))
    assert len(cloud.installs()) == 3


def test_a_setup_file_that_fails(cloud):
    cloud.set(node="READY")
    setup = cloud.folder / "setup.sh"
    setup.write_text("exit 9\n")
    check_error(cloud.run("install", *NODE, f"--setup={setup}"), 1, "setup file failed (exit code 9)", "install failed")
    assert not (cloud.folder / "installs").exists()


@pytest.mark.parametrize("flags", [[], ["--python=python3.11"]])
def test_an_old_python(cloud, flags):
    """The version that is too old is named, with what to do."""
    cloud.set(node="READY", python="3.10.12")
    parts = ("Python 3.11 or newer is needed", "Python 3.10.12", "--setup file", "launch/README.md")
    check_error(cloud.run("install", *NODE, *flags), 1, *parts)


def test_an_installation_over_another(cloud):
    cloud.set(node="READY")
    check(cloud.run("install", *NODE))
    home = cloud.folder / "host0" / "reinforce_ada_jax"
    (home / "runs").mkdir()
    (home / "runs" / "metrics.jsonl").touch()
    git(cloud.checkout, "mv", "reinforce_ada_jax/module.py", "reinforce_ada_jax/renamed.py")
    git(cloud.checkout, "commit", "-qm", "renamed")
    check(cloud.run("install", *NODE))
    assert sorted(file.name for file in (home / "reinforce_ada_jax").iterdir()) == ["renamed.py"]
    assert (home / "runs" / "metrics.jsonl").exists() and (home / ".venv").exists()


@pytest.mark.parametrize("action", ["start", "install"])
def test_a_second_start_is_refused(cloud, action):
    cloud.set(node="READY", exit_codes=["running", 0])
    check(cloud.run("install", *NODE))
    check(cloud.run("start", *NODE, *RUN))
    attach = "gcloud compute tpus tpu-vm ssh ada --zone=us-west4-a --worker=0 -- -t tmux attach -t ada"
    check_error(cloud.run(action, *NODE, *(RUN if action == "start" else ())), 1, "under way", attach, "stop")
    assert cloud.trained() == []
    check(cloud.run("stop", *NODE))
    check(cloud.run("start", *NODE, *RUN))
    assert len(cloud.trained()) == 1


def test_a_refused_installation_leaves_the_script_of_the_run(cloud):
    """Bash reads the script while the run lasts."""
    cloud.set(node="READY", exit_codes=["running"])
    check(cloud.run("install", *NODE))
    check(cloud.run("start", *NODE, *RUN))
    script = cloud.folder / "host0" / "reinforce_ada_jax_worker.sh"
    before = script.read_text()
    with (cloud.checkout / "launch" / "worker.sh").open("a") as newer:
        newer.write("# a later commit\n")
    git(cloud.checkout, "commit", "-qam", "newer")
    check_error(cloud.run("install", *NODE), 1, "under way")
    assert script.read_text() == before
    check(cloud.run("stop", *NODE))
    check(cloud.run("install", *NODE))
    assert script.read_text() == before + "# a later commit\n"


def test_a_start_without_an_installation(cloud):
    cloud.set(node="READY")
    check_error(cloud.run("start", *NODE, *RUN), 1, "start failed")


def test_the_log_is_kept_over_restarts(cloud):
    cloud.set(node="READY", exit_codes=[1, 0])
    check(cloud.run("install", *NODE))
    check(cloud.run("start", *NODE, *RUN))
    check(cloud.run("start", *NODE, *RUN))
    lines = check(cloud.run("logs", *NODE)).stdout.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["===", "a", "==="] * 2
    assert [lines[2], lines[5]] == ["=== ended with exit code 1", "=== ended with exit code 0"]


TRAINER = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (print("saved"), sys.exit(130)))
print("begun", sys.argv[1:])
while True:
    time.sleep(0.05)
"""


@pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux")
def test_under_the_real_tmux(tmp_path):
    # Ctrl-C reaches the trainer alone: it saves, and its exit code is written down.
    home = tmp_path
    shutil.copy(ROOT / "launch" / "worker.sh", home / "reinforce_ada_jax_worker.sh")
    (home / "reinforce_ada_jax" / ".venv" / "bin").mkdir(parents=True)
    python = home / "reinforce_ada_jax" / ".venv" / "bin" / "python"
    python.symlink_to(shutil.which("python3"))
    environment = os.environ | {"HOME": str(home), "TMUX_TMPDIR": str(home)}
    environment.pop("TMUX", None)

    def worker(*arguments: str) -> str:
        command = ["bash", home / "reinforce_ada_jax_worker.sh", *arguments]
        return check(subprocess.run(command, env=environment, capture_output=True, text=True, check=False)).stdout

    def wait_for(text: str) -> None:
        for _ in range(200):
            if (log := home / "reinforce_ada_jax_run" / "log").exists() and text in log.read_text():
                return
            time.sleep(0.05)
        raise AssertionError(text)

    try:
        worker("start", "ada", ".venv/bin/python", "-c", TRAINER, "a value;", ";")
        wait_for("begun ['a value;', ';']\n")
        assert worker("status", "ada").endswith(" running\n")
        assert worker("status", "ad").endswith(" lost\n")  # not a prefix of a session's name
        assert worker("stop", "ada").endswith(" ended 130\n")
        wait_for("saved\n=== ended with exit code 130\n")
    finally:
        subprocess.run(["tmux", "kill-server"], env=environment, check=False, capture_output=True)

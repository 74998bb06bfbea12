"""tpu_vm.sh and tpu_pod.sh against a stand-in gcloud: what is called, in which order, what a failure says."""

import shlex
import subprocess

import pytest

from tests.launch.cloud import ALL, MADE, NODE, QUICK, ROOT, RUN, check, check_error, git

SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
ZONE = "--zone=us-west4-a"
DESCRIBE = ["tpu-vm", "describe", "ada", ZONE, "--format=value(state,networkEndpoints.len())"]
UP = ["tpu-vm describe", "tpu-vm create", "tpu-vm describe", "tpu-vm scp", "install", "start", "logs"]
NASTY = [
    "it's",
    'say "a"',
    "a  b",
    "$HOME",
    "`id`",
    "x;",
    "--config.x=('a', \"b\")",
    "*",
    "back\\slash",
    "new\nline",
    "é",
    "",
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_bash_reads_them(script):
    subprocess.run(["bash", "-n", script], check=True)


# ---- the whole way ---------------------------------------------------------------------------------------------------


def test_up_on_one_vm(cloud):
    result = check(cloud.run("up", *ALL, "--project=p", "--", "--config.seed=3"))
    packed = f"{cloud.checkout}/runs/launch/ada/reinforce_ada_jax.tar.gz"
    where = [ZONE, "--project=p"]
    describe = ["tpu-vm", "describe", "ada", *where, DESCRIBE[-1]]
    new = "reinforce_ada_jax_new_worker.sh"
    install = f"tar -xzOf reinforce_ada_jax.tar.gz launch/worker.sh >{new} && bash {new} install ada '' ''"
    train = ".venv/bin/python -m reinforce_ada_jax.train"
    flags = "--config=configs/tiny.py --workdir=/mnt/runs/ada --config.seed=3"
    worker = "bash reinforce_ada_jax_worker.sh"
    assert cloud.calls() == [
        describe,
        ["tpu-vm", "create", "ada", "--accelerator-type=v5litepod-8", "--version=v2-alpha-tpuv5-lite", *where],
        describe,
        ["tpu-vm", "scp", packed, "ada:", "--worker=0", *where],
        ["tpu-vm", "ssh", "ada", "--worker=0", f"--command={install}", *where],
        ["tpu-vm", "ssh", "ada", "--worker=0", f"--command={worker} start ada {train} {flags}", *where],
        ["tpu-vm", "ssh", "ada", "--worker=0", f"--command={worker} logs ada", *where],
    ]
    assert cloud.trained() == [["reinforce_ada_jax", *flags.split()]]
    assert "a line of the trainer\n=== ended with exit code 0\n" in result.stdout
    # The user is told how to stop paying.
    assert "launch/tpu_vm.sh delete --name=ada --zone=us-west4-a --project=p" in result.stderr


def test_up_on_a_pod_through_the_queue(cloud):
    cloud.set(hosts=2, queue_becomes=["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], becomes=["CREATING", "READY"])
    extra = ("--queued", "--spot", "--create-flag=--network=my net")
    pod = (*NODE, "--type=v6e-16", *RUN, *QUICK)
    result = check(cloud.run("up", *pod, *extra, script="tpu_pod.sh"))
    looks = ["queued-resources describe"] * 3
    assert cloud.steps() == [
        "tpu-vm describe", "queued-resources describe", "queued-resources create", *looks,
        "tpu-vm describe", "tpu-vm describe", "tpu-vm scp", "install", "start", "logs",
    ]  # fmt: skip
    assert cloud.calls()[2] == [
        "queued-resources", "create", "ada", "--node-id=ada", "--accelerator-type=v6e-16",
        "--runtime-version=v2-alpha-tpuv6e", ZONE, "--spot", "--network=my net",
    ]  # fmt: skip
    workers = [word for call in cloud.calls() for word in call if word.startswith("--worker=")]
    assert workers == ["--worker=all"] * 3 + ["--worker=0"]  # one host's log, else they would run into each other
    assert cloud.trained() == [["reinforce_ada_jax", "--distributed", *RUN]] * 2
    assert "launch/tpu_pod.sh delete --name=ada --zone=us-west4-a --queued" in result.stderr


def test_up_on_two_slices(cloud):
    cloud.set(hosts=2, queue_becomes=["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    pod = (*NODE, "--type=v5litepod-16", "--slices=2", *RUN, *QUICK)
    result = check(cloud.run("up", *pod, "--spot", script="tpu_pod.sh"))
    look = "queued-resources describe"
    assert cloud.steps() == [
        look, look, "queued-resources create", *[look] * 4, "queued-resources scp", "install", "start", "logs"
    ]  # fmt: skip
    assert cloud.calls()[2] == [
        "queued-resources", "create", "ada", "--node-count=2", "--node-prefix=ada", "--accelerator-type=v5litepod-16",
        "--runtime-version=v2-alpha-tpuv5-lite", ZONE, "--spot",
    ]  # fmt: skip
    reached = [[word for word in call if word.startswith(("--node=", "--worker="))] for call in cloud.calls()[7:]]
    assert reached == [["--worker=all", "--node=all"]] * 3 + [["--worker=0", "--node=0"]]
    assert cloud.trained() == [["reinforce_ada_jax", "--distributed", *RUN]] * 4
    assert "launch/tpu_pod.sh delete --name=ada --zone=us-west4-a --slices=2" in result.stderr
    status = check(cloud.run("status", *NODE, "--slices=2", script="tpu_pod.sh")).stdout.splitlines()
    assert status[0] == "queued resource ada: ACTIVE"
    assert [line.split()[1:] for line in status[1:]] == [["ended", "0"]] * 4
    cloud.forget_calls()
    check(cloud.run("logs", *NODE, "--slices=2", "--node=1", "--worker=1", script="tpu_pod.sh"))
    check(cloud.run("delete", *NODE, "--slices=2", "--yes", script="tpu_pod.sh"))
    assert cloud.calls() == [
        ["queued-resources", "ssh", "ada", "--worker=1", "--node=1",
         "--command=bash reinforce_ada_jax_worker.sh logs ada", ZONE],
        ["queued-resources", "delete", "ada", "--force", "--quiet", ZONE],
    ]  # fmt: skip


def test_a_node_that_is_there_is_taken(cloud):
    cloud.set(node="READY")
    result = check(cloud.run("up", *ALL))
    assert cloud.steps() == ["tpu-vm describe", "tpu-vm scp", "install", "start", "logs"]
    assert "ada is there already" in result.stderr


def test_a_place_in_the_queue_is_kept(cloud):
    cloud.set(queue=["WAITING_FOR_RESOURCES", "ACTIVE"])
    check(cloud.run("create", *ALL, "--queued"))
    assert cloud.steps() == ["tpu-vm describe", *["queued-resources describe"] * 2, "tpu-vm describe"]


def test_status(cloud):
    """The status names the state of the node, and how its run ended."""
    cloud.set(node="READY", exit_codes=[2])
    assert check(cloud.run("status", *NODE)).stdout.endswith(" none\n")
    check(cloud.run("install", *NODE))
    check(cloud.run("start", *NODE, *RUN))
    result = check(cloud.run("status", *NODE))
    assert result.stdout.startswith("node ada: READY\n") and result.stdout.endswith(" ended 2\n")
    cloud.set(node="ABSENT")
    assert check(cloud.run("status", *NODE)).stdout == "node ada: ABSENT\n"


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "step", "left"),
    [
        (1, "looking for ada failed", "Nothing was made"),
        (2, "create failed", "ada may exist"),
        (3, "looking at ada failed", "ada exists, and costs"),
        (4, "copying the code failed", "ada exists, and costs"),
        (5, "install failed", "ada exists, and costs"),
        (6, "start failed", "ada exists, and costs"),
        (7, "logs failed", "ada exists, and costs"),
    ],
)
def test_a_step_that_fails(cloud, call, step, left):
    cloud.set(fail={"call": call, "message": "the reason", "code": 7 if call > 3 else 1})
    result = cloud.run("up", *ALL)
    check_error(result, 1, step, "the reason", left)
    assert cloud.steps() == UP[:call]  # nothing was called after it
    if call > 1:
        assert "launch/tpu_vm.sh delete --name=ada --zone=us-west4-a" in result.stderr


@pytest.mark.parametrize(
    ("call", "step"),
    [(2, "looking at the queued resource failed"), (3, "create failed"), (4, "looking at the queued resource failed")],
)
def test_a_step_of_the_queue_that_fails(cloud, call, step):
    cloud.set(fail={"call": call, "message": "the reason"})
    check_error(cloud.run("create", *ALL, "--queued"), 1, step, "the reason", "ada may exist", "delete", "--queued")
    assert len(cloud.calls()) == call


def test_a_request_that_the_queue_refuses(cloud):
    cloud.set(queue_becomes=["PROVISIONING", "FAILED"])
    check_error(cloud.run("create", *ALL, "--queued"), 1, "queued resource ada is FAILED", "Delete it: ")


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded", "quotas"),
        ("There is no more capacity in the zone", "--queued waits"),
        ("Cloud TPU API has not been used in project p", "gcloud services enable tpu.googleapis.com"),
        ("PERMISSION_DENIED: tpu.nodes.create", "roles/tpu.admin"),
        ("Accelerator type not found in zone", "accelerator-types list"),
        ("something else", "gcloud's own words"),
    ],
)
def test_why_a_node_was_not_made(cloud, message, remedy):
    cloud.set(fail={"words": ["create"], "message": message})
    check_error(cloud.run("create", *ALL), 1, "create failed", message, remedy)


def test_a_node_that_never_becomes_ready(cloud):
    cloud.set(becomes=["CREATING", "TERMINATED"])
    check_error(cloud.run("create", *ALL), 1, "ada became TERMINATED", "delete --name=ada")
    check_error(cloud.run("create", *ALL), 1, "ada is TERMINATED", "resume")


def test_a_slice_of_several_hosts_is_no_vm(cloud):
    cloud.set(hosts=4)
    check_error(cloud.run("up", *ALL), 1, "ada has 4 hosts", "launch/tpu_pod.sh", "delete")
    assert cloud.steps() == UP[:3]


def test_without_gcloud(cloud):
    """The missing program is named."""
    (cloud.folder / "bin" / "gcloud").unlink()
    for tool in ("bash", "git", "dirname", "env"):
        (cloud.folder / "bin" / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    environment = cloud.environment() | {"PATH": str(cloud.folder / "bin")}
    command = [cloud.checkout / "launch" / "tpu_vm.sh", "status", *NODE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    check_error(result, 1, "gcloud is not on PATH", "https://cloud.google.com/sdk/docs/install")


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["a command is needed"]),
        (["upp"], ["unknown command 'upp'"]),
        (["status", "--zone=z"], ["status needs --name=VALUE"]),
        (["status", "--name=ada"], ["status needs --zone=VALUE"]),
        (["status", "--name", "ada"], ["--name needs a value", "--name=VALUE"]),
        (["create", *NODE], ["create needs --type=VALUE"]),
        (["start", *NODE, "--workdir=/w"], ["start needs --config=VALUE"]),
        (["up", *ALL, "--spott"], ["unknown flag '--spott'", "after --"]),
        (["up", *ALL, "--config.seed=1"], ["--config.seed=1 is the trainer's", "after --"]),
        (["up", *ALL, "--poll=soon"], ["whole numbers", "soon"]),
        (["up", *ALL, "--backoff=08"], ["whole numbers", "'08'"]),
        (["up", *ALL, "--retries=9999999999999999999"], ["whole numbers", "'9999999999999999999'"]),
        (["up", *ALL, "--type=v9-8"], ["--type=v9-8", "--version=VERSION"]),
        (["up", *ALL, "--type=v3-8"], ["--type=v3-8", "v4 and newer"]),
        (["up", *ALL, "--type=2xv5litepod-16"], ["2xv5litepod-16", "--type=v5litepod-16 --slices=2"]),
        (["up", *ALL, "--create-flag=--node-count=2"], ["--node-count=2", "several slices", "--slices=2"]),
        (["up", *ALL, "--slices=2"], ["--slices=2", "launch/tpu_pod.sh"]),
        (["up", *ALL, "--slices=0"], ["--slices=0", "at least one"]),
        (["up", *ALL, "--env=1A=b"], ["--env=1A=b", "--env=NAME=VALUE"]),
        (["up", *ALL, "--name=A b"], ["--name=A b", "small letters"]),
        (["up", *ALL, "--workdir=gs://", "--spot"], ["--workdir=gs://", "name a folder of a bucket"]),
        (["up", *ALL, "--workdir=runs/a", "--spot"], ["runs/a", "lost with it", "mount"]),
        (["watch", *ALL, "--workdir=runs/a"], ["runs/a", "lost with it"]),
        (["up", *ALL, "--setup=none.sh"], ["--setup=none.sh"]),
    ],
    ids=lambda value: " ".join(value[:1] + value[-1:]) if value and len(value[0]) < 8 else "",
)
def test_flags_that_are_refused(cloud, arguments, parts):
    check_error(cloud.run(*arguments), 2, *parts)
    assert cloud.calls() == []


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"]], ids=" ".join)
def test_help(cloud, arguments):
    """Each script describes its commands and flags."""
    for script in ("tpu_vm.sh", "tpu_pod.sh"):
        text = check(cloud.run(*arguments, script=script)).stdout
        assert f"launch/{script} COMMAND" in text and "--retries=N" in text
        assert max(map(len, text.splitlines())) <= 120


def test_values_arrive_as_they_were_given(cloud):
    workdir = '/mnt/my runs/it\'s $HOME; `id` "x"'
    flags = [f"--config.model.path={value}" for value in NASTY]
    check(cloud.run("up", *NODE, *MADE, *QUICK, RUN[0], f"--workdir={workdir}", "--", *flags, *NASTY))
    assert cloud.trained() == [["reinforce_ada_jax", RUN[0], f"--workdir={workdir}", *flags, *NASTY]]


def test_variables_of_the_trainer(cloud):
    check(cloud.run("up", *ALL, "--env=NASTY=it's; $HOME", "--env=EMPTY="))
    assert cloud.trained() == [["reinforce_ada_jax", *RUN]]
    started = (cloud.folder / "host0" / "reinforce_ada_jax_run" / "command").read_text()
    assert subprocess.check_output(["bash", "-c", started.replace(".venv/bin/python", "printenv NASTY #")]) == (
        b"it's; $HOME\n"
    )


def test_hosts_behind_a_proxy(cloud):
    flags = ("--tunnel-through-iap", "--ssh-flag=--ssh-flag=-o ServerAliveInterval=30")
    result = check(cloud.run("up", *ALL, *flags))
    reached = [call for call in cloud.calls() if call[1] in ("ssh", "scp")]
    assert len(reached) == 4
    assert all({"--tunnel-through-iap", "--ssh-flag=-o ServerAliveInterval=30"} <= set(call) for call in reached)
    # The command that is printed for later reaches them in the same way.
    line = next(line for line in result.stderr.splitlines() if "launch/tpu_vm.sh logs" in line)
    cloud.forget_calls()
    words = shlex.split(line[line.index("launch/tpu_vm.sh") :].split("   ")[0])
    check(cloud.run(*words[1:]))
    check(cloud.run("resume", *ALL, *flags))
    reached = [call for call in cloud.calls() if call[1] == "ssh"]
    assert len(reached) == 2
    assert all({"--tunnel-through-iap", "--ssh-flag=-o ServerAliveInterval=30"} <= set(call) for call in reached)


# ---- what is copied --------------------------------------------------------------------------------------------------


def test_changes_that_are_not_committed(cloud):
    module = cloud.checkout / "reinforce_ada_jax" / "module.py"
    module.write_text("changed\n")
    (cloud.checkout / "scratch.py").write_text("untracked\n")
    check_error(cloud.run("up", *ALL), 1, "module.py", "commit them, or add --dirty")
    assert cloud.calls() == []
    check(cloud.run("up", *ALL, "--dirty"))
    home = cloud.folder / "host0" / "reinforce_ada_jax"
    assert (home / "reinforce_ada_jax" / "module.py").read_text() == "changed\n"
    assert not (home / "scratch.py").exists()
    assert module.read_text() == "changed\n" and git(cloud.checkout, "stash", "list") == ""


def test_a_config_that_would_not_be_copied(cloud):
    (cloud.checkout / "configs" / "mine.py").write_text("")
    check_error(cloud.run("up", *ALL, "--config=configs/mine.py"), 1, "configs/mine.py", "git add")
    check_error(cloud.run("up", *ALL, "--config=mine"), 1, "--config=mine", "git add")
    check(cloud.run("up", *ALL, "--config=tiny"))  # a name means a file of configs/
    check(cloud.run("up", *ALL, "--config=/mnt/runs/mine.py"))  # what is there already is the user's affair


# ---- dry run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("tpu_vm.sh", ["up", *ALL, "--spot", "--", "--config.model.path=it's a; path"]),
        ("tpu_pod.sh", ["up", *ALL, "--queued", "--create-flag=--network=my net"]),
        ("tpu_pod.sh", ["up", *ALL, "--slices=2"]),
        ("tpu_vm.sh", ["status", *NODE]),
        ("tpu_vm.sh", ["stop", *NODE]),
    ],
    ids=["vm", "queued pod", "slices", "status", "stop"],
)
def test_a_dry_run_prints_what_would_be_run(cloud, script, command):
    if command[0] != "up":
        check(cloud.run("create", *ALL))
        check(cloud.run("install", *NODE))
        cloud.forget_calls()
    shown = check(cloud.run(command[0], "--dry-run", *command[1:], script=script)).stdout
    assert cloud.calls() == [] and (command[0] != "up" or not (cloud.checkout / "runs").exists())
    check(cloud.run(*command, script=script))
    done = cloud.calls()
    cloud.forget_calls()
    # The printed lines, run by a shell in a world as it was before, are the same calls.
    if command[0] == "up":
        cloud.set(node="ABSENT", queue="ABSENT", exit_codes=[0])
    for line in shown.splitlines():
        subprocess.run(
            ["bash", "-c", line], cwd=cloud.folder, env=cloud.environment(), check=False, capture_output=True
        )
    assert cloud.calls() == done


def test_a_dry_run_of_watch_shows_a_preemption(cloud):
    shown = check(cloud.run("watch", *ALL, "--spot", "--dry-run")).stdout.splitlines()
    verbs = [line.split()[4] for line in shown if line.startswith("gcloud")]
    assert verbs == ["describe", "delete", "create", "describe", "scp", "ssh", "ssh"]
    assert cloud.calls() == []


# ---- delete ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["", "n\n", "\n", "delete\n"])
def test_delete_asks(cloud, answer):
    cloud.set(node="READY")
    check_error(cloud.run("delete", *NODE, answer=answer), 1, "Delete ada in us-west4-a", "was not deleted", "--yes")
    assert cloud.calls() == []


@pytest.mark.parametrize(("flags", "answer"), [([], "y\n"), (["--yes"], "")])
def test_delete(cloud, flags, answer):
    """A node is deleted by an answer or a flag."""
    cloud.set(node="READY")
    check(cloud.run("delete", *NODE, *flags, answer=answer))
    assert cloud.calls() == [["tpu-vm", "delete", "ada", "--quiet", ZONE]]


def test_delete_through_the_queue(cloud):
    cloud.set(node="READY", queue="ACTIVE")
    check(cloud.run("delete", *NODE, "--yes", "--queued"))
    assert cloud.calls() == [["queued-resources", "delete", "ada", "--force", "--quiet", ZONE]]


def test_delete_that_fails(cloud):
    cloud.set(node="READY", fail={"words": ["delete"], "message": "the reason"})
    check_error(cloud.run("delete", *NODE, "--yes"), 1, "delete failed", "the reason", "may exist")

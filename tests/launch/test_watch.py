"""Preemptions, failures and ends of a run: what `resume` and `watch` do about each."""

import shutil

import pytest

from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed.watchdog import RESTART
from tests.launch.cloud import ALL, ROOT, RUN, check, check_error

START = ["tpu-vm scp", "install", "start"]
MAKE = ["tpu-vm create", "tpu-vm describe"]
LOOK = ["tpu-vm describe", "status"]
TRAINED = ["reinforce_ada_jax", *RUN]


def begin(cloud, *hosts: str | int, then: tuple = (0,), **world) -> None:
    """A run that was started before, as it now is on each host; `then`: how those started later end."""
    cloud.set(node="READY", hosts=len(hosts), exit_codes=then, **world)
    for number, state in enumerate(hosts):
        home = cloud.folder / f"host{number}"
        run_dir = home / "reinforce_ada_jax_run"
        run_dir.mkdir()
        (run_dir / "command").touch()
        shutil.copy(ROOT / "launch" / "worker.sh", home / "reinforce_ada_jax_worker.sh")
        if state == "running":
            (home / "session").write_text("ada\n")
        elif state != "lost":
            (run_dir / "exit_code").write_text(f"{state}\n")


def test_a_preempted_run_goes_on_elsewhere(cloud):
    # Two looks at the first run; preempted before the third. The new node is bare, and its run ends well.
    begin(cloud, "running", preempt_before=[5])
    stale = cloud.folder / "host0" / "of the first node"
    stale.touch()
    result = check(cloud.run("watch", *ALL, "--spot"))
    remake = ["tpu-vm describe", "tpu-vm delete", *MAKE]
    assert cloud.steps() == [*LOOK, *LOOK, *remake, *START, *LOOK]
    assert "--spot" in cloud.calls()[6]
    assert not stale.exists()
    assert cloud.trained() == [TRAINED]
    assert "ada is PREEMPTED" in result.stderr and "has finished" in result.stderr
    assert "delete --name=ada" in result.stderr


def test_a_preempted_pod_gets_its_place_in_the_queue_again(cloud):
    begin(cloud, "running", "running", preempt_before=[3], queue="ACTIVE", queue_becomes=["PROVISIONING", "ACTIVE"])
    check(cloud.run("watch", *ALL, "--spot", "--queued", script="tpu_pod.sh"))
    queue = ["queued-resources describe", "queued-resources create", *["queued-resources describe"] * 2]
    remake = ["tpu-vm describe", "queued-resources delete", *queue, "tpu-vm describe"]
    assert cloud.steps() == [*LOOK, *remake, *START, *LOOK]


def test_slices_of_which_one_is_preempted(cloud):
    """Their queued resource is suspended with all of them, and requested again; the bare hosts get the run."""
    look = ["queued-resources describe", "status"]
    begin(cloud, *["running"] * 4, preempt_before=[5], queue="ACTIVE", queue_becomes=["PROVISIONING", "ACTIVE"])
    cloud.set(hosts=2, slices=2)
    result = check(cloud.run("watch", *ALL, "--spot", "--slices=2", script="tpu_pod.sh"))
    verbs = ("describe", "delete", "describe", "create", "describe", "describe", "describe", "scp")
    remake = [f"queued-resources {verb}" for verb in verbs]
    assert cloud.steps() == [*look, *look, *remake, "install", "start", *look]
    assert cloud.trained() == [["reinforce_ada_jax", "--distributed", *RUN]] * 4
    assert "ada is gone (SUSPENDED)" in result.stderr and "has finished" in result.stderr


def test_slices_whose_new_hosts_have_no_run(cloud):
    # One slice was made again, and the others' processes have ended because its own are gone.
    begin(cloud, RESTART, RESTART, "lost", "lost", queue="ACTIVE")
    cloud.set(hosts=2, slices=2)
    check(cloud.run("watch", *ALL, "--slices=2", script="tpu_pod.sh"))
    look = ["queued-resources describe", "status"]
    assert cloud.steps() == [*look, "kill", "queued-resources scp", "install", "start", *look]
    assert cloud.trained() == [["reinforce_ada_jax", "--distributed", *RUN]] * 4


def test_what_was_packed_first_is_started_again(cloud):
    # Work goes on in the checkout while a run is watched: a restart neither refuses that nor takes it along.
    begin(cloud, 1)
    cloud.edit_before_call(2, "reinforce_ada_jax/module.py")
    check(cloud.run("watch", *ALL))
    assert (cloud.checkout / "reinforce_ada_jax" / "module.py").read_text() == "edited\n"
    assert (
        cloud.folder / "host0" / "reinforce_ada_jax" / "reinforce_ada_jax" / "module.py"
    ).read_text() == "committed\n"


@pytest.mark.parametrize(
    ("codes", "steps", "code", "part"),
    [
        # finished; finished after two failures; bad input; stopped by hand; failing without end
        ([0], [*LOOK], 0, "has finished"),
        ([1, 137, 0], [*LOOK, "kill", *START, *LOOK, "kill", *START, *LOOK], 0, "has finished"),
        ([cli.BAD_INPUT], [*LOOK], cli.BAD_INPUT, "refused its input"),
        ([cli.INTERRUPTED], [*LOOK], cli.INTERRUPTED, "stopped by Ctrl-C"),
        ([RESTART] * 3 + [0], [*[*LOOK, "kill", *START] * 3, *LOOK], 0, "was told to end and has saved its state"),
        ([cli.STOPPED], [*[*LOOK, "kill", *START] * 2, *LOOK], 1, "failure 3, and --retries=2"),
    ],
    ids=["finished", "failed twice", "bad input", "interrupted", "told to end", "fails always"],
)
def test_how_a_run_ended_decides(cloud, codes, steps, code, part):
    begin(cloud, codes[0], then=codes[1:] or codes)
    result = cloud.run("watch", *ALL, "--retries=2")
    assert result.returncode == code, result.stderr
    assert part in result.stderr
    assert cloud.steps() == steps
    assert "tpu-vm delete" not in cloud.steps()


def test_a_run_that_is_told_to_end_at_once_starts_more_and_more_slowly(cloud):
    # 30, 60, 120 ... seconds, up to 600; no pause before the first, of which nobody knows when it was started.
    sleep = cloud.folder / "bin" / "sleep"
    sleep.write_text('#!/bin/sh\necho "$1" >>"$WORLD/slept"\n')
    sleep.chmod(0o755)
    begin(cloud, RESTART, then=[RESTART] * 6 + [0])
    result = check(cloud.run("watch", *ALL, "--backoff=30", "--retries=0"))
    assert (cloud.folder / "slept").read_text().split() == ["30", "60", "120", "240", "480", "600"]
    assert "(6 short runs in a row): the next start is in 600 s" in result.stderr and "has finished" in result.stderr


def test_one_process_of_a_pod_that_fails_ends_the_others(cloud):
    # Host 0 would wait for host 1 forever. Started again, both finish.
    begin(cloud, "running", 1)
    result = check(cloud.run("watch", *ALL, script="tpu_pod.sh"))
    assert cloud.steps() == [*LOOK, "kill", *START, *LOOK]
    assert "ended with exit code 1" in result.stderr
    assert cloud.trained() == [["reinforce_ada_jax", "--distributed", *RUN]] * 2


def test_a_host_that_was_started_again(cloud):
    begin(cloud, "lost")
    result = check(cloud.run("watch", *ALL))
    assert cloud.steps() == [*LOOK, "kill", *START, *LOOK]
    assert ": lost" in result.stderr


def test_capacity_that_comes_late(cloud):
    # Preempted, and twice there is no capacity: each costs a retry, and nothing is left to delete.
    no_capacity = {"words": ["create"], "message": "There is no more capacity", "times": 2}
    begin(cloud, "running", preempt_before=[3], fail=no_capacity)
    result = check(cloud.run("watch", *ALL))
    again = ["tpu-vm describe", "tpu-vm create"]
    assert cloud.steps() == [
        *LOOK, "tpu-vm describe", "tpu-vm delete", "tpu-vm create", *again, *again, "tpu-vm describe", *START, *LOOK,
    ]  # fmt: skip
    assert "--queued waits" in result.stderr and "retry 2 of 3" in result.stderr


def test_capacity_that_never_comes(cloud):
    cloud.set(fail={"words": ["create"], "message": "There is no more capacity"})
    check_error(cloud.run("watch", *ALL, "--retries=2"), 1, "failure 3, and --retries=2")
    assert cloud.steps().count("tpu-vm create") == 3


def test_a_failed_install_is_one_failure(cloud):
    # The look after it finds a node without a run, which is the same failure and not a second one.
    cloud.set(fail={"words": ["install"], "times": 2})
    check(cloud.run("watch", *ALL, "--retries=2"))
    assert cloud.steps().count("install") == 3


def test_a_network_that_is_away(cloud):
    begin(cloud, 0, fail={"words": ["describe"], "message": "no network", "times": 3})
    assert "no network" in check(cloud.run("watch", *ALL)).stderr
    assert cloud.steps() == ["tpu-vm describe"] * 3 + LOOK


def test_a_network_that_stays_away(cloud):
    # A node that can't be seen is not taken for one that is gone. (60 looks, here 3.)
    file = cloud.checkout / "launch" / "tpu_node.sh"
    file.write_text(file.read_text().replace("MAX_LOOKS=60", "MAX_LOOKS=3"))
    begin(cloud, 0, fail={"words": ["describe"]})
    check_error(cloud.run("watch", *ALL, "--dirty"), 1, "ada: no answer", "in 3 looks")
    assert cloud.steps() == ["tpu-vm describe"] * 4


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "steps"),
    [
        ("PREEMPTED", ["tpu-vm describe", "tpu-vm delete", *MAKE, *START]),
        ("TERMINATED", ["tpu-vm describe", "tpu-vm delete", *MAKE, *START]),
        ("ABSENT", ["tpu-vm describe", *MAKE, *START]),
        ("READY", [*LOOK, "kill", *START]),
    ],
)
def test_resume(cloud, state, steps):
    """A node in any state is brought back, and trains again."""
    cloud.set(node=state)
    check(cloud.run("resume", *ALL))
    assert cloud.steps() == steps
    assert cloud.trained() == [TRAINED]


def test_resume_of_a_request_whose_node_was_preempted(cloud):
    cloud.set(queue="SUSPENDED")
    check(cloud.run("resume", *ALL, "--queued"))
    queue = [f"queued-resources {verb}" for verb in ("describe", "delete", "create", "describe")]
    assert cloud.steps() == ["tpu-vm describe", *queue, "tpu-vm describe", *START]


@pytest.mark.parametrize(
    ("hosts", "part"),
    [(["running", 0], "is under way"), (["running", cli.INTERRUPTED], "is under way"), ([0, 0], "has finished")],
)
def test_resume_of_what_needs_none(cloud, hosts, part):
    begin(cloud, *hosts)
    assert part in check(cloud.run("resume", *ALL, script="tpu_pod.sh")).stderr
    assert cloud.steps() == LOOK


def test_resume_waits_for_nothing(cloud):
    cloud.set(node="REPAIRING")
    check_error(cloud.run("resume", *ALL), 1, "REPAIRING", "watch")

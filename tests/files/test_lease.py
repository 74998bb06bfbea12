"""Leases: of several processes one holds the object, whatever stands in it."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from reinforce_ada_jax.files.lease import Lease, LostError
from reinforce_ada_jax.files.lease import _machine as machine
from tests.bucket_server import needs_gcsfs

pytestmark = needs_gcsfs


def _lease(name: str, stale_s: float = 60.0) -> Lease:
    return Lease(f"gs://lease/{name}/training.lock", renew_s=0.05, stale_s=stale_s)


def test_a_lease_that_is_renewed_is_refused_and_a_released_one_is_taken_at_once(server):
    first = _lease("held")
    assert first.take() == ""
    assert _lease("held").take() == f"process {os.getpid()} on {os.uname().nodename}"
    first.check()
    first.close()
    assert server.names("gs://lease/held") == []
    begin, second = time.monotonic(), Lease("gs://lease/held/training.lock", stale_s=60.0)
    assert second.take() == "" and time.monotonic() - begin < 60  # it does not wait until the lease is stale
    second.close()


def test_a_stale_lease_is_taken_over_and_its_old_holder_told(server):
    old = _lease("stale", stale_s=0.5)
    assert old.take() == ""
    old._end.set()  # it renews no more, as a process that is suspended
    old._thread.join()
    begin, new = time.monotonic(), _lease("stale", stale_s=0.5)
    assert new.take() == "" and 0.4 < time.monotonic() - begin < 60
    with pytest.raises(LostError, match="another training has taken over gs://lease/stale, so this one writes no more"):
        old.check()
    new.check()
    new.close()


def test_the_lease_of_an_ended_process_of_this_machine_is_taken_at_once(server):
    program = "import os; from tests.files.test_lease import _lease; assert not _lease('ended').take(); os._exit(0)"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert server.names("gs://lease/ended") == ["training.lock"]
    new = Lease("gs://lease/ended/training.lock", stale_s=1000.0)
    assert new.take() == ""
    new.close()


def test_of_two_that_take_a_stale_lease_one_gets_it(server):
    server.write("gs://lease/both/training.lock", b"{}")
    first, second = (_lease("both", stale_s=0.2) for _ in range(2))
    found = second._read()
    assert first.take() == ""
    assert not second._write(found.stamp.generation)
    first.close()


def test_of_processes_that_take_a_free_lease_at_the_same_time_one_gets_it(server):
    for number in range(3):
        leases, begin, told = [_lease(f"race{number}", stale_s=0.5) for _ in range(4)], threading.Barrier(4), []

        def take(lease, begin=begin, told=told):
            begin.wait()
            told.append(lease.take())

        threads = [threading.Thread(target=take, args=(lease,)) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(told) == ["", *[f"process {os.getpid()} on {os.uname().nodename}"] * 3]
        for lease in leases:
            lease.close()


OWN = f'"machine": {json.dumps(machine())}'
CONTENTS = {
    "nothing": "", "half": "{", "null": "null", "a list": "[1, 2]", "nested": "[" * 100_000,
    "another machine": '{"process": 1}', "no process": f"{{{OWN}}}", "process null": f'{{{OWN}, "process": null}}',
    "process list": f'{{{OWN}, "process": [1]}}', "process text": f'{{{OWN}, "process": "x"}}',
    "process of 40 digits": f'{{{OWN}, "process": 1{"0" * 40}}}',
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS)
def test_an_object_with_anything_in_it_is_taken_over_when_it_is_stale(server, content):
    """Anybody who may write into the bucket chooses it; a holder that is no process may still be alive elsewhere."""
    name = content.replace(" ", "-")
    server.write(f"gs://lease/{name}/training.lock", CONTENTS[content].encode())
    lease, begin = _lease(name, stale_s=0.1), time.monotonic()
    assert lease.take() == "" and time.monotonic() - begin >= 0.1
    lease.close()


def test_the_old_holder_of_a_lease_does_not_remove_the_object_of_the_new_one(server):
    old = Lease("gs://lease/removal/training.lock", renew_s=1000.0, stale_s=0.2)  # as one that is suspended
    new = _lease("removal", stale_s=0.2)
    assert old.take() == "" and new.take() == ""
    content = server.read("gs://lease/removal/training.lock")
    old.close()
    new.check()
    assert json.loads(server.read("gs://lease/removal/training.lock")) == json.loads(content)
    new.close()


def test_a_check_renews_a_lease_that_was_not_renewed_for_long(server):
    lease = Lease("gs://lease/check/training.lock", renew_s=1000.0, stale_s=0.4)
    assert lease.take() == ""
    generations = []
    for pause_s in (0.0, 0.25):
        time.sleep(pause_s)
        lease.check()
        generations.append(server.objects["lease", "check/training.lock"].generation)
    assert generations[0] < generations[1]
    lease.close()


def test_a_lease_whose_object_was_removed_is_lost(server):
    lease = Lease("gs://lease/gone/training.lock", renew_s=1000.0, stale_s=0.1)
    assert lease.take() == ""
    del server.objects["lease", "gone/training.lock"]
    time.sleep(0.06)
    for _ in range(2):
        with pytest.raises(LostError, match="another training has taken over gs://lease/gone"):
            lease.check()
    lease.close()
    assert server.names("gs://lease/gone") == []


def test_a_write_whose_answer_was_lost_is_found_to_be_its_own(server):
    lease = Lease("gs://lease/answer/training.lock", renew_s=1000.0)
    assert lease.take() == ""
    earlier, held = lease._generation, server.objects["lease", "answer/training.lock"].generation
    assert lease._write(earlier) and lease._write(earlier)  # the repetition expects what its first try has replaced
    assert server.objects["lease", "answer/training.lock"].generation == held + 1
    lease.close()

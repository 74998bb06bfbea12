"""Buckets against a server on this machine, with late answers and errors: copies, uploads and leases."""

import contextlib
import os
import pathlib
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from reinforce_ada_jax.config.paths import check_input, check_output, check_source
from reinforce_ada_jax.files import buckets, local_copy
from reinforce_ada_jax.files.durable import write_atomically
from reinforce_ada_jax.files.lease import Lease, LostError
from reinforce_ada_jax.files.local_copy import LocalCopy
from tests.bucket_server import Buckets, needs_gcsfs, serving

pytestmark = needs_gcsfs


@pytest.fixture(scope="module")
def server() -> Iterator[Buckets]:
    """One server for all tests, because TensorStore reads its address once; each test has its own bucket."""
    served, patch = Buckets(), pytest.MonkeyPatch()
    with serving(served) as environment:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield served
    patch.undo()


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _files(folder: pathlib.Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_urls_are_known_also_as_pathlib_shortens_them():
    assert buckets.is_bucket("gs://b/run") and buckets.is_bucket(pathlib.Path("gs://b/run"))
    assert not buckets.is_bucket("runs/gs") and not buckets.is_bucket("s3://b/run")
    assert buckets.url(pathlib.Path("gs://b/run/")) == buckets.url("gs://b/run/") == "gs://b/run"


def test_what_cannot_be_a_bucket_is_refused_before_any_work(monkeypatch):
    with pytest.raises(ValueError, match=r"--input is 's3://b/a.jsonl', and only folders .* buckets of Google Cloud"):
        check_input("--input", "s3://b/a.jsonl")
    with pytest.raises(ValueError, match=r"data.prompts is 's3://b/a.jsonl', and only folders"):
        check_source("data.prompts", "s3://b/a.jsonl")
    check_source("data.prompts", "tfds:/data/gsm8k")  # an absolute path
    check_source("data.prompts", "hf:/data/gsm8k:test")
    with pytest.raises(ValueError, match="--output is 'gs://', which names no bucket"):
        check_output("--output", "gs://", folder=True)
    check_output("--output", "gs://b/model", folder=True)
    monkeypatch.setattr(buckets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"model.path is 'gs://b/m', and buckets need the extra gcs: pip install"):
        check_input("model.path", "gs://b/m")


def test_an_object_and_a_folder_are_fetched_once_for_each_version(server, cache):
    server.write("gs://fetch/data/a.jsonl", b"1\n")
    server.write("gs://fetch/model/config.json", b"{}")
    server.write("gs://fetch/model/deep/x.bin", bytes(range(256)) * 100)
    file = buckets.fetch("gs://fetch/data/a.jsonl")
    assert file.name == "a.jsonl" and file.read_bytes() == b"1\n" and file.is_relative_to(cache)
    folder = buckets.fetch("gs://fetch/model/")
    assert _files(folder) == ["config.json", "deep/x.bin"]
    assert (folder / "deep/x.bin").read_bytes() == bytes(range(256)) * 100
    read = sum("/o/" in request for request in server.requests)
    assert buckets.fetch("gs://fetch/model") == folder
    assert sum("alt=media" in request for request in server.requests[read:]) == 0
    server.write("gs://fetch/model/config.json", b'{"new": 1}')
    again = buckets.fetch("gs://fetch/model")
    assert again != folder and (again / "config.json").read_bytes() == b'{"new": 1}'
    with pytest.raises(ValueError, match="There is no gs://fetch/absent: name an object"):
        buckets.fetch("gs://fetch/absent")


def test_a_folder_whose_name_begins_another_is_not_mixed_with_it(server):
    server.write("gs://names/run/metrics.jsonl", b"one")
    server.write("gs://names/run2/metrics.jsonl", b"two")
    assert [*buckets.objects("gs://names/run")] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["../outside", "deep/../../../outside", "deep/.."])
def test_an_object_whose_copy_would_lie_outside_of_the_folder_is_refused(server, cache, name):
    bucket = f"gs://outside{len(name)}"
    server.write(f"{bucket}/run/metrics.jsonl", b"1")
    server.write(f"{bucket}/run/{name}", b"hostile")
    with pytest.raises(buckets.BucketError, match=r"has '..', gs:.*: remove or rename it"):
        buckets.fetch(f"{bucket}/run")
    with pytest.raises(buckets.BucketError, match="remove or rename it"):
        LocalCopy(f"{bucket}/run")
    assert not [file for file in cache.parent.rglob("*") if file.name == "outside"]


def test_a_local_copy_brings_back_what_is_written_appended_and_removed(server):
    server.write("gs://copy/run/metrics.jsonl", b"1\n")
    server.write("gs://copy/run/old", b"old")
    server.write("gs://copy/run/checkpoints/3/big", b"not downloaded")
    with local_copy.opened("gs://copy/run") as (folder, copy):
        assert copy is not None and _files(folder) == [buckets.ORIGIN, "metrics.jsonl", "old"]
        assert buckets.origin(folder) == "gs://copy/run"
        assert str(buckets.checkpoints(folder)) == "gs://copy/run/checkpoints"
        with (folder / "metrics.jsonl").open("a") as lines:
            lines.write("2\n")
            lines.flush()
            copy.upload()
            assert server.read("gs://copy/run/metrics.jsonl") == b"1\n2\n"  # the file is still open
        write_atomically(folder / "config.json", "{}")
        (folder / "old").unlink()
        (folder / "config.json.partial").write_text("of a kill")
    assert server.names("gs://copy/run") == ["checkpoints/3/big", "config.json", "metrics.jsonl"]
    assert not folder.exists()


def test_a_file_that_is_removed_while_it_is_uploaded_ends_no_later_upload(server, monkeypatch):
    with local_copy.opened("gs://vanishing/run") as (folder, copy):
        (folder / "000007.responses").write_text("kept until there is a checkpoint")

        def vanished(source, target):
            os.unlink(source)
            raise FileNotFoundError(source)

        with monkeypatch.context() as patch:
            patch.setattr(local_copy.shutil, "copyfile", vanished)
            copy.upload()
        (folder / "metrics.jsonl").write_text("1\n")
        copy.upload()
        assert server.names("gs://vanishing/run") == ["metrics.jsonl"]


def test_a_database_is_uploaded_as_it_is_between_two_transactions(server, tmp_path):
    with local_copy.opened("gs://database/run") as (folder, copy):
        with contextlib.closing(sqlite3.connect(folder / "judge.sqlite3", isolation_level=None)) as answers:
            answers.execute("PRAGMA cache_size = 1")  # so that pages of a transaction are written before its end
            answers.execute("CREATE TABLE answers (key TEXT PRIMARY KEY)")
            answers.execute("BEGIN")
            answers.executemany("INSERT INTO answers VALUES (?)", [(f"{key:0100}",) for key in range(1000)])
            answers.execute("COMMIT")
            copied = threading.Event()

            def upload():
                copy.upload()
                copied.set()

            answers.execute("BEGIN")
            answers.executemany("INSERT INTO answers VALUES (?)", [(f"{key:0100}",) for key in range(1000, 1500)])
            uploading = threading.Thread(target=upload)
            uploading.start()
            assert not copied.wait(1.0), "half of a transaction is in the file"
            answers.execute("COMMIT")
            uploading.join()
        assert server.names("gs://database/run") == ["judge.sqlite3"]
        file = tmp_path / "downloaded.sqlite3"
        file.write_bytes(server.read("gs://database/run/judge.sqlite3"))
        with contextlib.closing(sqlite3.connect(file)) as found:
            assert found.execute("SELECT count(*) FROM answers").fetchone() == (1500,)
            assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_only_files_that_changed_are_uploaded(server):
    for number in range(5):
        server.write(f"gs://changed/run/{number}", b"x")
    with local_copy.opened("gs://changed/run") as (folder, copy):
        (folder / "3").write_text("yy")
        before = len(server.requests)
        copy.upload()
        copy.upload()
        assert sum(request.startswith("POST /upload") for request in server.requests[before:]) == 1


def test_a_reader_of_the_bucket_sees_a_run_while_it_goes_on(server):
    copy = LocalCopy("gs://during/run", every_s=0.05)
    (copy.folder / "tensorboard").mkdir()
    (copy.folder / "tensorboard" / "events").write_bytes(b"abc")
    end = time.monotonic() + 20
    while not server.names("gs://during/run") and time.monotonic() < end:
        time.sleep(0.02)
    assert server.read("gs://during/run/tensorboard/events") == b"abc"
    copy.close()


def test_a_copy_whose_bucket_another_process_took_over_uploads_nothing_and_is_kept(server):
    copy = LocalCopy("gs://taken/run")

    def taken() -> None:
        raise LostError("another training has taken over gs://taken/run")

    copy.may_upload = taken
    (copy.folder / "metrics.jsonl").write_text("mine")
    with pytest.raises(buckets.BucketError, match=r"taken over .* The newest files are in (.*): copy them to") as error:
        copy.close()
    kept = pathlib.Path(str(error.value).split(" are in ")[1].split(": copy")[0])
    assert (kept / "metrics.jsonl").read_text() == "mine" and server.names("gs://taken/run") == []


def test_an_output_appears_after_success_only(server):
    with pytest.raises(RuntimeError), buckets.output("gs://out/model") as folder:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise RuntimeError
    assert server.names("gs://out/model") == []
    with buckets.output("gs://out/model") as folder:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    with buckets.output("gs://out/results.json") as file:
        file.write_text("[]")
    assert server.names("gs://out") == ["model/config.json", "results.json"]
    with buckets.output("results.json") as file:
        assert file == pathlib.Path("results.json")


def test_nothing_is_lost_where_one_request_in_twenty_fails(server):
    for number in range(30):
        server.write(f"gs://faulty/run/{number:02}", str(number).encode())
    server.error_share = 0.05
    try:
        with local_copy.opened("gs://faulty/run") as (folder, _):
            assert [(folder / name).read_text() for name in _files(folder)[1:]] == [str(n) for n in range(30)]
            for number in range(30):
                (folder / f"{number:02}").write_text(str(-number))
    finally:
        server.error_share = 0.0
    assert [server.read(f"gs://faulty/run/{n:02}") for n in range(30)] == [str(-n).encode() for n in range(30)]


def test_a_folder_is_moved_and_removed(server):
    server.write("gs://move/checkpoints/3/a/b", b"1")
    server.write("gs://move/checkpoints/30/a", b"2")
    folder = buckets.path("gs://move/checkpoints/3")
    buckets.move(folder, buckets.path("gs://move/damaged/3.0"))
    assert server.names("gs://move") == ["checkpoints/30/a", "damaged/3.0/a/b"]
    buckets.remove(buckets.path("gs://move/damaged/3.0"))
    assert server.names("gs://move") == ["checkpoints/30/a"]


# ---- leases ----------------------------------------------------------------------------------------------------------


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
    program = "import os; from tests.files.test_buckets import _lease; assert not _lease('ended').take(); os._exit(0)"
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

"""Copies of folders in a bucket, whose changes are uploaded: what is lost where a disk, a bucket or a file fails."""

import contextlib
import os
import pathlib
import shutil
import sqlite3
import tempfile
import threading
import time

import pytest

from reinforce_ada_jax.files import buckets, local_copy
from reinforce_ada_jax.files.durable import write_atomically
from reinforce_ada_jax.files.lease import LostError
from reinforce_ada_jax.files.local_copy import LocalCopy
from tests import standins
from tests.bucket_server import files_of, needs_gcsfs

pytestmark = needs_gcsfs


def test_a_local_copy_brings_back_what_is_written_appended_and_removed(server):
    server.write("gs://copy/run/metrics.jsonl", b"1\n")
    server.write("gs://copy/run/old", b"old")
    server.write("gs://copy/run/checkpoints/3/big", b"not downloaded")
    with local_copy.opened("gs://copy/run") as (folder, copy):
        assert copy is not None and files_of(folder) == [buckets.ORIGIN, "metrics.jsonl", "old"]
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


def test_a_name_with_brackets_is_no_pattern(server):
    """Removing `a[1]` left it in the bucket, and removed `a1`."""
    with local_copy.opened("gs://brackets/run") as (folder, copy):
        for name in ("a[1].jsonl", "a1.jsonl"):
            (folder / name).write_text(name)
        copy.upload()
        (folder / "a[1].jsonl").unlink()
        copy.upload()
        assert [*buckets.objects("gs://brackets/run")] == ["a1.jsonl"]


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


def test_nothing_is_lost_where_one_request_in_twenty_fails(server):
    for number in range(30):
        server.write(f"gs://faulty/run/{number:02}", str(number).encode())
    server.error_share = 0.05
    try:
        with local_copy.opened("gs://faulty/run") as (folder, _):
            assert [(folder / name).read_text() for name in files_of(folder)[1:]] == [str(n) for n in range(30)]
            for number in range(30):
                (folder / f"{number:02}").write_text(str(-number))
    finally:
        server.error_share = 0.0
    assert [server.read(f"gs://faulty/run/{n:02}") for n in range(30)] == [str(-n).encode() for n in range(30)]


# ---- a full disk -----------------------------------------------------------------------------------------------------

ROOM = 2**17


def test_without_room_for_the_last_upload_the_files_are_kept_and_named(server):
    copy = LocalCopy("gs://full/run")
    (copy.folder / "metrics.jsonl").write_bytes(bytes(2 * ROOM))
    with pytest.raises(buckets.BucketError, match=r"The newest files are in (.*): copy them to gs://full/run") as error:
        with standins.full_disk(ROOM):
            copy.close()
    kept = pathlib.Path(str(error.value).split(" are in ")[1].split(": copy")[0])
    assert (kept / "metrics.jsonl").stat().st_size == 2 * ROOM and server.names("gs://full/run") == []
    shutil.rmtree(kept.parent)


def test_uploads_go_on_when_there_is_room_again(server):
    copy, failed = LocalCopy("gs://room/run", every_s=0.02), threading.Semaphore(0)
    (copy.folder / "samples").write_bytes(bytes(2 * ROOM))
    with standins.full_disk(ROOM):
        copy.may_upload = failed.release
        for _ in range(3):  # tries after the first one that failed
            assert failed.acquire(timeout=20)
    end = time.monotonic() + 20
    while server.names("gs://room/run") != ["samples"]:
        assert time.monotonic() < end
        time.sleep(0.02)
    copy.close()
    assert server.read("gs://room/run/samples") == bytes(2 * ROOM)


# ---- files that are not what they seem -------------------------------------------------------------------------------


def test_links_are_not_followed_and_the_note_of_the_origin_is_neither_taken_nor_given(server, tmp_path):
    """Both would let those who write into the bucket, or an environment, choose what is read and where it goes."""
    (tmp_path / "private").write_text("secret")
    server.write(f"gs://links/run/{buckets.ORIGIN}", b"gs://another/run")
    with local_copy.opened("gs://links/run") as (folder, copy):
        assert buckets.origin(folder / "metrics.jsonl") == "gs://links/run/metrics.jsonl"
        (folder / "stolen").symlink_to(tmp_path / "private")
        (folder / "metrics.jsonl").write_text("1")
        copy.upload()
    assert server.names("gs://links/run") == [buckets.ORIGIN, "metrics.jsonl"]
    assert server.read(f"gs://links/run/{buckets.ORIGIN}") == b"gs://another/run"


def test_a_file_that_only_has_the_name_of_a_database_is_uploaded_as_it_is(server):
    with local_copy.opened("gs://damaged/run") as (folder, _):
        (folder / "judge.sqlite3").write_bytes(b"SQLite format 3\0, and then nothing")
    assert server.read("gs://damaged/run/judge.sqlite3") == b"SQLite format 3\0, and then nothing"


def test_a_change_that_keeps_the_size_is_uploaded(server):
    with local_copy.opened("gs://same/run") as (folder, copy):
        (folder / "status.json").write_text("1")
        copy.upload()
        (folder / "status.json").write_text("2")
    assert server.read("gs://same/run/status.json") == b"2"


def test_a_download_that_fails_leaves_no_folder(server):
    before = set(pathlib.Path(tempfile.gettempdir()).glob("reinforce_ada_jax-*"))
    server.write("gs://hostile/run/../outside", b"1")
    with pytest.raises(ValueError, match=r"--workdir: gs://hostile/run holds an object whose name has '..'"):
        with local_copy.opened("gs://hostile/run"):
            raise AssertionError
    assert set(pathlib.Path(tempfile.gettempdir()).glob("reinforce_ada_jax-*")) == before

"""Files that survive a kill and a full disk."""

import os
import subprocess
import sys
import time

import pytest

from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import finished_lines, read_records, write_atomically


def test_a_file_is_replaced_as_a_whole(tmp_path):
    file = tmp_path / "config.json"
    write_atomically(file, "old")
    write_atomically(file, "new½")
    assert file.read_text("utf-8") == "new½"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    link, target = tmp_path / "latest.json", tmp_path / "results" / "3.json"
    target.parent.mkdir()
    link.symlink_to("results/3.json")
    for content in ("first", "second"):
        write_atomically(link, content)
        assert link.is_symlink() and target.read_text() == content
    assert sorted(tmp_path.rglob("*")) == [link, target.parent, target]


def test_a_pipe_gets_the_content(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "content")
    assert os.read(reader, 100) == b"content" and pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]
    os.close(reader)


WRITES = """
import pathlib, sys
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import write_atomically
number = 0
while True:
    number += 1
    write_atomically(pathlib.Path(sys.argv[1]), f"{number} " * 500_000)
"""


def test_every_reader_finds_the_old_content_or_all_of_the_new_one(tmp_path):
    """A start after a kill finds the same, at any moment of the kill."""
    file = tmp_path / "config.json"

    def content() -> str:
        words = file.read_text().split()
        assert len(words) == 500_000 and len({*words}) == 1
        return words[0]

    with subprocess.Popen([sys.executable, "-c", WRITES, str(file)]) as writer:
        try:
            while not file.exists():
                time.sleep(0.001)
            seen = {content() for _ in range(20)}
        finally:
            writer.kill()
    assert len(seen) > 1 and content()
    write_atomically(file, "after")  # whatever the kill left beside it
    assert file.read_text() == "after" and [*tmp_path.iterdir()] == [file]


def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path):
    file = tmp_path / "config.json"
    write_atomically(file, "old")
    (tmp_path / "config.json.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "new")
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]


def test_a_write_that_cannot_be_finished_leaves_nothing(tmp_path):
    (tmp_path / "config.json").mkdir()  # the last step, the replacement, fails
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "config.json", "new")
    assert [*tmp_path.iterdir()] == [tmp_path / "config.json"]
    file = tmp_path / "status.json"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "half of a pair: \ud83d")
    assert file.read_text() == "old" and not file.with_name("status.json.partial").exists()


def test_finished_lines_end_with_a_line_break(tmp_path):
    file = tmp_path / "lines.jsonl"
    assert list(finished_lines(file)) == []
    file.write_bytes(b"1\n\n{2")
    assert list(finished_lines(file)) == [b"1\n", b"\n"]


def test_records_are_parsed_and_a_wrong_line_is_named(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n{"b": 3}\n{"a": ')
    records = read_records(file, lambda value: value["a"], "a line with an a", "Remove it.")
    assert [next(records), next(records)] == [1, 2]
    with pytest.raises(ValueError, match=r"lines.jsonl, line 3 is not a line with an a \(KeyError: 'a'\). Remove it"):
        next(records)


@pytest.mark.parametrize("line", ["", "{", "[" * 100_000, "nan", "[1]", '"text"'], ids=lambda line: line[:9] or "empty")
def test_a_line_of_anything_is_named_with_the_bucket_that_it_came_from(tmp_path, line):
    (tmp_path / buckets.ORIGIN).write_text("gs://b/run")
    (tmp_path / "lines.jsonl").write_text(f'{{"a": 1}}\n{line}\n')
    records = read_records(tmp_path / "lines.jsonl", lambda value: value["a"], "a line with an a", "Remove it.")
    assert next(records) == 1
    with pytest.raises(ValueError, match="gs://b/run/lines.jsonl, line 2 is not a line with an a") as error:
        next(records)
    assert str(error.value).endswith("Remove it.") and len(str(error.value)) < 300

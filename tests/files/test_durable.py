import pytest

from reinforce_ada_jax.files.durable import finished_lines, read_records, write_atomically


def test_a_file_is_replaced_as_a_whole(tmp_path):
    file = tmp_path / "config.json"
    write_atomically(file, "old")
    write_atomically(file, "new½")
    assert file.read_text("utf-8") == "new½"
    assert list(tmp_path.iterdir()) == [file]


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
    with pytest.raises(ValueError, match=r"lines.jsonl, line 3 is not a line with an a \(KeyError\('a'\)\). Remove it"):
        next(records)

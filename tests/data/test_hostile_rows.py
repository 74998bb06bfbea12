"""Files that are damaged or made to harm: one message with the line, in bounded time and memory."""

import gzip
import json

import pytest

from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.files import MAX_LINE_BYTES
from reinforce_ada_jax.data.prompts import load_problems, tokenize
from reinforce_ada_jax.data.tokenizer import Tokenizer
from tests.data.shared import write_rows

GOOD = {"id": "a", "problem": "АБ=", "answer": "xy"}
LONG = "x" * 5_000_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    cipher.write_tokenizer(folder)
    return Tokenizer.load(folder)


def write(folder, *rows):
    return write_rows(folder / "bad.jsonl", rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD | {"id": "b", "problem": "\ud800"}, r"half of a surrogate pair, '\\ud800'"),
        (GOOD | {"id": "b", "note": ["\udc00"]}, r"half of a surrogate pair, '\\udc00'"),
        ("[" * 100_000, "not valid JSON"),
        ('{"id": "b", "problem": "p", "answer": "q", "note": ' + "[" * 500 + "]" * 500 + "}", "more than 64 objects"),
        ('{"id": ' + "9" * 5000 + "}", "a whole number of more than 4,300 digits"),
        (GOOD | {"id": LONG}, r"id has 5,000,000 characters; it must have 1 to 1,024"),
        (GOOD | {"id": "b\nc"}, r"id is 'b\\nc'; it must be one line"),
        (GOOD | {"id": None, "extra_info": {"index": "b\n0"}}, r"extra_info.index is 'b\\n0'; it must be one line"),
        (GOOD | {"id": None, "extra_info": {"index": " "}}, "extra_info.index has 1 characters; it must have 1 to"),
        ('{"id": "b", "problem": "p", "problem": "q", "answer": "1"}', "the key 'problem' comes twice"),
        ({}, r"among its columns \(it has none\). Name the column"),
        (GOOD | {"id": "b", "answer": [LONG] * 2}, r"answer is \['xxx"),
        (GOOD | {"id": "b", "problem": {LONG: LONG}}, r"problem is {'xxx"),
        (GOOD | {"id": "b", "pass_rate": LONG}, r"pass_rate is 'xxx"),
        (GOOD | {"id": "b", "prompt": [{"role": "user", "content": [LONG]}]}, r"in prompt is no message"),
        (GOOD | {"id": "b", "prompt": [{"role": "user", "content": None}]}, "in prompt is no message"),
        ({f"{LONG}{index}"[-100_000:]: 1 for index in range(50)}, r"no problem: none of .*, \.\.\.\. Name the column"),
        ({"answer": "1", LONG: "1"}, r"no problem: none of"),
    ],
)
def test_one_short_message_with_the_line(tmp_path, row, message):
    with pytest.raises(ValueError, match=f"bad.jsonl, line 2: .*{message}") as error:
        load_problems(write(tmp_path, GOOD, row))
    assert len(str(error.value)) < 2500 and "\n" not in str(error.value)


def test_a_line_is_not_read_whole(tmp_path):
    with pytest.raises(ValueError, match=r"bad.jsonl, line 1: more than 16,777,216 bytes"):
        load_problems(write(tmp_path, " " * MAX_LINE_BYTES + "{}"))
    # 16 KB of gzip that would be 16 MB of blanks.
    packed = tmp_path / "bomb.jsonl.gz"
    packed.write_bytes(gzip.compress(b" " * (MAX_LINE_BYTES + 1)))
    with pytest.raises(ValueError, match=r"bomb.jsonl.gz, line 1: more than 16,777,216 bytes"):
        load_problems(str(packed))


def test_a_damaged_archive(tmp_path):
    """The line is named after which an archive can not be read."""
    lines = "".join(json.dumps(GOOD | {"id": str(index)}) + "\n" for index in range(100)).encode()
    packed = gzip.compress(lines)
    for name, content in (("cut", packed[:-20]), ("flipped", packed[:-6] + b"\0\0" + packed[-4:])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}, after line \d+: not valid gzip .*Copy the file again"):
            load_problems(str(tmp_path / name))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_is_named(tmp_path, encoding):
    text = json.dumps(GOOD) if encoding == "utf-16" else "\ufeff" + json.dumps(GOOD)
    (tmp_path / "a.jsonl").write_text(text, encoding)
    with pytest.raises(ValueError, match=r"a\.jsonl is UTF-16. Save it as UTF-8\."):
        load_problems(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04\x14\x00", r"a\.jsonl is a zip archive, and problems are JSONL \(also \.gz\) or Parquet: unpack"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "is packed by zstd"),
        (b"BZh91AY", "is packed by bzip2"),
        (b"\xfd7zXZ\x00", "is packed by xz"),
        (b"ARROW1\x00\x00", "is an Arrow file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a pointer of Git LFS, .* run git lfs pull"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_problems(str(tmp_path / "a.jsonl"))


def test_an_empty_folder_needs_no_library_to_be_refused(tmp_path):
    with pytest.raises(ValueError, match="is an empty folder: name a JSONL or Parquet file"):
        load_problems(str(tmp_path))


def test_an_array_is_no_file_of_lines(tmp_path):
    with pytest.raises(ValueError, match=r"is one JSON array.*jq -c '\.\[\]'"):
        load_problems(write(tmp_path, json.dumps([GOOD], indent=1)))


def test_a_character_that_the_tokenizer_lacks(tmp_path, tokenizer):
    problems = load_problems(write(tmp_path, GOOD, "", GOOD | {"id": "b", "problem": "1 + 1 = ?"}))
    with pytest.raises(ValueError, match=r"bad.jsonl, line 3: the tokenizer of .* can't encode '1 \+ 1 = \?'"):
        tokenize(problems, tokenizer, "plain", 100)


def test_a_long_text_is_not_tokenised(tmp_path, tokenizer):
    # 32 characters for each of 4,000 tokens. The tokenizer lacks "~": an attempt would be another error.
    long = GOOD | {"id": "b", "problem": "~" * 128_001}
    problems = load_problems(write(tmp_path, GOOD | {"problem": "А" * 4_000}, long))
    with pytest.raises(ValueError) as error:
        tokenize(problems, tokenizer, "plain", 4_000)
    counts = "1 prompts have 4,001 to 4,001 tokens and 1 prompts have up to 128,001 characters, limit 4,000"
    assert counts in str(error.value)
    assert "bad.jsonl, line 1. Their ids: a, b." in str(error.value)
    # Messages are counted as a whole.
    chat = GOOD | {"prompt": [{"role": "system", "content": "~" * 127_995}, {"role": "user", "content": "АБ=АБ="}]}
    with pytest.raises(ValueError, match="1 prompts have up to 128,001 characters"):
        tokenize(load_problems(write(tmp_path, chat)), tokenizer, "chat", 4_000)

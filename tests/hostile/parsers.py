"""Parsers of bytes that may come from anybody, each with the strategy of its cases and what it may do with one.

A parser returns, or raises the one error that it documents with a message of one line. Anything else is a fault.
"""

import contextlib
import json
import pathlib
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import jinja2
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from reinforce_ada_jax.data.files import read_file
from reinforce_ada_jax.data.templates import render_chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.isolation import messages, workers
from reinforce_ada_jax.policy import huggingface, weight_files
from reinforce_ada_jax.rewards import protocol
from reinforce_ada_jax.training import records
from tests.hostile import data_files, model_folders

TEXT = st.text(st.characters(), max_size=12)
NUMBERS = st.one_of(st.integers(), st.integers(-3, 3), st.floats(), st.sampled_from((2**31, 2**63, 10**400, -0.0)))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12,
)
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8)), min_size=1, max_size=6)


class Parser(NamedTuple):
    """Cases of a parser, and a function (case, scratch folder) that fails where the parser does not keep its word."""

    cases: st.SearchStrategy
    check: Callable[[Any, pathlib.Path], None]


def edited(content: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    """Returns bytes with pieces replaced: each edit has a place, how many bytes go, and what comes there."""
    for place, gone, new in edits:
        at = int(place * len(content))
        content = content[:at] + new + content[at + gone :]
    return content


def with_values(value: Any, changes: list[tuple[int, Any]]) -> Any:
    """Returns a JSON value in which some inner values are others."""
    for place, new in changes:
        holder, key = list(_places(value))[place % max(1, len(list(_places(value))))]
        holder[key] = new
    return value


def _places(value: Any):
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list) and inner:
            yield from _places(inner)


CHANGES = st.lists(st.tuples(st.integers(0, 10**4), JSON), min_size=1, max_size=3)
# Bytes of a file: at random, a whole file with edits, or its JSON with other values.
CASES = st.one_of(st.binary(max_size=200), EDITS, CHANGES.map(tuple))


def content(case: Any, whole: bytes) -> bytes:
    """Returns the bytes of a case for the file whose whole content is given."""
    if isinstance(case, bytes):
        return case
    if isinstance(case, list):
        return edited(whole, case)
    with contextlib.suppress(IndexError, ValueError):  # nothing left to change, or a file that is not JSON
        return json.dumps(with_values(json.loads(whole), list(case))).encode()
    return whole


def allowed(error: type[Exception], function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a parser, which may raise one kind of error with a message of bounded length."""
    try:
        function(*arguments)
    except error as raised:
        assert len(str(raised)) < 3000, str(raised)[:300]


def whole_folder(scratch: pathlib.Path) -> pathlib.Path:
    """The whole model folder of a scratch folder."""
    folder = scratch / "model"
    return folder if folder.exists() else model_folders.write_whole(folder)


def check_header(case: Any, scratch: pathlib.Path) -> None:
    whole = (whole_folder(scratch) / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    text = content(case, whole[8 : 8 + length])
    file = scratch / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    allowed(ValueError, weight_files.read_headers, [file])


def check_config(case: Any, scratch: pathlib.Path) -> None:
    (scratch / "config.json").write_bytes(content(case, json.dumps(model_folders.CONFIG).encode()))
    allowed(ValueError, huggingface.read_config, scratch)


def check_record(case: Any, scratch: pathlib.Path) -> None:
    record = {"iteration": 3, "run_id": "0" * 32, "estimator": {"a": [0.5, 1]}, "seed": 0}
    file = records.record_file(scratch, 3)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content(case, json.dumps(records.with_checksum(record)).encode()))

    def read() -> None:
        assert isinstance(records.foreign(records.read(scratch, 3), 3, "0" * 32), str)

    allowed(records.DamagedError, read)


def check_rows(case: Any, scratch: pathlib.Path) -> None:
    row = data_files.GOOD | {"prompt": [{"role": "user", "content": "x"}], "pass_rate": 0.5, "extra_info": {"index": 1}}
    file = scratch / "rows.jsonl"
    file.write_bytes(data_files.lines(data_files.GOOD | {"id": "first"}, content(case, json.dumps(row).encode())))
    allowed(ValueError, read_file, file)


PIECES = st.sampled_from((
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m['role'] }}", "{% if ", "{% endif %}", "{{",
    "}}", "{%", "%}", "messages", "[0]", ".x", " + ", " ~ ", "|tojson", "|trim", "|length", "{# ", " #}", "'a'",
    "{% set x = ", "namespace()", "x.y", "(", ")", "[", "]", "1", " * ", " ** ", "loop.index", "bos_token", "\n",
    "raise_exception('no')", "{% macro f(a) %}", "{% endmacro %}", "f(1)", "strftime_now('%Y')", "-%}", "{%- ",
    "is defined", "|selectattr(",
))  # fmt: skip


def check_template(case: str, scratch: pathlib.Path) -> None:
    del scratch
    problem = [{"role": "user", "content": "What is 1 + 1?"}]
    allowed(jinja2.TemplateError, render_chat, case, problem, {"bos_token": "<s>"})


VOCABULARY = b'{"a": 2, "b": 3, "ab": 4, "<|im_start|>": 0, "<|im_end|>": 1}'
MERGES, RANKS = b"#version: 0.2\na b\n", b"YQ== 0\nYg== 1\nYWI= 2\n"
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def check_tokenizer(case: Any, scratch: pathlib.Path) -> None:
    name, change = case
    whole, folder = whole_folder(scratch), scratch / name
    if not folder.exists():
        folder.mkdir()
        for each in NAMES[1:3] if name in NAMES[3:] else NAMES[:3]:
            (folder / each).write_bytes((whole / each).read_bytes())
        if name in ("vocab.json", "merges.txt"):
            (folder / "vocab.json").write_bytes(VOCABULARY)
            (folder / "merges.txt").write_bytes(MERGES)
    inner = {"vocab.json": VOCABULARY, "merges.txt": MERGES, "tokenizer.model": RANKS}
    (folder / name).write_bytes(content(change, inner.get(name) or (whole / name).read_bytes()))

    def use() -> None:
        tokenizer = Tokenizer.load(folder)
        tokenizer.decode(tokenizer.encode("ab"))

    allowed(ValueError, use)


def check_protocol(case: Any, scratch: pathlib.Path) -> None:
    del scratch
    answer = {"request": "7f", "correct": True, "reward": 0.5, "reason": "", "rewards": {"style": 0.25}, "failure": ""}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(content(case, json.dumps(answer).encode()) + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        inbox = messages.Inbox(ours)

        def read() -> None:
            message = inbox.read() or {}
            workers.start_error(message)
            verdict, failure = protocol.verdict_from_json(message)
            assert isinstance(verdict.reward, float) and isinstance(failure, str)

        allowed(messages.Malformed, read)


PARSERS = {
    "safetensors header": Parser(CASES, check_header),
    "config.json": Parser(CASES, check_config),
    "training record": Parser(CASES, check_record),
    "rows of problems": Parser(CASES, check_rows),
    "template": Parser(st.lists(PIECES, max_size=12).map("".join), check_template),
    "tokenizer files": Parser(st.tuples(st.sampled_from(NAMES), CASES), check_tokenizer),
    "worker protocol": Parser(CASES, check_protocol),
}


def fuzz(name: str, count: int, scratch: pathlib.Path, first: int = 0) -> None:
    """Tries `count` cases of a parser, the same ones for the same `first`."""
    parser = PARSERS[name]

    @seed(first)
    @settings(
        max_examples=count, deadline=None, database=None, derandomize=False, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(parser.cases)
    def run(case: Any) -> None:
        parser.check(case, scratch)

    run()

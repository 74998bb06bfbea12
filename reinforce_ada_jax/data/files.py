"""Rows of files: JSONL, JSONL packed by gzip, and Parquet. The first bytes of a file decide which of them it is."""

import codecs
import contextlib
import decimal
import gzip
import importlib
import io
import json
import pathlib
import shlex
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from reinforce_ada_jax.data.problems import Problem
from reinforce_ada_jax.data.rows import BY_RULES, Columns, to_problems

# A row is parsed as a whole. 16 MiB hold a problem with hundreds of test cases, and are parsed in less than 1 GB.
MAX_LINE_BYTES = 16 * 2**20
MAX_DEPTH = 64
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_NO_TEXT = {
    b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "packed by zstd", b"BZh": "packed by bzip2",
    b"\xfd7zXZ": "packed by xz", b"ARROW1": "an Arrow file",
}  # fmt: skip
_LFS = b"version https://git-lfs"


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} objects and lists inside each other")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_depth(each, depth + 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of (key, value) pairs; ValueError for a repeated key, of which `json` would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.80} comes twice")
    return found


def _parse(line: bytes, where: str) -> Any:
    """Returns the value of a line; ValueError where it is not JSON, nested too deeply, or not valid Unicode."""
    try:
        value = json.loads(line, object_pairs_hook=_unique)
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH:
            _check_depth(value)
        if b"\\u" in line:  # half of a surrogate pair can't be written to any file
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: half of a surrogate pair, {error.object[error.start]!r}, which is no character. Remove it."
        ) from error
    except (ValueError, RecursionError) as error:
        if "integer string conversion" in str(error):
            raise ValueError(f"{where}: a whole number of more than 4,300 digits. Write it in quotes.") from error
        raise ValueError(
            f"{where}: not valid JSON ({error}). One object a line, in UTF-8, with a problem and an answer."
        ) from error
    return value


def _check_format(line: bytes, name: str) -> None:
    """Raises ValueError if the first line or the name of a file says that it is no JSONL."""
    if line.lstrip(codecs.BOM_UTF8).lstrip().startswith(b"["):
        raise ValueError(
            f"{name} is one JSON array. Write one object a line: jq -c '.[]' {shlex.quote(name)} > new.jsonl"
        )
    if name.endswith((".csv", ".tsv")):
        tabs = ", delimiter='\\t'" if name.endswith(".tsv") else ""
        rows = f"[print(json.dumps(row)) for row in csv.DictReader(sys.stdin{tabs})]"
        raise ValueError(
            f"{name} is a table of CSV, and problems are JSONL, one object a line: "
            f'python -c "import csv, json, sys; {rows}" < {shlex.quote(name)} > new.jsonl'
        )
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{name} is UTF-16. Save it as UTF-8.")
    if line.startswith(_LFS):
        raise ValueError(f"{name} is a pointer of Git LFS, without the data: run git lfs pull, or download the file.")
    for magic, kind in _NO_TEXT.items():
        if line.startswith(magic):
            raise ValueError(f"{name} is {kind}, and problems are JSONL (also .gz) or Parquet: unpack or convert it.")


def _lines(stream: io.BufferedIOBase, name: str) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of each line that is not blank."""
    number = 0
    try:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{name}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{where}: more than {MAX_LINE_BYTES:,} bytes. One problem a line; leave out what is no text."
                )
            if number == 1:
                _check_format(line, name)
            if line.strip():
                yield number, _parse(line, where)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}, after line {number}: not valid gzip ({error}). Copy the file again.") from error


def json_values(value: Any) -> Any:
    """Returns a value of Parquet, `datasets` or TFDS as JSON has it: dates and decimals as text, NaN as None.

    Bytes are read as text in UTF-8, as in TFDS; bytes that are not UTF-8 become None.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): json_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, decimal.Decimal):
        value = format(value, "f")  # without an exponent, as rows.py writes numbers
    if value is None or isinstance(value, str | bool | int):
        return value
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        return None


def optional_package(name: str, needed: str, remedy: str) -> Any:
    """Imports a package that most runs do not need; ValueError with what is needed and the remedy if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{needed} ({error}): {remedy}") from error


def _parquet_rows(file: pathlib.Path) -> Iterator[Any]:
    remedy = "pip install '.[hub]', or write the rows to a JSONL file."
    parquet = optional_package("pyarrow.parquet", f"{file} is Parquet, which needs pyarrow", remedy)
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
            yield from map(json_values, batch.to_pylist())
    except (ValueError, OSError) as error:  # pyarrow's errors are subclasses of these
        raise ValueError(f"{file} can't be read as Parquet ({error!s:.200}). Write it again.") from error


def read_file(file: str | pathlib.Path, columns: Columns = BY_RULES) -> list[Problem]:
    """Returns the problems of a JSONL or Parquet file, in its order. Blank lines of JSONL are ignored.

    Raises ValueError where there is no such file, or a line is no problem; the message names the line.
    """
    file = pathlib.Path(file)
    if file.exists() and not file.is_file():  # also <(zcat FILE.gz) of a shell
        raise ValueError(f"{file} is a pipe or a device, which can't be read twice: write the rows to a file.")
    if not file.is_file():
        raise ValueError(
            f"There is no file {file}: name a JSONL or Parquet file, a folder that `datasets` reads, hf:NAME for a "
            "data set of the hub, or cipher:train for the built-in task."
        )
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(file.open("rb"))
        magic = raw.read(4)
        if magic == _PARQUET:
            return to_problems(enumerate(_parquet_rows(file), start=1), str(file), columns)
        raw.seek(0)
        stream = stack.enter_context(gzip.open(raw)) if magic.startswith(_GZIP) else raw
        return to_problems(_lines(stream, str(file)), str(file), columns, unit="line", unique_ids=True)

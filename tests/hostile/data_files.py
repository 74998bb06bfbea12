"""Data files that are damaged or made to harm: a seeded fault in lines of problems."""

import gzip
import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

GOOD = {"id": "a", "problem": "What is 1 + 1?", "answer": "2"}


def lines(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def no_json(rng: random.Random) -> bytes:
    return lines(GOOD, rng.choice((
        b"[" * rng.randrange(1_000, 500_000), b'{"problem": ' * rng.randrange(1_000, 100_000), b"{'problem': 1}",
        json.dumps(GOOD).encode()[: rng.randrange(1, 40)], b"\xff\xfe" + rng.randbytes(20), b"\0" * 100, b"NaN x",
        b'{"id": ' + b"9" * rng.randrange(5_000, 10**6) + b"}", rng.randbytes(rng.randrange(1, 1000)) + b"\xff",
    )))  # fmt: skip


def deep(rng: random.Random) -> bytes:
    depth = rng.randrange(65, 900)
    return lines(GOOD, b'{"id": "b", "problem": "p", "answer": "q", "note": ' + b"[" * depth + b"]" * depth + b"}")


def wrong_type(rng: random.Random) -> bytes:
    long = "x" * rng.randrange(1, 5_000_000)
    row = GOOD | {"id": "b"} | rng.choice((
        {"problem": rng.choice((1, True, {long: 1}, [], [long], 1.5))},
        {"answer": rng.choice((True, {long: 1}, [long], None, float("nan"), float("inf")))},
        {"id": rng.choice((True, {}, [long], 1.5, "", " ", "x" * 1025 + long))},
        {"pass_rate": rng.choice((-1, 2, long, [], {}, float("nan")))},
        {"prompt": rng.choice(([], [1], [{"role": "user"}], [{"role": "user", "content": 3}],
                               [{"role": "assistant", "content": "x"}], [{"role": "user", "content": [long]}]))},
        {"problem": rng.choice(("", " \n"))}, {"answer": ""}, {"problem": None}, {"answer": None},
    ))  # fmt: skip
    return lines(GOOD, row)


def no_row(rng: random.Random) -> bytes:
    return lines(
        GOOD, rng.choice((1, "x", [], [GOOD], None, True, {}, {"x" * 10**6: 1}, {str(n): n for n in range(999)}))
    )


def surrogates(rng: random.Random) -> bytes:
    key = rng.choice(("id", "problem", "answer", "note"))
    return lines(GOOD, GOOD | {"id": "b"} | {key: "x" * rng.randrange(100) + chr(rng.randrange(0xD800, 0xE000))})


def same_id(rng: random.Random) -> bytes:
    count = rng.randrange(1, 5000)
    return lines(GOOD, *(GOOD | {"id": str(number)} for number in range(count)), GOOD)


def nothing(rng: random.Random) -> bytes:
    return rng.choice((b"", b"\n" * rng.randrange(1, 100_000), b" \t\r\n"))


def long_line(rng: random.Random) -> bytes:
    return lines(GOOD) + b" " * (16 * 2**20 + rng.randrange(1, 2**20)) + lines(GOOD)


def packed(rng: random.Random) -> bytes:
    """Damaged archives, and 32 KB that are 32 MB of blanks."""
    content = gzip.compress(lines(*(GOOD | {"id": str(number)} for number in range(500))))
    where = rng.randrange(12, len(content) - 8)
    return rng.choice((
        content[:where], content[:-6] + b"\0\0" + content[-4:], gzip.compress(b" " * 2**25), content[:3],
        content[:where] + bytes([content[where] ^ 0xFF]) + content[where + 1 :],
    ))  # fmt: skip


def parquet(rng: random.Random) -> bytes:
    return b"PAR1" + rng.randbytes(rng.randrange(1000)) + rng.choice((b"", b"PAR1"))


def array(rng: random.Random) -> bytes:
    return json.dumps([GOOD] * rng.randrange(1, 100), indent=rng.choice((1, None))).encode()


def too_long(rng: random.Random) -> bytes:
    return lines(GOOD, GOOD | {"id": "b", "problem": "why? " * rng.randrange(1_000, 2_000_000)})


HARMS: tuple[Callable[[random.Random], bytes], ...] = (
    no_json, deep, wrong_type, no_row, surrogates, same_id, nothing, long_line, packed, parquet, array, too_long,
)  # fmt: skip


def write(file: pathlib.Path, seed: int) -> str:
    """Writes a hostile file, and returns what is wrong with it."""
    harm = HARMS[seed % len(HARMS)]
    file.write_bytes(harm(random.Random(seed)))
    return harm.__name__

"""Seeded hostile model folders and data files: each is refused in one line, below 10 s of a processor and 1 GB."""

import json

import pytest

from tests import forked
from tests.running import environment


def trials(kind: str, first: int, last: int) -> list[dict]:
    """Trials of these seeds in a process of their own, which may die of one."""
    program = f"from tests.hostile import trials; trials.main({kind!r}, {first}, {last})"
    result = forked.run(["-c", program], environment())
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert (result.returncode, len(found)) == (0, last - first), (result.stderr[-2000:], found[-1:])
    return found


def assert_refused(found: list[dict]) -> None:
    assert [trial for trial in found if trial["problem"]] == []


def test_a_sample_is_refused():
    assert_refused(trials("folders", 0, 5))
    assert_refused(trials("files", 0, 6))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("folders", 200), ("files", 100)])
def test_all_are_refused(kind, count):
    """Every damaged file is refused, and the damages differ."""
    found = trials(kind, 0, count)
    assert_refused(found)
    assert len({trial["harm"] for trial in found}) >= 12  # they differ

"""Choice of the programs that a test session grades."""

from collections.abc import Iterable
from typing import Any

import pytest


def thirds(names: Iterable[str]) -> list[Any]:
    """Every third one; the others in slow tests. Each is a process or two."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, name in enumerate(names)]


def asked(request: pytest.FixtureRequest) -> set[str]:
    """The parameters `name` of all tests of this file that the session runs."""
    tests = [item for item in request.session.items if item.path == request.path]
    return {test.callspec.params["name"] for test in tests if "name" in getattr(test, "fixturenames", ())}

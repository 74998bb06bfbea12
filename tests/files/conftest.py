"""A server of buckets for the tests of this folder."""

import pathlib
from collections.abc import Iterator, Mapping

import pytest

from tests.bucket_server import Buckets, serving


@pytest.fixture(scope="session")
def running() -> Iterator[tuple[Buckets, Mapping[str, str]]]:
    """One server for all tests of a process, because TensorStore reads its address once."""
    served = Buckets()
    with serving(served) as environment:
        yield served, environment


@pytest.fixture
def server(running: tuple[Buckets, Mapping[str, str]], monkeypatch: pytest.MonkeyPatch) -> Buckets:
    """The server; each test has its own bucket."""
    served, environment = running
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return served


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty folder for what is fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[None]:
    """All tests of a file share the programs of engines and learners."""
    from tests import sharing  # noqa: PLC0415 (the package is imported when its annotations are checked)

    with sharing.shared_programs():
        yield

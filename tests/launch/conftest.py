"""A cloud for each test; the repository that its checkouts are copies of is made once."""

import pathlib

import pytest

from tests.launch.cloud import Cloud, make_checkout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("checkout")
    make_checkout(folder)
    return folder


@pytest.fixture
def cloud(tmp_path, checkout) -> Cloud:
    return Cloud(tmp_path, checkout)

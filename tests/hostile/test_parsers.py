"""Cases of hypothesis for every parser of foreign bytes: a result, or the one error that it documents."""

import pytest

from tests.hostile import parsers


@pytest.mark.parametrize("name", parsers.PARSERS)
def test_some_cases(tmp_path, name):
    parsers.fuzz(name, 25, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", parsers.PARSERS)
def test_a_thousand_cases(tmp_path, name):
    parsers.fuzz(name, 1000, tmp_path)

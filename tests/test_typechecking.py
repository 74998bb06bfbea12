"""Annotations as tests execute them: shapes that disagree, wrong types, and the calls that are left out."""

import dataclasses

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float

from tests import typechecking


@typechecking.checked
def scaled(x: Float[np.ndarray, "B T"], by: Float[np.ndarray, " B"]) -> Float[np.ndarray, "B T"]:
    return (x.T * by).T if by[0] else x.T


@typechecking.checked
def half(number: float) -> float:
    return number / 2 if number else "nothing"


@typechecking.checked
@dataclasses.dataclass(frozen=True)
class Row:
    tokens: Float[np.ndarray, " T"]
    mask: Float[np.ndarray, " T"]


class Rows:
    @staticmethod
    @typechecking.checked
    def first(x: Float[np.ndarray, "B T"]) -> Float[np.ndarray, " T"]:
        return x[0]

    @property
    @typechecking.checked
    def length(self) -> int:
        return 1.5


@pytest.mark.parametrize(
    "call",
    [
        lambda: scaled(np.ones((2, 3)), np.ones(3)),  # B is 2
        lambda: scaled(np.ones((2, 3)), np.zeros(2)),  # returns [T, B]
        lambda: scaled(np.ones(2), np.ones(2)),
        lambda: scaled(np.ones((2, 3), int), np.ones(2)),
        lambda: half("one"),
        lambda: half(0),
        lambda: Row(np.ones(2), np.ones(3)),
        lambda: Rows.first(np.ones(2)),
        lambda: Rows().length,
    ],
)
def test_what_disagrees_with_its_annotation(call):
    with pytest.raises(BeartypeCallHintViolation):
        call()


def test_what_agrees():
    """Values that agree with their annotations pass."""
    assert scaled(np.ones((2, 3)), np.array([1.0, 2.0])).sum() == 9
    assert half(3) == 1.5  # an int where a float is annotated
    assert Row(np.ones(2), np.ones(2)).mask.shape == Rows.first(np.ones((1, 2))).shape


def test_sizes_are_those_of_one_call():
    for size in (1, 2):
        assert scaled(np.ones((size, 3)), np.ones(size)).shape == (size, 3)


def test_the_first_calls_of_each_test_are_checked():
    good, bad = (np.ones((2, 3)), np.ones(2)), (np.ones((2, 3)), np.zeros(2))
    for _ in range(typechecking.CHECKED):
        scaled(*good)
    assert scaled(*bad).shape == (3, 2)
    typechecking.begin_test()
    with pytest.raises(BeartypeCallHintViolation):
        scaled(*bad)


def test_the_first_functions_of_an_inner_def_are_checked():
    def make():
        @typechecking.checked
        def double(number: float) -> float:
            return 2 * number

        return double

    made = [make() for _ in range(typechecking.MADE + 1)]
    with pytest.raises(BeartypeCallHintViolation):
        made[-2]("one")
    assert made[-1]("one") == "oneone"

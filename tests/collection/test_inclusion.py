"""Inclusion probabilities and the systematic sample, by enumeration of its random number."""

import itertools

import numpy as np
import pytest

from reinforce_ada_jax.collection.inclusion import inclusion_probabilities, systematic_sample

RNG = np.random.default_rng(0)
SIZES = {
    "equal": np.ones(7),
    "unequal": np.array([0.1, 2.0, 0.5, 0.7, 3.0, 0.0, 1.0]),
    "one certain": np.array([100.0, 1.0, 1.0, 1.0, 1.0]),
    "nothing known": np.zeros(5),
    "many": RNG.gamma(0.3, size=40),
}


def points(pi, order):
    """A random number of each sample, and the sample's probability: it changes where an end has this fraction."""
    cuts = np.unique(
        np.concatenate([[0.0, 1.0], np.cumsum(pi[order]) % 1.0, np.cumsum(pi[order][pi[order] < 1]) % 1.0])
    )
    for begin, end in itertools.pairwise(cuts):
        yield (begin + end) / 2, end - begin


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("name", SIZES)
def test_each_prompt_is_included_with_its_probability_and_never_twice(name, count):
    pi = inclusion_probabilities(SIZES[name], count, 0.25)
    size = len(pi)
    assert pi.sum() == pytest.approx(count, rel=1e-12) and pi.max() <= 1.0
    assert pi.min() >= 0.25 * count / size - 1e-12
    for _ in range(5):
        order, included, counted = RNG.permutation(size), np.zeros(size), np.zeros(size)
        for point, probability in points(pi, order):
            sample = systematic_sample(pi, order, point)
            assert len(sample) == len(set(sample.tolist())) == count
            included[sample] += probability
            counted[sample] += probability * count / (size * pi[sample]) / count
        np.testing.assert_allclose(included, pi, atol=1e-9)
        np.testing.assert_allclose(counted, 1 / size, atol=1e-9)


def test_probabilities_by_hand():
    # q = 0.75 sizes / mean + 0.25, and pi = 2 q / 4.
    np.testing.assert_allclose(
        inclusion_probabilities(np.array([0.0, 1.0, 1.0, 2.0]), 2, 0.25), [0.125, 0.5, 0.5, 0.875], rtol=1e-12
    )
    # q = 2.89, 0.37, 0.37, 0.37: the first one is certain, and the others share what is left of 2.
    certain = inclusion_probabilities(np.array([30.0, 1.0, 1.0, 1.0]), 2, 0.25)
    np.testing.assert_allclose(certain, [1, 1 / 3, 1 / 3, 1 / 3], rtol=1e-12)
    np.testing.assert_array_equal(inclusion_probabilities(np.array([5.0, 1.0, 0.0]), 3, 0.25), np.ones(3))

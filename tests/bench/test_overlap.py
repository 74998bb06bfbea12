"""Busy slots where one response of each iteration has twenty times the mean length."""

import pytest

from bench.overlap import Sizes, simulate


@pytest.mark.slow  # a simulation of hours
def test_responses_that_go_on_keep_the_slots_busy():
    sizes = Sizes(prompts=16, group_size=8, slots=16, mean_tokens=200, longest=20, iterations=6)
    alone, finished = simulate(sizes, "none", 0), simulate(sizes, "finish", 1)
    in_flight = simulate(sizes, "in_flight", 4)
    assert alone.slots < 0.5 < finished.slots < 0.7 and in_flight.slots > 0.9
    assert in_flight.seconds < 0.6 * alone.seconds
    # Their tokens are prefilled again in each iteration: less than a quarter of those that are drawn.
    assert alone.prefilled < in_flight.prefilled < 0.25 * 16 * 8 * 200

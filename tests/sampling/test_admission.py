"""Numbers of draws that may start, by forecasts worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.sampling.admission import FRACTION, MOST_SEEN, Lengths, admissible, expected_pages


def integers(*values):
    return np.array(values, np.int32)


def seen(*pages, width=4) -> Lengths:
    lengths = Lengths(width)
    for count in pages:
        lengths.add(count)
    return lengths


@jax.jit
def compiled(survivors, held, limit, room):
    return admissible(survivors, held, limit, room)


def starts(lengths, held, limit, room) -> list[int]:
    """Slots that may start."""
    found = compiled(lengths.survivors(), integers(*held), integers(*limit), np.asarray(room, np.int32))
    return np.flatnonzero(found).tolist()


def test_survivors_count_responses_that_needed_at_least_so_many_pages():
    assert Lengths(4).survivors().tolist() == [1, 1, 1, 1]  # one response, as long as any may be
    assert seen(1, 1, 2, 4).survivors().tolist() == [5, 3, 2, 2]


def test_expected_pages():
    # Of four responses two needed a second page, and one a third.
    expected = np.asarray(expected_pages(jnp.array([4, 2, 1]), jnp.array([1, 2, 3]))) / FRACTION
    assert expected[0].tolist() == [1, 2 * 2 / 4, 3 * 1 / 4]
    assert expected[1].tolist() == [2, 3 * 1 / 2, 0]
    assert expected[2].tolist() == [3, 0, 0]


def test_before_a_response_is_seen_every_draw_is_taken_to_reach_its_limit():
    # Four pages each: two fit into 11 pages, and a third does not. With limits of 3 pages a third fits.
    assert starts(Lengths(4), held=[0, 0, 0], limit=[4, 4, 4], room=11) == [0, 1]
    assert starts(Lengths(4), held=[0, 0, 0], limit=[3, 3, 3], room=11) == [0, 1, 2]


def test_short_responses_let_more_start():
    # After 15 of one page: 4 pages now, and of 16 pages looked for later at most 4 * 4 / 16 are expected.
    assert starts(seen(*[1] * 15), held=[0, 0, 0, 0], limit=[4, 4, 4, 4], room=4) == [0, 1, 2, 3]


def test_active_slots_are_forecast_from_the_pages_that_they_hold():
    # Half of the responses have one page and half four. A slot that holds two will hold four, whatever others did.
    lengths = seen(1, 1, 1, 4, 4)
    assert starts(lengths, held=[2, 0, 0], limit=[4, 4, 4], room=6) == [1]
    # One that holds one page is expected to hold two: half of four.
    assert starts(lengths, held=[1, 0, 0], limit=[4, 4, 4], room=6) == [1, 2]


def test_no_draw_passes_one_before_it():
    # After a page each the first two would need four. There would be room for the third.
    assert starts(Lengths(4), held=[0, 0, 0], limit=[2, 4, 1], room=3) == [0]


def test_a_slot_without_a_request_starts_nothing():
    assert starts(Lengths(4), held=[0, 1, 0], limit=[4, 4, 0], room=100) == [0]


@pytest.mark.parametrize("pages", [(), (1,) * 1000, (4,) * 1000])
def test_one_draw_alone_always_fits(pages):
    assert starts(seen(*pages), held=[0, 0], limit=[4, 4], room=4)[0] == 0


def test_what_is_already_too_much_stops_all():
    assert starts(Lengths(4), held=[3, 3, 0], limit=[4, 4, 1], room=6) == []


def test_old_responses_count_less():
    lengths = seen(*[1] * MOST_SEEN, *[3] * (MOST_SEEN // 2))
    survivors = lengths.survivors()
    assert survivors[0] < MOST_SEEN and survivors[3] == 1
    assert survivors[2] > survivors[0] / 2  # twice as many had one page

"""Times of saves: the estimate follows from the newest ones, also after a resume, and slow saves are said once."""

import pytest

from reinforce_ada_jax.config.settings import CheckpointConfig
from reinforce_ada_jax.training import save_times
from reinforce_ada_jax.training.save_times import FILE, SaveTimes
from tests import standins


@pytest.fixture
def clock(monkeypatch):
    return standins.clock(monkeypatch, save_times)


def saved(times, clock, iteration, size, seconds) -> None:
    times.begin(iteration, size)
    clock.seconds += seconds
    times.complete()


def test_the_slowest_of_the_newest_three_counts_also_after_a_resume(tmp_path, clock):
    times = SaveTimes(tmp_path)
    assert times.expected_s(10**9) == 0.0, "nothing is measured"
    for iteration, seconds in enumerate((90.0, 10.0, 20.0, 5.0)):
        saved(times, clock, iteration, 10**9, seconds)
    assert times.expected_s(10**9) == 20.0 and times.expected_s(2 * 10**9) == 40.0
    with (tmp_path / FILE).open("a") as file:
        file.write('{"iteration": 9}\nno JSON\n{"cut off')
    assert SaveTimes(tmp_path).expected_s(10**9) == 20.0


def test_a_save_that_is_not_begun_counts_nothing(tmp_path):
    SaveTimes(tmp_path).complete()  # an amended record
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("checkpoint", "seconds", "minutes", "said"),
    [
        (CheckpointConfig(minutes=0.0), 24.0, 0.0, False),
        (CheckpointConfig(minutes=0.0), 26.0, 10.0, True),
        (CheckpointConfig(minutes=3.0), 26.0, 3.0, True),
        (CheckpointConfig(minutes=0.0, notice_s=0.0), 26.0, 0.0, False),
        (CheckpointConfig(minutes=0.0, notice_s=60.0), 26.0, 0.0, False),
    ],
)
def test_saves_that_take_longer_than_the_notice_are_by_time_and_said_once(
    tmp_path, clock, checkpoint, seconds, minutes, said
):
    times = SaveTimes(tmp_path)
    saved(times, clock, 4, 6 * 10**9, seconds)
    assert times.minutes(checkpoint, 6 * 10**9) == minutes
    message = times.slow(checkpoint, 6 * 10**9)
    assert bool(message) == said and times.slow(checkpoint, 6 * 10**9) == ""
    if said:
        assert message.startswith("A checkpoint takes about 26 s (6.0 GB), longer than checkpoint.notice_s (25 s).")
        assert f"every {minutes:g} minutes" in message

"""Answers to requests for samples: they wait, are fetched, and are forgotten."""

import pytest

from tests import standins

pytest.importorskip("tinker")
from reinforce_ada_jax.serving.tinker import futures as futures_lib
from reinforce_ada_jax.serving.tinker.protocol import error_result


def test_answers_are_forgotten_some_time_after_they_were_fetched(monkeypatch):
    clock = standins.clock(monkeypatch, futures_lib)
    futures, answer = futures_lib.SampleFutures(), error_result("none")
    for name in ("fetched", "unfetched", "late"):
        futures.add(name, "session")
    assert futures.fetch("fetched") is None and list(futures.waiting) == ["fetched", "unfetched", "late"]
    futures.finish("fetched", answer)
    futures.finish("fetched", error_result("a second answer"))
    futures.finish("unfetched", answer)
    clock.seconds = 50.0
    assert futures.fetch("fetched") is answer and list(futures.waiting) == ["late"]
    clock.seconds = 100.0
    assert futures.fetch("fetched") is answer  # again: the first answer was lost
    clock.seconds = 111.0
    futures.finish("late", answer)
    assert [name in futures for name in ("fetched", "unfetched", "late")] == [False, True, True]
    with pytest.raises(KeyError):
        futures.fetch("fetched")
    clock.seconds = 3601.0
    futures.finish("unknown", answer)
    assert "unfetched" not in futures and "late" in futures

"""Answers to requests for samples: they wait, are fetched, and are forgotten."""

import pytest

pytest.importorskip("tinker")
from reinforce_ada_jax.serving.tinker import futures as futures_lib
from reinforce_ada_jax.serving.tinker.protocol import error_result


def test_answers_are_forgotten_some_time_after_they_were_fetched(monkeypatch):
    now = 0.0
    monkeypatch.setattr(futures_lib.time, "monotonic", lambda: now)
    futures, answer = futures_lib.SampleFutures(), error_result("none")
    for name in ("fetched", "unfetched", "late"):
        futures.add(name, "session")
    assert futures.fetch("fetched") is None and list(futures.waiting) == ["fetched", "unfetched", "late"]
    futures.finish("fetched", answer)
    futures.finish("fetched", error_result("a second answer"))
    futures.finish("unfetched", answer)
    now = 50.0
    assert futures.fetch("fetched") is answer and list(futures.waiting) == ["late"]
    now = 100.0
    assert futures.fetch("fetched") is answer  # again: the first answer was lost
    now = 111.0
    futures.finish("late", answer)
    assert [name in futures for name in ("fetched", "unfetched", "late")] == [False, True, True]
    with pytest.raises(KeyError):
        futures.fetch("fetched")
    now = 3601.0
    futures.finish("unknown", answer)
    assert "unfetched" not in futures and "late" in futures

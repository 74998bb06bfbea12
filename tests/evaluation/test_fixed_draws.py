"""Every problem gets its draws once, whatever is stored and however many are drawn at a time."""

import functools
import json
from concurrent.futures import Future

import numpy as np
import pytest

from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.evaluation import fixed_draws
from reinforce_ada_jax.evaluation.response_store import GradedResponse, ResponseStore
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.sampling.rollouts import RolloutCounts, Rollouts
from reinforce_ada_jax.types import Prompt, Response, Verdict
from tests import standins
from tests.evaluation.test_response_store import HEADER


def prompts(count):
    return [Prompt(str(i), "", str(i), np.zeros(1, np.int32)) for i in range(count)]


def scripted(queue):
    """Yields responses three at a time, the last first; the tokens say of what they are."""
    while requests := queue.take(3):
        yield [
            Response(r.prompt.id, r.draw, np.array([int(r.prompt.id), r.draw]), np.zeros(2), r.draw == 1)
            for r in reversed(requests)
        ]


def collecting(sample_fn):
    return functools.partial(collect, sample_fn=sample_fn)


def verify(pairs):
    return [Verdict(response.draw == int(prompt.id) % 2, 1.0) for prompt, response in pairs]


def verify_later(pairs):
    future = Future()
    future.set_result(verify(pairs))
    return future


@pytest.mark.parametrize("verify_fn", [verify, verify_later])
@pytest.mark.parametrize("at_once", [1, 64])
def test_draw(tmp_path, monkeypatch, verify_fn, at_once):
    """All responses are graded and stored, however many prompts are drawn at once."""
    standins.constants(monkeypatch, fixed_draws, RESPONSES_PER_SLOT=at_once)  # of 4 slots: 2 prompts at a time, or all
    progress = []
    with ResponseStore(tmp_path / "set.jsonl", HEADER) as store:
        drawn = fixed_draws.draw(
            prompts(5), collecting(scripted), verify_fn, 2, slots=4, store=store,
            decode=lambda tokens: "/".join(map(str, tokens)), on_progress=lambda *counts: progress.append(counts),
        )  # fmt: skip
    expected = {
        str(i): [GradedResponse(2, draw == 1, Verdict(draw == i % 2, 1.0)) for draw in range(2)] for i in range(5)
    }
    assert drawn == expected and list(drawn) == list(expected)
    assert ResponseStore(tmp_path / "set.jsonl", HEADER).complete(prompts(5), 2) == expected
    rows = [json.loads(line) for line in (tmp_path / "set.jsonl").read_text().splitlines()]
    assert {(row["prompt"], row["draw"]): row["response"] for row in rows} == {
        (str(i), draw): f"{i}/{draw}" for i in range(5) for draw in range(2)
    }
    assert progress == sorted(progress) and progress[-1][1] == 10


def test_what_is_graded_is_stored_while_the_rest_is_drawn(tmp_path):
    def dying(queue):
        for number, finished in enumerate(scripted(queue)):
            if number == 2:
                raise KeyboardInterrupt
            yield finished

    with pytest.raises(KeyboardInterrupt), ResponseStore(tmp_path / "set.jsonl", HEADER) as store:
        fixed_draws.draw(prompts(5), collecting(dying), verify, 2, slots=4, store=store, on_progress=lambda *_: None)
    # Six responses came back: those of three prompts.
    assert list(ResponseStore(tmp_path / "set.jsonl", HEADER).complete(prompts(5), 2)) == ["0", "1", "2"]


def test_the_progress_line_has_tokens_before_a_response_ends(tmp_path, monkeypatch):
    """Three windows of 64 tokens in 2 s each, without a response; then the counts of another chunk begin."""
    said, clock = [], iter(range(0, 100, 2))
    monkeypatch.setattr(fixed_draws.time, "monotonic", lambda: next(clock))
    rollouts = object.__new__(Rollouts)  # no engine: the draws are scripted
    rollouts.counts = RolloutCounts()
    progress = Progress(1, 0, quiet=True)
    monkeypatch.setattr(progress, "reach", lambda done, text="": said.append((done, text)))

    def draw(drawn_prompts, *, store, on_progress):
        for _ in range(3):
            rollouts.counts.tokens += 64
            on_progress(0, 0)
        rollouts.counts = RolloutCounts(tokens=10)
        on_progress(1, 2)

    with ResponseStore(tmp_path / "set.jsonl", HEADER) as store:
        fixed_draws.fill(store, prompts(1), draw, progress, "saved", rollouts, "set: ")
    assert said == [
        (0, "set: 0 responses"),
        (0, "set: 0 responses"),
        (0, "set: 0 responses, 32 tokens/s"),
        (0, "set: 0 responses, 32 tokens/s"),
        (1, "set: 2 responses"),
        (1, ""),
    ]

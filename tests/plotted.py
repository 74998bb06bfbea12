"""Work directories as training leaves them, without training."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def make_run(
    workdir: pathlib.Path,
    tokens: Sequence[int],
    averages: Mapping[int, float],
    updates_per_iteration: int = 1,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Sequence[float | None]] | None = None,
    problems: str = "",
) -> pathlib.Path:
    """A work directory of len(tokens) iterations.

    `averages`: of an evaluation by iteration, 0 among them or not. `metrics`: further keys, a value an iteration; None:
    that line lacks the key. `problems`: hash of those of the benchmark, in evaluations/.
    """
    workdir.mkdir(parents=True)
    saved = {
        "collection": {"prompts_per_iteration": 8 * updates_per_iteration},
        "learning": {"prompts_per_update": 8},
        "evaluation": {"samples": 16},
        **(config or {}),
    }
    (workdir / "config.json").write_text(json.dumps(saved))
    evaluations = {
        iteration: {"evaluation/heldout/avg": average, "evaluation/heldout/avg_standard_error": 0.01}
        for iteration, average in averages.items()
    }
    (workdir / "evaluations").mkdir()
    named = {"evaluation/heldout/problems_hash": problems} if problems else {}
    for iteration, result in evaluations.items():
        saved_result = {"iteration": iteration} | result | named
        (workdir / "evaluations" / f"{iteration:06d}.json").write_text(json.dumps(saved_result))
    lines = []
    for i, count in enumerate(tokens, start=1):
        line = {
            "iteration": i, "reward/first_round": i / 10, "collection/tokens": count,
            "collection/zero_signal_share": 0.5 if i == 1 else 0.25, **evaluations.get(i, {}),
        }  # fmt: skip
        further = {key: values[i - 1] for key, values in (metrics or {}).items() if values[i - 1] is not None}
        lines.append(line | further)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workdir


def sample(problem: str = "1 + 1", response: str = r"It is \boxed{2}.", **changes: Any) -> dict[str, Any]:
    """A line of samples/<iteration>.jsonl."""
    return {
        "prompt": "p", "problem": problem, "answer": "2", "draw": 0, "response": response, "tokens": 5,
        "truncated": False, "correct": True, "reward": 1.0, "reason": "", "advantage": 0.5, **changes,
    }  # fmt: skip


def write_samples(workdir: pathlib.Path, iteration: int, lines: Sequence[Mapping[str, Any]]) -> pathlib.Path:
    """samples/<iteration>.jsonl."""
    file = workdir / "samples" / f"{iteration:06d}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file

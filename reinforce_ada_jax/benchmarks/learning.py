"""`benchmark learning`: held-out accuracy of every strategy on the built-in task, at equal updates and equal tokens.

Every run is `train` with configs/tiny.py, in a process and a work directory of its own: after an interruption the same
command continues, and a finished run is not repeated. Nothing is timed.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import flags

from reinforce_ada_jax.reporting import drawing
from reinforce_ada_jax.reporting.history import History, at_tokens, load

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "tiny.py"
BENCHMARK = "heldout"
UPDATES = 100
# Token budgets: about those of 100 updates of grpo with n = 4, and of balance.
BUDGETS = (64_000, 150_000, 335_000)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One algorithm.

    Attributes:
      name: in tables, figures and names of work directories.
      overrides: configuration keys and values that differ from configs/tiny.py.
      updates: number that generates about as many tokens as the others; at least `UPDATES`.
    """

    name: str
    overrides: dict[str, Any]
    updates: int


ENTRIES = (
    Entry("grpo-4", {"collection.strategy": "grpo", "collection.group_size": 4}, 550),
    Entry("grpo-8", {"collection.strategy": "grpo", "collection.group_size": 8}, 275),
    Entry("grpo-16", {"collection.strategy": "grpo", "collection.group_size": 16}, 150),
    Entry("dapo", {"collection.strategy": "dapo"}, 160),
    Entry("positive", {"collection.strategy": "positive"}, 250),
    Entry("balance", {"collection.strategy": "balance"}, 100),
    Entry("estimate-ema", {"collection.strategy": "estimate", "collection.objective": "log"}, 275),
    Entry(
        "estimate-value",
        {"collection.strategy": "estimate", "collection.objective": "log", "estimator.kind": "value"},
        275,
    ),
    Entry("ngu", {"collection.strategy": "ngu"}, 460),
)


def train(entry: Entry, seed: int, workdir: pathlib.Path) -> None:
    """Trains one run to its end on one core; an unfinished one is resumed.

    Raises:
      RuntimeError: it failed; the message has the end of its output.
    """
    settings = {"seed": seed, "iterations": entry.updates, "logging.tensorboard": False, **entry.overrides}
    command = [
        sys.executable, "-m", "reinforce_ada_jax.train", f"--config={CONFIG}", f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in settings.items()),
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{entry.name}, seed {seed} ended with code {result.returncode}:\n{result.stderr[-2000:]}")


def train_all(
    entries: Sequence[Entry], seeds: Sequence[int], folder: pathlib.Path, jobs: int
) -> dict[str, list[History]]:
    """Trains every entry with every seed, `jobs` at a time; returns the histories by name of the entry."""
    runs = [(entry, seed) for seed in seeds for entry in entries]

    def one(run: tuple[Entry, int]) -> History:
        entry, seed = run
        workdir = folder / f"{entry.name}-{seed}"
        train(entry, seed, workdir)
        history = load(workdir)
        average = history.evaluations[BENCHMARK].average[-1]
        print(f"{entry.name}, seed {seed}: {history.tokens[-1]:,.0f} tokens, avg {average:.3f}", flush=True)
        return history

    with ThreadPoolExecutor(jobs) as pool:
        histories = list(pool.map(one, runs))
    return {
        entry.name: [history for history, (trained, _) in zip(histories, runs, strict=True) if trained is entry]
        for entry in entries
    }


def at_updates(history: History, updates: int) -> tuple[float, float]:
    """Returns (average, tokens generated) after a number of updates."""
    accuracy = history.evaluations[BENCHMARK]
    averages = float(np.interp(updates, accuracy.updates, accuracy.average))
    return averages, float(np.interp(updates, accuracy.updates, accuracy.tokens))


def summary(histories: dict[str, list[History]]) -> dict[str, Any]:
    """Returns means and standard deviations over seeds, after `UPDATES` updates and at each token budget.

    A budget that a run did not reach gives None, never an extrapolated number.
    """

    def spread(values: Sequence[float]) -> list[float]:
        return [float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0]

    result = {}
    for name, runs in histories.items():
        reached = [at_updates(run, UPDATES) for run in runs]
        early = [float(run.metrics["collection/zero_signal_share"][:25].mean()) for run in runs]
        result[name] = {
            f"avg_at_{UPDATES}_updates": spread([average for average, _ in reached]),
            f"tokens_at_{UPDATES}_updates": spread([tokens for _, tokens in reached]),
            "zero_signal_1_25": spread(early),
            "avg_at_tokens": {
                f"{budget:.0f}": spread([at_tokens(run, BENCHMARK, budget) for run in runs])
                if all(run.tokens[-1] >= budget for run in runs)
                else None
                for budget in BUDGETS
            },
        }
    return result


def table(result: dict[str, Any]) -> str:
    """Returns the summary as a Markdown table."""

    def cell(values: list[float] | None) -> str:
        return "not reached" if values is None else f"{values[0]:.3f} ± {values[1]:.3f}"

    head = ["", f"avg@16 at {UPDATES} updates", "tokens by then", "zero-signal 1-25"]
    rows = [[*head, *(f"at {budget / 1000:,.0f}k tokens" for budget in BUDGETS)]]
    rows.append(["---"] * len(rows[0]))
    for name, numbers in result.items():
        rows.append([
            name, cell(numbers[f"avg_at_{UPDATES}_updates"]), f"{numbers[f'tokens_at_{UPDATES}_updates'][0]:,.0f}",
            f"{numbers['zero_signal_1_25'][0]:.2f}",
            *(cell(numbers["avg_at_tokens"][f"{budget:.0f}"]) for budget in BUDGETS),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def figure(histories: dict[str, list[History]], file: pathlib.Path) -> None:
    """Draws held-out accuracy against updates and against tokens: mean and range over seeds."""
    most_tokens = max(run.tokens[-1] for runs in histories.values() for run in runs)

    updates, tokens = [], []
    for style, (name, runs) in enumerate(histories.items()):
        accuracies = [run.evaluations[BENCHMARK] for run in runs]
        last = min(run.tokens[-1] for run in runs)
        by_updates, by_tokens = np.linspace(0, UPDATES, 9), np.linspace(0, last, max(3, round(21 * last / most_tokens)))
        for curves, x, averages in (
            (updates, by_updates, [np.interp(by_updates, one.updates, one.average) for one in accuracies]),
            (tokens, by_tokens, [np.interp(by_tokens, one.tokens, one.average) for one in accuracies]),
        ):
            band = np.min(averages, axis=0), np.max(averages, axis=0)
            curves.append(drawing.Curve(name, style, x, np.mean(averages, axis=0), band=band))
    panels = [
        drawing.Panel(BENCHMARK, "updates", "avg@16", updates), drawing.Panel(BENCHMARK, "tokens", "avg@16", tokens),
    ]  # fmt: skip
    drawing.draw(panels, file, columns=2)


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Trains, writes learning.png, learning.svg and learning.md into --output, and returns the summary by entry.

    Raises:
      ValueError: an unknown algorithm.
    """
    known = {entry.name: entry for entry in ENTRIES}
    unknown = [name for name in options.algorithms if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(known)}.")
    folder = pathlib.Path(options.output)
    entries = [known[name] for name in options.algorithms or known]
    histories = train_all(entries, range(options.seeds), folder, options.jobs)
    result = summary(histories)
    figure(histories, folder / "learning")
    text = table(result)
    (folder / "learning.md").write_text(text + "\n")
    print(text, flush=True)
    return result

"""Which algorithm learns what from how much: the strategies on the built-in task, at equal updates and equal tokens.

Every run is `train` with configs/tiny.py, in a process and a work directory of its own: a benchmark that was
interrupted goes on where it stopped, and a finished run is not made again. Nothing is timed.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import matplotlib as mpl
import numpy as np

from reinforce_ada_jax.reporting.history import History, at_tokens, load

mpl.use("agg")

from matplotlib import pyplot, ticker

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "tiny.py"
BENCHMARK = "heldout"
UPDATES = 100


@dataclasses.dataclass(frozen=True)
class Entry:
    """One algorithm.

    Attributes:
      name: as tables and figures call it; its work directories too.
      overrides: configuration keys and values beside those of configs/tiny.py.
      updates: so many that it generates about as many tokens as the others; at least `UPDATES`.
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
    """One run to its end, with one core; a run that is there goes on.

    Raises:
      RuntimeError: it failed; the end of what it said is in the message.
    """
    flags = {"seed": seed, "iterations": entry.updates, "logging.tensorboard": False, **entry.overrides}
    command = [
        sys.executable, "-m", "reinforce_ada_jax.train", f"--config={CONFIG}", f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in flags.items()),
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{entry.name}, seed {seed} ended with code {result.returncode}:\n{result.stderr[-2000:]}")


def train_all(
    entries: Sequence[Entry], seeds: Sequence[int], folder: pathlib.Path, jobs: int, say: Callable[[str], None]
) -> dict[str, list[History]]:
    """Every entry with every seed, `jobs` at a time; their histories by name of the entry."""
    runs = [(entry, seed) for seed in seeds for entry in entries]

    def one(run: tuple[Entry, int]) -> History:
        entry, seed = run
        workdir = folder / f"{entry.name}-{seed}"
        train(entry, seed, workdir)
        history = load(workdir)
        average = history.evaluations[BENCHMARK][2][-1]
        say(f"{entry.name}, seed {seed}: {history.tokens[-1]:,.0f} tokens, avg {average:.3f}")
        return history

    with ThreadPoolExecutor(jobs) as pool:
        histories = list(pool.map(one, runs))
    return {
        entry.name: [history for history, (of, _) in zip(histories, runs, strict=True) if of is entry]
        for entry in entries
    }


def at_updates(history: History, updates: float) -> tuple[float, float]:
    """(average, tokens spent) after so many updates."""
    evaluated, tokens, average, _ = history.evaluations[BENCHMARK]
    return float(np.interp(updates, evaluated, average)), float(np.interp(updates, evaluated, tokens))


def summary(histories: dict[str, list[History]], budgets: Sequence[float]) -> dict[str, Any]:
    """Means and standard deviations over seeds: the average after `UPDATES` updates, and at each token budget.

    A budget that a run did not reach gives no number (None), never an extrapolated one.
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
                for budget in budgets
            },
        }
    return result


def table(result: dict[str, Any], budgets: Sequence[float]) -> str:
    """The summary as a Markdown table."""

    def cell(values: list[float] | None) -> str:
        return "not reached" if values is None else f"{values[0]:.3f} ± {values[1]:.3f}"

    head = ["", f"avg@16 at {UPDATES} updates", "tokens by then", "zero-signal 1-25"]
    rows = [[*head, *(f"at {budget / 1000:,.0f}k tokens" for budget in budgets)]]
    rows.append(["---"] * len(rows[0]))
    for name, numbers in result.items():
        rows.append([
            name, cell(numbers[f"avg_at_{UPDATES}_updates"]), f"{numbers[f'tokens_at_{UPDATES}_updates'][0]:,.0f}",
            f"{numbers['zero_signal_1_25'][0]:.2f}",
            *(cell(numbers["avg_at_tokens"][f"{budget:.0f}"]) for budget in budgets),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def figure(histories: dict[str, list[History]], file: pathlib.Path) -> None:
    """Held-out accuracy against updates and against tokens: mean over seeds, and from the worst to the best of them."""
    canvas, panels = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained", sharey=True)
    markers, lines = "osv^D*PXh", ("-", "--", ":", "-.")
    most_tokens = max(run.tokens[-1] for runs in histories.values() for run in runs)
    for index, (name, runs) in enumerate(histories.items()):
        style = {
            "color": f"C{index}", "marker": markers[index % len(markers)], "linestyle": lines[index % len(lines)],
            "markersize": 5, "linewidth": 1.3,
        }  # fmt: skip
        for panel, column, last in ((panels[0], 0, UPDATES), (panels[1], 1, min(run.tokens[-1] for run in runs))):
            grid = np.linspace(0, last, 9 if column == 0 else max(3, round(21 * last / most_tokens)))
            curves = [
                np.interp(grid, run.evaluations[BENCHMARK][column], run.evaluations[BENCHMARK][2]) for run in runs
            ]
            panel.plot(grid, np.mean(curves, axis=0), label=name, **style)
            panel.fill_between(grid, np.min(curves, axis=0), np.max(curves, axis=0), color=f"C{index}", alpha=0.1)
    panels[0].set(xlabel="updates", ylabel=f"{BENCHMARK} avg@16")
    panels[1].set(xlabel="generated tokens")
    panels[1].xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    for panel in panels:
        panel.grid(alpha=0.3)
    panels[1].legend(frameon=False, ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(file, dpi=110)
    pyplot.close(canvas)


def measure(
    folder: pathlib.Path,
    *,
    seeds: int,
    jobs: int,
    names: Sequence[str],
    budgets: Sequence[float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Trains, and writes learning.png and learning.md into `folder`; the summary by entry.

    Raises:
      ValueError: a name that is no entry's.
    """
    known = {entry.name: entry for entry in ENTRIES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(known)}.")
    entries = [known[name] for name in names or known]
    histories = train_all(entries, range(seeds), folder, jobs, say)
    result = summary(histories, budgets)
    figure(histories, folder / "learning.png")
    text = table(result, budgets)
    (folder / "learning.md").write_text(text + "\n")
    say(text)
    return result

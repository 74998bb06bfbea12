"""`bench.learning`: held-out accuracy of algorithms at equal updates, equal tokens and equal time.

The task `cipher` is the built-in one (configs/tiny.py); `words` is the tutorial's (configs/word_problems.py), whose
model, problems and prompts docs/tutorial.md makes. Every run is `train`, in a process and a work directory of its own:
after an interruption the same command continues, and a finished run is not repeated. Seconds are those of collecting
and updating, compilation included; compare them within one command on an idle machine.
"""

import dataclasses
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import flags
from scipy.special import stdtrit

from bench import command_line
from reinforce_ada_jax.analysis.tables import markdown
from reinforce_ada_jax.reporting import plotting
from reinforce_ada_jax.reporting.history import History, at_tokens, load
from reinforce_ada_jax.reporting.panels import Curve, Panel

BENCHMARK = "heldout"
UPDATES = 100


@dataclasses.dataclass(frozen=True)
class Task:
    """Problems to learn.

    Attributes:
      config: name of a packaged configuration.
      budgets: response tokens at which averages are compared.
      threshold: held-out average, for the cost of reaching it.
      samples: responses per problem of an evaluation.
      seconds: most seconds of the figure.
      every: updates between evaluations.
      learning_rate: of the entries; None: each entry's own.
    """

    config: str
    budgets: tuple[int, ...]
    threshold: float
    samples: int
    seconds: float
    every: int
    learning_rate: float | None = None


TASKS = {
    "cipher": Task("tiny", (30_000, 46_000, 70_000), 0.9, 16, 60.0, 10),
    "words": Task("word_problems", (60_000, 120_000, 200_000), 0.6, 8, 240.0, 20, learning_rate=5e-4),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One algorithm.

    Attributes:
      name: in tables, figures and names of work directories.
      overrides: settings of the `collection` section that differ from the task's configuration.
      learning_rate: the best of 1e-3, 2e-3 and 4e-3 on the task `cipher`, by one seed each; names end with others.
      updates: on the task `cipher`, at least those that generate its largest budget; at least `UPDATES`.
    """

    name: str
    overrides: dict[str, Any]
    learning_rate: float
    updates: int = UPDATES


SINGLES = {"strategy": "positive", "objective": "log", "samples_per_round": 1, "max_rounds": 16, "speculative": False}
ENTRIES = (
    Entry("exact-log", SINGLES, 2e-3, 330),
    Entry("exact-log-1e-3", SINGLES, 1e-3, 330),
    Entry("exact-log-ahead", {**SINGLES, "speculative": True}, 1e-3),
    Entry("grpo-4", {"strategy": "grpo", "group_size": 4}, 4e-3, 115),
    Entry("grpo-4-1e-3", {"strategy": "grpo", "group_size": 4}, 1e-3, 115),
    Entry("grpo-8", {"strategy": "grpo", "group_size": 8}, 2e-3),
    Entry("grpo-16", {"strategy": "grpo", "group_size": 16}, 4e-3),
    Entry("balance", {"strategy": "balance"}, 2e-3),
    Entry("balance-1e-3", {"strategy": "balance"}, 1e-3),
    Entry("stratified", {"strategy": "balance", "correction": "stratified"}, 2e-3),
    Entry("ngu", {"strategy": "ngu"}, 1e-3),
    Entry("estimate", {"strategy": "estimate", "objective": "log"}, 2e-3),
    Entry("dapo", {"strategy": "dapo"}, 2e-3),
    Entry("maxrl", {"strategy": "grpo", "group_size": 8, "objective": "maxrl"}, 2e-3),
)
# Entries of the figure where there are more than it can name.
DRAWN = ("exact-log-1e-3", "exact-log-ahead", "grpo-4", "grpo-16", "balance", "maxrl")


def train(task: Task, entry: Entry, seed: int, workdir: pathlib.Path) -> None:
    """Trains one run to its end on one core; an unfinished one is resumed.

    Raises:
      RuntimeError: it failed; the message has the end of its output.
    """
    settings = {"seed": seed, "iterations": entry.updates, "learning.learning_rate": entry.learning_rate}
    settings |= {"logging.trackers": "", "evaluation.every": task.every, "checkpoint.every": entry.updates}
    settings |= {f"collection.{key}": value for key, value in entry.overrides.items()}
    command = [
        sys.executable, "-m", "reinforce_ada_jax.train", f"--config={task.config}", f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in settings.items()),
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{entry.name}, seed {seed} ended with code {result.returncode}:\n{result.stderr[-2000:]}")


def train_all(
    task: Task, entries: Sequence[Entry], seeds: Sequence[int], folder: pathlib.Path, jobs: int
) -> dict[str, list[History]]:
    """Trains every entry with every seed, `jobs` at a time; returns the histories by name of the entry."""
    runs = [(entry, seed) for seed in seeds for entry in entries]

    def one(run: tuple[Entry, int]) -> History:
        entry, seed = run
        workdir = folder / f"{entry.name}-{seed}"
        train(task, entry, seed, workdir)
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


def cost_of(history: History, average: float) -> tuple[float, float, float]:
    """Returns (updates, tokens, seconds) until the held-out average is reached, interpolated; inf if it never is."""
    accuracy = history.evaluations[BENCHMARK]
    reached = np.flatnonzero(accuracy.average >= average)
    if not reached.size:
        return math.inf, math.inf, math.inf
    last = int(reached[0])
    between = slice(max(last - 1, 0), last + 1)
    updates = float(np.interp(average, accuracy.average[between], accuracy.updates[between]))
    at = np.array([updates])
    return updates, float(history.at(at, history.tokens)[0]), float(history.at(at, history.seconds)[0])


def interval(values: Sequence[float]) -> list[float]:
    """Returns the mean over seeds, and half of its 95 % interval by Student's distribution; nan for one seed."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return [float(np.mean(values)), float(stdtrit(len(values) - 1, 0.975)) * error]


def summary(task: Task, histories: dict[str, list[History]]) -> dict[str, Any]:
    """Returns means over seeds with their 95 % intervals, at equal updates, tokens and cost.

    A budget that a run did not reach gives None, never an extrapolated number; so does the threshold. The entropy
    at the end is the mean of `collection/entropy` over the last ten iterations.
    """
    result = {}
    for name, runs in histories.items():
        reached = [at_updates(run, UPDATES) for run in runs]
        costs = np.array([cost_of(run, task.threshold) for run in runs])
        last = [max(run.curves[BENCHMARK]["pass"].items())[1] for run in runs]
        result[name] = {
            f"avg_at_{UPDATES}_updates": interval([average for average, _ in reached]),
            f"tokens_at_{UPDATES}_updates": interval([tokens for _, tokens in reached]),
            "avg_at_tokens": {
                f"{budget:.0f}": interval([at_tokens(run, BENCHMARK, budget) for run in runs])
                if all(run.tokens[-1] >= budget for run in runs)
                else None
                for budget in task.budgets
            },
            "tokens_to_threshold": interval(costs[:, 1].tolist()) if np.isfinite(costs).all() else None,
            "seconds_to_threshold": interval(costs[:, 2].tolist()) if np.isfinite(costs).all() else None,
            "reached_threshold": int(np.isfinite(costs[:, 0]).sum()),
            "pass_at_end": interval([by_k[max(by_k)] for by_k in last]),
            "entropy_at_end": interval([float(np.nanmean(run.metrics["collection/entropy"][-10:])) for run in runs]),
        }
    return result


def table(task: Task, result: dict[str, Any]) -> str:
    """Returns the summary as a Markdown table."""

    def cell(values: list[float] | None, digits: int = 3, otherwise: str = "not reached") -> str:
        return otherwise if values is None else f"{values[0]:,.{digits}f} ± {values[1]:,.{digits}f}"

    header = [
        "",
        *(f"avg@{task.samples} at {budget / 1000:,.0f}k tokens" for budget in task.budgets),
        f"at {UPDATES} updates",
        "tokens by then",
        f"tokens to {task.threshold}",
        f"seconds to {task.threshold}",
        f"pass@{task.samples} at the end",
        "entropy at the end",
    ]
    rows = []
    for name, numbers in result.items():
        some = f"{numbers['reached_threshold']} of the seeds"
        rows.append([
            name,
            *(cell(numbers["avg_at_tokens"][f"{budget:.0f}"]) for budget in task.budgets),
            cell(numbers[f"avg_at_{UPDATES}_updates"]), f"{numbers[f'tokens_at_{UPDATES}_updates'][0]:,.0f}",
            cell(numbers["tokens_to_threshold"], 0, some), cell(numbers["seconds_to_threshold"], 1, some),
            cell(numbers["pass_at_end"]), cell(numbers["entropy_at_end"]),
        ])  # fmt: skip
    return markdown(header, rows)


def figure(task: Task, histories: dict[str, list[History]], file: pathlib.Path) -> None:
    """Draws held-out accuracy against updates, tokens and seconds of training: the mean, and the range over seeds."""
    if len(histories) > plotting.MOST_NAMED:
        histories = {name: histories[name] for name in DRAWN if name in histories}
    panels: dict[str, list[Curve]] = {"updates": [], "tokens": [], "seconds": []}
    for style, (name, runs) in enumerate(histories.items()):
        accuracies = [run.evaluations[BENCHMARK] for run in runs]
        seconds = [run.at(one.updates, run.seconds) for run, one in zip(runs, accuracies, strict=True)]
        axes = {
            "updates": ([one.updates for one in accuracies], float(UPDATES)),
            "tokens": ([one.tokens for one in accuracies], float(task.budgets[-1])),
            "seconds": (seconds, task.seconds),
        }
        for label, (found, most) in axes.items():
            x = np.linspace(0, min(most, *(float(one[-1]) for one in found)), 21)
            averages = [np.interp(x, one, accuracy.average) for one, accuracy in zip(found, accuracies, strict=True)]
            band = np.min(averages, axis=0), np.max(averages, axis=0)
            panels[label].append(Curve(name, style, x, np.mean(averages, axis=0), band=band))
    drawn = [Panel(BENCHMARK, label, f"avg@{task.samples}", curves) for label, curves in panels.items()]
    plotting.draw(drawn, file, columns=3)


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
    task = TASKS[options.task]
    entries = [
        dataclasses.replace(
            entry,
            learning_rate=options.learning_rate or task.learning_rate or entry.learning_rate,
            updates=options.updates or (entry.updates if task.learning_rate is None else UPDATES),
        )
        for entry in (known[name] for name in options.algorithms or known)
    ]
    histories = train_all(task, entries, range(options.seeds), folder, options.jobs)
    result = summary(task, histories)
    figure(task, histories, folder / "learning")
    text = table(task, result)
    (folder / "learning.md").write_text(text + "\n")
    print(text, flush=True)
    return result


if __name__ == "__main__":
    command_line.start("learning", run)

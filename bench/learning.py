"""`bench.learning`: held-out accuracy of algorithms at equal updates, equal tokens and equal time.

The task `cipher` is the built-in one (configs/tiny.py), with one right response for each word; in `second_half` many
responses are right (examples/second_half.py); `words` is the tutorial's (configs/word_problems.py), whose model,
problems and prompts docs/tutorial.md makes; `maze` is MaxRL's (configs/maze.py), with mazes and a warm start as in
docs/maze.md; `shortest_path` and `spell_backward` are generators of reasoning-gym, and examples/reasoning_gym_models.py
makes their problems and models (docs/reasoning_gym.md); in `sums` and `char_count` SmolLM2-135M learns (docs/smollm2.md
has the commands for its files; a run needs 4 GB of memory, and half an hour or more). Every run is `train`, in a
process and a work directory of its own: after an interruption the same command continues, and a finished run is not
repeated. Every algorithm has a run before any has two. Seconds are those of collecting and updating, without waiting
for programs to compile; compare them within one command on an idle machine.

Below its table each task has the predictions of `simulate` for the methods, next to their outcomes
(bench/predictions.py). Methods that choose prompts are left out there, because they change the pass rates.

With several --learning_rates each algorithm gets the one that is best on the task, by a trial of each rate with a seed
that is not reported (`TRIAL_SEED`). Its trials are compared at the middle budget of tokens, or at the tokens of the
shortest one if that generated fewer.
"""

import dataclasses
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from scipy.special import stdtrit

from bench import command_line, predictions
from bench.methods import DRAWN, ENTRIES, TASKS, Entry, Task
from bench.predictions import measured_rates
from reinforce_ada_jax.analysis.tables import markdown
from reinforce_ada_jax.config import resolve
from reinforce_ada_jax.config.config_files import packaged
from reinforce_ada_jax.reporting import plotting
from reinforce_ada_jax.reporting.history import CONFIG, History, at_tokens, load, read_json
from reinforce_ada_jax.reporting.panels import Curve, Panel
from reinforce_ada_jax.reporting.writers import read_metrics

BENCHMARK = "heldout"
TRIAL_SEED = 1000


class Run(NamedTuple):
    """One run of an entry, on the task of this name."""

    task: str
    entry: Entry
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.entry.name}, learning rate {self.entry.learning_rate:g}, seed {self.seed}"

    def workdir(self, folder: pathlib.Path) -> pathlib.Path:
        """Returns the work directory within the folder of all runs."""
        return folder / self.task / f"{self.entry.name}-{self.entry.learning_rate:g}-{self.seed}"


def train(run: Run, workdir: pathlib.Path) -> None:
    """Trains a run to its end on one core; an unfinished one is resumed, and a finished one is left alone.

    Raises:
      RuntimeError: it failed, or the work directory has a run of an algorithm with other settings; the message has the
        end of its output.
    """
    task, entry = TASKS[run.task], run.entry
    lines = read_metrics(workdir)
    if lines and lines[-1]["iteration"] >= entry.updates and f"evaluation/{BENCHMARK}/avg" in lines[-1]:
        saved = read_json(workdir / CONFIG)["collection"]
        wanted = packaged(task.config).to_dict()["collection"] | entry.overrides
        if all(str(saved.get(key)) == str(value) for key, value in wanted.items()):
            return  # otherwise `train` says which settings differ
    settings = {"seed": run.seed, "iterations": entry.updates, "learning.learning_rate": entry.learning_rate}
    settings |= {"logging.trackers": "", "evaluation.every": task.every, "checkpoint.every": entry.updates}
    settings |= task.settings
    settings |= {f"collection.{key}": value for key, value in entry.overrides.items()}
    command = [
        sys.executable, "-m", "reinforce_ada_jax.train", f"--config={task.config}", f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in settings.items()),
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{run} ended with code {result.returncode}:\n{result.stderr[-2000:]}")


def train_all(runs: Sequence[Run], folder: pathlib.Path, jobs: int) -> list[History]:
    """Trains the runs in this order, `jobs` at a time; returns their histories."""

    def one(run: Run) -> History:
        workdir = run.workdir(folder)
        train(run, workdir)
        history = load(workdir)
        average = history.evaluations[BENCHMARK].average[-1]
        print(f"{run}: {history.tokens[-1]:,.0f} tokens, avg {average:.3f}", flush=True)
        return history

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, runs))


def with_best_rates(
    planned: Sequence[tuple[str, Entry]], rates: Sequence[float], folder: pathlib.Path, jobs: int
) -> list[tuple[str, Entry]]:
    """Returns the entries with their tasks, each with the best of several learning rates, by one trial of each rate.

    A trial has the entry's updates times the middle budget, divided by the largest budget. The trials of an entry are
    compared at equal tokens: the most, up to the middle budget, that all of them generated.
    """
    shares = {name: task.budgets[1] / task.budgets[-1] for name, task in TASKS.items()}
    trials = [
        Run(
            task,
            dataclasses.replace(entry, learning_rate=rate, updates=math.ceil(entry.updates * shares[task])),
            TRIAL_SEED,
        )
        for task, entry in planned
        for rate in rates
    ]
    histories, best = train_all(trials, folder, jobs), []
    for index, (task, entry) in enumerate(planned):
        tried = histories[index * len(rates) : (index + 1) * len(rates)]
        tokens = min(TASKS[task].budgets[1], *(np.nanmax(one.evaluations[BENCHMARK].tokens) for one in tried))
        averages = [at_tokens(one, BENCHMARK, tokens) for one in tried]
        best.append((task, dataclasses.replace(entry, learning_rate=rates[int(np.argmax(averages))])))
    return best


def at_updates(history: History, updates: int) -> tuple[float, float]:
    """Returns (average, tokens generated) after a number of updates."""
    accuracy = history.evaluations[BENCHMARK]
    averages = float(np.interp(updates, accuracy.updates, accuracy.average))
    return averages, float(np.interp(updates, accuracy.updates, accuracy.tokens))


def at_seconds(history: History, seconds: float) -> float:
    """Interpolates the average after these seconds of collecting and updating."""
    accuracy = history.evaluations[BENCHMARK]
    return float(np.interp(seconds, history.at(accuracy.updates, history.seconds), accuracy.average))


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


def _at_end(history: History, metric: str) -> float:
    return float(np.nanmean(history.metrics[metric][-10:]))


def summary(task: Task, histories: dict[str, list[History]]) -> dict[str, Any]:
    """Returns means over seeds with their 95 % intervals, at equal updates, tokens, time and cost.

    A budget that a run did not reach gives None, never an extrapolated number; so do the updates, the time and the
    threshold. The entropy and the length of a response at the end are means of their metrics over the last ten
    iterations.
    """
    result = {}
    for name, runs in histories.items():
        ended = all(run.updates[-1] >= task.updates for run in runs)
        reached = [at_updates(run, task.updates) for run in runs]
        costs = np.array([cost_of(run, task.threshold) for run in runs])
        last = [max(run.curves[BENCHMARK]["pass"].items())[1] for run in runs]
        result[name] = {
            "learning_rate": runs[0].config["learning"]["learning_rate"],
            f"avg_at_{task.updates}_updates": interval([average for average, _ in reached]) if ended else None,
            f"tokens_at_{task.updates}_updates": interval([tokens for _, tokens in reached]) if ended else None,
            "avg_at_tokens": {
                f"{budget:.0f}": interval([at_tokens(run, BENCHMARK, budget) for run in runs])
                if all(run.tokens[-1] >= budget for run in runs)
                else None
                for budget in task.budgets
            },
            "avg_at_time": interval([at_seconds(run, task.time) for run in runs])
            if all(run.seconds[-1] >= task.time for run in runs)
            else None,
            "tokens_to_threshold": interval(costs[:, 1].tolist()) if np.isfinite(costs).all() else None,
            "seconds_to_threshold": interval(costs[:, 2].tolist()) if np.isfinite(costs).all() else None,
            "reached_threshold": int(np.isfinite(costs[:, 0]).sum()),
            "pass_at_end": interval([by_k[max(by_k)] for by_k in last]),
            "entropy_at_end": interval([_at_end(run, "collection/entropy") for run in runs]),
            "length_at_end": interval([_at_end(run, "completions/mean_length") for run in runs]),
        }
    return result


def table(task: Task, result: dict[str, Any]) -> str:
    """Returns the summary as a Markdown table."""

    def cell(values: list[float] | None, digits: int = 3, otherwise: str = "not reached") -> str:
        if values is None:
            return otherwise
        return " ± ".join(f"{value:,.{digits}f}" for value in values if not math.isnan(value))

    header = [
        "",
        "learning rate",
        *(f"avg@{task.samples} at {budget / 1000:,.0f}k tokens" for budget in task.budgets),
        f"at {task.updates} updates",
        "tokens by then",
        f"at {task.time:g} s",
        f"tokens to {task.threshold}",
        f"seconds to {task.threshold}",
        f"pass@{task.samples} at the end",
        "entropy at the end",
        "tokens of a response at the end",
    ]
    rows = []
    for name, numbers in result.items():
        some = f"{numbers['reached_threshold']} of the seeds"
        spent = numbers[f"tokens_at_{task.updates}_updates"]
        rows.append([
            name, f"{numbers['learning_rate']:g}",
            *(cell(numbers["avg_at_tokens"][f"{budget:.0f}"]) for budget in task.budgets),
            cell(numbers[f"avg_at_{task.updates}_updates"]), cell(spent and spent[:1], 0),
            cell(numbers["avg_at_time"]),
            cell(numbers["tokens_to_threshold"], 0, some), cell(numbers["seconds_to_threshold"], 1, some),
            cell(numbers["pass_at_end"]), cell(numbers["entropy_at_end"]), cell(numbers["length_at_end"], 1),
        ])  # fmt: skip
    return markdown(header, rows)


def prediction_table(
    name: str, result: dict[str, Any], histories: dict[str, list[History]], folder: pathlib.Path
) -> str:
    """Returns a Markdown table of predictions and outcomes of a task's methods.

    It is "" where all methods choose prompts, and for a task without predictions.
    """
    task = TASKS[name]
    configs = {entry: resolve(runs[0].config) for entry, runs in histories.items()}
    sections = {entry: each.collection for entry, each in configs.items() if each.collection.selection == "shuffled"}
    if not sections or not task.predicts:
        return ""
    prompts = next(iter(configs.values())).data.prompts
    rates = measured_rates(task.config, {"data.prompts": prompts, **task.settings}, folder / name)
    at_budget = {entry: result[entry]["avg_at_tokens"][f"{task.budgets[1]:.0f}"] for entry in sections}
    return predictions.table(
        {entry: predictions.predicted(section, rates) for entry, section in sections.items()},
        histories,
        {entry: math.nan if found is None else found[0] for entry, found in at_budget.items()},
        f"avg@{task.samples} at {task.budgets[1] / 1000:,.0f}k tokens",
    )


def figure(task: Task, histories: dict[str, list[History]], file: pathlib.Path) -> None:
    """Draws held-out accuracy against updates, tokens and seconds of training: the mean, and the range over seeds."""
    if len(histories) > plotting.MOST_NAMED:
        names = dict.fromkeys([*(name for name in DRAWN if name in histories), *histories])
        histories = {name: histories[name] for name in [*names][: plotting.MOST_NAMED]}
    panels: dict[str, list[Curve]] = {"updates": [], "tokens": [], "seconds": []}
    for style, (name, runs) in enumerate(histories.items()):
        accuracies = [run.evaluations[BENCHMARK] for run in runs]
        seconds = [run.at(one.updates, run.seconds) for run, one in zip(runs, accuracies, strict=True)]
        axes = {
            "updates": ([one.updates for one in accuracies], float(task.updates)),
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


def own_entry(text: str) -> Entry:
    """Returns the algorithm that --own describes: "NAME,strategy=FILE:FUNCTION,group_size=8"."""
    name, *settings = text.split(",")
    if not all("=" in setting for setting in settings):
        raise ValueError(f"--own={text} must be a name and settings of the section collection: NAME,KEY=VALUE,...")
    return Entry(name, dict(setting.split("=", 1) for setting in settings))


def planned_entry(entry: Entry, task: Task, updates: int | None) -> Entry:
    """Returns the entry with its learning rate and its updates on a task; `updates` is the user's choice, or None."""
    if task.learning_rate is None:
        return dataclasses.replace(entry, updates=updates or entry.updates)
    return dataclasses.replace(entry, learning_rate=task.learning_rate, updates=updates or task.updates)


def chosen(kind: str, names: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """Returns the names; raises ValueError for one that is not known."""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{kind} {unknown[0]!r} is not one of {', '.join(known)}.")
    return list(names)


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Trains, writes learning.md and a figure of each task into --output, and returns the summary by task and entry.

    Raises:
      ValueError: an unknown algorithm or task, or an --own that is not a name with settings.
    """
    own = [own_entry(text) for text in options.own]
    known = {entry.name: entry for entry in (*ENTRIES, *own)}
    names = chosen("algorithm", options.algorithms or list(known), known)
    names = list(dict.fromkeys([*names, *(entry.name for entry in own)]))
    tasks, folder = chosen("task", options.task, TASKS), pathlib.Path(options.output)
    rates = [float(rate) for rate in options.learning_rates]
    planned = [(task, planned_entry(known[name], TASKS[task], options.updates)) for task in tasks for name in names]
    if len(rates) == 1:
        planned = [(task, dataclasses.replace(entry, learning_rate=rates[0])) for task, entry in planned]
    if len(rates) > 1:
        planned = with_best_rates(planned, rates, folder, options.jobs)
    runs = [Run(task, entry, seed) for seed in range(options.seeds) for task, entry in planned]
    found = list(zip(runs, train_all(runs, folder, options.jobs), strict=True))
    result, tables = {}, []
    for name in tasks:
        entries = [entry for of, entry in planned if of == name]
        histories = {
            entry.name: [history for run, history in found if run.task == name and run.entry == entry]
            for entry in entries
        }
        task = TASKS[name]
        task = dataclasses.replace(task, updates=min(options.updates or task.updates, task.updates))
        result[name] = summary(task, histories)
        figure(task, histories, folder / name)
        beside = prediction_table(name, result[name], histories, folder)
        tables.append(f"## {name}\n\n{table(task, result[name])}\n")
        tables += [f"### Predicted and measured\n\n{beside}\n"] if beside else []
    (folder / "learning.md").write_text("\n".join(tables))
    print("\n".join(tables), flush=True)
    return result


if __name__ == "__main__":
    command_line.start("learning", run)

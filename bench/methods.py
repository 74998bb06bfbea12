"""Tasks and methods of `bench.learning`."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

UPDATES = 100
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@dataclasses.dataclass(frozen=True)
class Task:
    """Problems to learn.

    Attributes:
      config: name of a packaged configuration.
      budgets: response tokens at which averages are compared.
      threshold: held-out average, for the cost of reaching it.
      samples: responses per problem of an evaluation.
      time: seconds after which averages are compared.
      seconds: largest number of seconds in the figure.
      every: updates between evaluations.
      settings: further settings that differ from the configuration.
      learning_rate: learning rate of all entries; None: each entry's own.
      updates: updates of a run, after which averages are compared; with `learning_rate` None an entry may have more.
      predicts: whether the untrained model draws 16 responses to each problem, for predictions of `simulate`.
    """

    config: str
    budgets: tuple[int, ...]
    threshold: float
    samples: int
    time: float
    seconds: float
    every: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float | None = None
    updates: int = UPDATES
    predicts: bool = True


SECOND_HALF = {"reward.path": f"{EXAMPLES}/second_half.py:reward", "reward.workers": 1}
SPELL_BACKWARD = {
    "model.path": "runs/spell_backward/model",
    "data.prompts": "runs/spell_backward/problems.jsonl",
    "evaluation.benchmarks": ("runs/spell_backward/heldout.jsonl",),
    "reward.path": f"{EXAMPLES}/reasoning_gym_rewards.py:spell_backward",
}
TASKS = {
    "cipher": Task("tiny", (30_000, 46_000, 70_000), 0.9, 16, 15.0, 60.0, 10),
    "second_half": Task("tiny", (30_000, 46_000, 70_000), 0.9, 16, 15.0, 60.0, 10, SECOND_HALF),
    "words": Task("word_problems", (60_000, 120_000, 200_000), 0.6, 8, 30.0, 240.0, 20, learning_rate=5e-4),
    "maze": Task(
        "maze", (80_000, 160_000, 320_000), 0.5, 8, 120.0, 400.0, 25, {"evaluation.samples": 8}, learning_rate=3e-5
    ),
    "shortest_path": Task("reasoning_gym", (30_000, 50_000, 75_000), 0.35, 8, 60.0, 240.0, 20, learning_rate=2e-4),
    "spell_backward": Task(
        "reasoning_gym", (50_000, 100_000, 150_000), 0.3, 8, 60.0, 240.0, 20, SPELL_BACKWARD, learning_rate=3e-4,
        predicts=False,
    ),
    "sums": Task(
        "smollm2_sums", (20_000, 30_000, 40_000), 0.3, 4, 600.0, 2400.0, 8, learning_rate=3e-5, updates=16,
        predicts=False,
    ),
    "char_count": Task(
        "smollm2_char_count", (30_000, 60_000, 90_000), 0.65, 4, 600.0, 2400.0, 5, learning_rate=1e-5, updates=20,
        predicts=False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Entry:
    """One algorithm.

    Attributes:
      name: in tables, figures and names of work directories.
      overrides: settings of the `collection` section that differ from the task's configuration.
      learning_rate: the best of 1e-3, 2e-3 and 4e-3 on the task `cipher`, by one seed each; another one is at the end
        of the name. The default, for users' algorithms, was not tried.
      updates: enough to generate the largest budget of the task `cipher`, and at least `UPDATES`.
    """

    name: str
    overrides: dict[str, Any]
    learning_rate: float = 2e-3
    updates: int = UPDATES


def rival(**files: str) -> dict[str, str]:
    """Returns settings that name files of examples/rivals."""
    return {setting: f"{EXAMPLES}/rivals/{file}" for setting, file in files.items()}


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
    Entry("mopps", {"strategy": "grpo", "group_size": 8, **rival(selection="mopps.py:MoPPS")}),
    Entry("pcl", {"strategy": "grpo", "group_size": 8, **rival(selection="pcl.py:PCL")}),
    Entry("greso", {"strategy": "dapo", **rival(selection="greso.py:GRESO")}),
    Entry("knapsack", {"group_size": 8, **rival(strategy="knapsack.py:knapsack")}),
    Entry("vip", {"group_size": 8, **rival(strategy="vip.py:vip", selection="vip.py:VIP")}),
    Entry("pilot-commit", rival(strategy="pilot_commit.py:pilot_commit", selection="pilot_commit.py:Unsolved")),
    Entry(
        "ar3po",
        {"samples_per_round": 4, **rival(strategy="ar3po.py:ar3po", selection="ar3po.py:Reusing")},
        updates=115,
    ),
    Entry("aero", rival(strategy="aero.py:aero")),
)
# Entries of the figure where there are more than it can name.
DRAWN = ("exact-log-1e-3", "exact-log-ahead", "grpo-4", "grpo-16", "balance", "maxrl")

"""Results of the paper, for comparison with one's own: avg@32 at temperature 1 and 4,096 tokens.

Source: arXiv 2510.04996. Its AIME-like set has 230 problems, and the weighted average is over all 1,677.
"""

import dataclasses
import json
import pathlib

from reinforce_ada_jax.training import components as components_lib

# Problems of each set, by the name of its benchmark file.
SETS = {"math500": 500, "minerva_math": 272, "olympiadbench": 675, "aime_like": 230}
WEIGHTED = "weighted average"
# Problems that each column is an average over.
PROBLEMS = SETS | {WEIGHTED: sum(SETS.values())}
SAMPLES, TEMPERATURE, MAX_RESPONSE_TOKENS = 32, 1.0, 4096

# (model's folder, strategy, group size): MATH-500, Minerva Math, OlympiadBench, AIME-like, weighted, in percent.
AVERAGES = {
    ("Qwen2.5-Math-1.5B", "grpo", 4): (74.2, 34.4, 38.4, 16.2, 45.3),
    ("Qwen2.5-Math-1.5B", "grpo", 8): (75.3, 34.3, 39.2, 17.3, 46.1),
    ("Qwen2.5-Math-1.5B", "grpo", 16): (76.9, 35.1, 40.4, 17.9, 47.3),
    ("Qwen2.5-Math-1.5B", "dapo", 4): (75.2, 34.7, 38.5, 17.5, 45.9),
    ("Qwen2.5-Math-1.5B", "positive", 4): (75.8, 35.7, 38.6, 16.5, 46.1),
    ("Qwen2.5-Math-1.5B", "balance", 4): (77.4, 36.5, 40.5, 17.5, 47.6),
    ("Qwen2.5-Math-1.5B", "estimate", 4): (76.1, 34.8, 39.1, 18.5, 46.5),
    ("Qwen2.5-Math-7B", "grpo", 4): (82.2, 44.7, 45.6, 23.2, 53.3),
    ("Qwen2.5-Math-7B", "positive", 4): (82.7, 45.1, 46.7, 23.7, 54.2),
    ("Qwen2.5-Math-7B", "balance", 4): (84.0, 45.2, 47.1, 23.7, 54.6),
    ("Qwen2.5-Math-7B", "estimate", 4): (83.6, 42.1, 46.6, 24.1, 53.7),
    ("Llama-3.2-3B-Instruct", "grpo", 4): (51.7, 20.5, 20.4, 7.2, 27.9),
    ("Llama-3.2-3B-Instruct", "positive", 4): (52.6, 22.2, 21.0, 7.5, 28.8),
    ("Llama-3.2-3B-Instruct", "balance", 4): (53.2, 22.4, 21.2, 8.0, 29.1),
    ("Qwen3-4B-Instruct-2507", "grpo", 4): (90.4, 51.2, 64.9, 38.5, 66.5),
    ("Qwen3-4B-Instruct-2507", "positive", 4): (91.6, 50.4, 66.3, 38.8, 67.4),
    ("Qwen3-4B-Instruct-2507", "balance", 4): (91.7, 53.0, 65.7, 38.8, 67.6),
}
ON_HARD_PROMPTS = {
    ("Qwen2.5-Math-1.5B", "grpo", 4): (71.0, 31.8, 34.3, 13.8, 41.9),
    ("Qwen2.5-Math-1.5B", "positive", 4): (73.9, 33.1, 36.4, 16.4, 44.6),
    ("Qwen2.5-Math-1.5B", "balance", 4): (74.7, 33.7, 38.7, 17.6, 45.5),
    ("Qwen2.5-Math-7B", "grpo", 4): (80.7, 42.8, 42.9, 21.8, 51.3),
    ("Qwen2.5-Math-7B", "positive", 4): (82.4, 43.1, 45.0, 22.2, 52.8),
    ("Qwen2.5-Math-7B", "balance", 4): (83.1, 43.4, 46.4, 24.9, 53.9),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """Averages of one run of the paper, in [0, 1], by the names in `PROBLEMS`."""

    name: str
    averages: dict[str, float]


def rows(model: str, strategy: str, group_size: int) -> list[Row]:
    """Returns the paper's runs of a model (the name of its folder) and a strategy; often none."""
    tables = {"paper": AVERAGES, "paper, hard prompts": ON_HARD_PROMPTS}
    found = {name: table.get((model, strategy, group_size)) for name, table in tables.items()}
    return [
        Row(name, {column: percent / 100 for column, percent in zip(PROBLEMS, percents, strict=True)})
        for name, percents in found.items()
        if percents is not None
    ]


def rows_of_run(workdir: pathlib.Path) -> list[Row]:
    """Returns the paper's runs with the model and strategy that a run's config.json names."""
    file = workdir / "config.json"
    if not file.exists():
        return []
    saved = json.loads(file.read_text())
    name, collection = components_lib.model_folder(saved["model"]["path"]).name, saved["collection"]
    return rows(name, collection["strategy"], collection["group_size"])


def column(benchmark: str) -> str | None:
    """Returns the column of a benchmark's name, or None; `aime_like...` is the AIME-like set."""
    return "aime_like" if benchmark.startswith("aime_like") else benchmark if benchmark in SETS else None

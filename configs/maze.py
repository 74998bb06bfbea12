"""MaxRL's mazes on a laptop: a model of 4 million weights learns to find ways through 9 x 9 cells (docs/maze.md).

    python -m reinforce_ada_jax.train --config=configs/maze.py --workdir=runs/maze/grpo \\
        --config.collection.strategy=grpo --config.collection.group_size=8

Hardware: two CPU cores, 1 GB of memory.
Source of the numbers: MaxRL (arXiv 2602.02710, appendix "Maze") has 32 prompts and one update an iteration, mazes of
17 x 17 cells, 128 responses to each, learning rate 1e-4 and 20,000 updates. With 8 responses GRPO forgets the task at
1e-4, and learns at 3e-5.
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """100 iterations of 32 prompts, one update each."""
    config = defaults()
    config.iterations = 100
    config.model.path = "runs/maze/warm"
    config.data.prompts = "runs/maze/problems.jsonl"
    config.data.template = "plain"
    config.data.max_prompt_tokens = 96
    config.reward.path = "examples/maze.py:reward"
    config.reward.workers = 1
    config.collection.prompts_per_iteration = 32
    config.sampling.max_response_tokens = 48
    config.sampling.slots = 64
    config.sampling.window = 16
    config.sampling.page_size = 16
    config.learning.prompts_per_update = 32
    config.learning.learning_rate = 3e-5
    config.learning.warmup_updates = 5
    config.learning.b2 = 0.99
    config.checkpoint.every = 50
    config.checkpoint.keep = 1
    config.evaluation.every = 20
    config.evaluation.benchmarks = ("runs/maze/heldout.jsonl",)
    config.evaluation.samples = 16
    config.evaluation.max_response_tokens = 48
    return config

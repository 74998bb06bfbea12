"""Warm start of a model of 4 million weights on the ways through mazes, before it finds ways by itself (docs/maze.md).

    python examples/maze.py --output=runs/maze
    python -m reinforce_ada_jax.sft --config=configs/maze_sft.py --workdir=runs/maze/sft
    python -m reinforce_ada_jax.export --workdir=runs/maze/sft --output=runs/maze/warm

Hardware: two CPU cores, 1 GB of memory.
Source of the numbers: MaxRL's warm start for mazes of 17 x 17 cells (arXiv 2602.02710, appendix "Maze": 1,500 updates
of 32 with AdamW and learning rate 5e-4; b2, weight decay and the cosine are those of its program). Mazes of 9 x 9 cells
need fewer updates.
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """One epoch of 6,400 mazes, 32 an update."""
    config = defaults()
    config.model.path = "runs/maze/model"
    config.data.prompts = "runs/maze/demonstrations.jsonl"
    config.data.template = "plain"
    config.data.max_prompt_tokens = 96
    config.sampling.max_response_tokens = 48
    config.collection.prompts_per_iteration = 32
    config.learning.prompts_per_update = 32
    config.learning.learning_rate = 5e-4
    config.learning.warmup_updates = 20
    config.learning.b2 = 0.95
    config.learning.weight_decay = 0.01
    config.checkpoint.every = 100
    config.checkpoint.keep = 1
    config.sft.validation = "runs/maze/validation.jsonl"
    config.evaluation.every = 50
    return config

"""Shortest ways through grids of reasoning-gym, for a model of 100,000 weights (docs/reasoning_gym.md).

    pip install reasoning-gym==0.1.25
    python examples/reasoning_gym_models.py --task=shortest_path --output=runs/shortest_path
    python -m reinforce_ada_jax.train --config=configs/reasoning_gym.py --workdir=runs/shortest_path/balance

Hardware: two CPU cores, 1 GB of memory.
Source of the numbers: those of the built-in task (configs/tiny.py), with slots and windows for responses of 2 to 10
tokens.
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """100 iterations of 32 prompts, one update each."""
    config = defaults()
    config.iterations = 100
    config.model.path = "runs/shortest_path/model"
    config.data.prompts = "runs/shortest_path/problems.jsonl"
    config.data.template = "plain"
    config.data.max_prompt_tokens = 28
    config.reward.path = "examples/reasoning_gym_rewards.py:shortest_path"
    config.reward.workers = 1
    config.collection.prompts_per_iteration = 32
    config.sampling.max_response_tokens = 16
    config.sampling.slots = 64
    config.sampling.window = 8
    config.sampling.page_size = 8
    config.learning.prompts_per_update = 32
    config.learning.learning_rate = 2e-4
    config.learning.warmup_updates = 5
    config.learning.b2 = 0.99
    config.checkpoint.every = 50
    config.evaluation.every = 20
    config.evaluation.benchmarks = ("runs/shortest_path/heldout.jsonl",)
    config.evaluation.samples = 8
    config.evaluation.max_response_tokens = 16
    return config

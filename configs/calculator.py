"""Arithmetic with a calculator as a tool, minutes on two cores (docs/how_to/environments.md).

    python examples/environment_models.py --task=calculator --output=runs/calculator
    python -m reinforce_ada_jax.train --config=configs/calculator.py --workdir=runs/calculator/run

Hardware: two CPU cores, 1 GB of memory.
Source of the numbers: our own trials of this task; M = 8, N = 4 rounds and the clip range are the paper's (arXiv
2510.04996).
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """60 iterations of 32 prompts, one update each."""
    config = defaults()
    config.iterations = 60
    config.model.path = "runs/calculator/model"
    config.data.prompts = "runs/calculator/problems.jsonl"
    config.data.template = "chat"
    config.data.max_prompt_tokens = 24
    config.environment.path = "examples/environments.py:Calculator"
    config.environment.max_turns = 3
    config.environment.max_turn_tokens = 32
    config.collection.prompts_per_iteration = 32
    config.sampling.max_response_tokens = 48
    config.sampling.slots = 64
    config.sampling.window = 4
    config.sampling.page_size = 8
    config.learning.prompts_per_update = 32
    config.learning.learning_rate = 1e-3
    config.learning.warmup_updates = 5
    config.learning.b2 = 0.99
    config.checkpoint.every = 20
    config.evaluation.every = 20
    config.evaluation.benchmarks = ("runs/calculator/heldout.jsonl",)
    config.evaluation.samples = 8
    config.evaluation.max_response_tokens = 48
    return config

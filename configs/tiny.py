"""The built-in task on the built-in model: deciphering words, 107,000 weights, minutes on a laptop's CPU.

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/tiny
    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/grpo --config.collection.strategy=grpo

Hardware: two CPU cores, 1 GB of memory.
Source of the numbers: our own trials of this task (docs/architecture.md); the sampling numbers M = 8 and N = 4 rounds
and the clip range are the paper's (arXiv 2510.04996).
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """100 iterations of 32 prompts, one update each."""
    config = defaults()
    config.iterations = 100
    config.model.path = "package:cipher"
    config.data.prompts = "cipher:train"
    config.data.template = "plain"
    config.data.max_prompt_tokens = 8
    config.reward.kind = "cipher"
    config.reward.workers = 0  # a string comparison
    config.collection.prompts_per_iteration = 32
    config.sampling.max_response_tokens = 8
    config.sampling.slots = 128
    config.sampling.window = 16
    config.sampling.page_size = 8
    config.learning.prompts_per_update = 32
    config.learning.responses_per_row = 1  # a prompt has 8 tokens: no two fit into 16 with their responses
    config.learning.learning_rate = 5e-4
    config.learning.warmup_updates = 5
    config.learning.b2 = 0.99
    config.checkpoint.every = 25
    config.evaluation.every = 25
    config.evaluation.benchmarks = ("cipher:heldout",)
    config.evaluation.samples = 16
    config.evaluation.max_response_tokens = 8
    return config

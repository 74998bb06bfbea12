"""The tutorial's run: problems in words, a model of 123,000 weights, minutes on two cores (docs/tutorial.md).

    python examples/word_problems.py --output=runs/words
    python -m reinforce_ada_jax.train --config=configs/word_problems.py --workdir=runs/words/balance

Hardware: two CPU cores, 1 GB of memory.
Source of the numbers: our own trials of this task; M = 8, N = 4 rounds and the clip range are the paper's (arXiv
2510.04996).
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """100 iterations of 32 prompts, one update each."""
    config = defaults()
    config.iterations = 100
    config.model.path = "runs/words/model"
    config.data.prompts = "runs/words/prompts.jsonl"
    config.data.template = "chat"  # the folder's own chat_template.jinja, with nothing said around a problem
    config.data.system = config.data.instruction = ""
    config.data.max_prompt_tokens = 48
    config.reward.kind = "math"
    config.collection.prompts_per_iteration = 32
    config.sampling.max_response_tokens = 40
    config.sampling.slots = 64
    config.sampling.window = 16
    config.sampling.page_size = 16
    config.learning.prompts_per_update = 32
    config.learning.learning_rate = 5e-4
    config.learning.warmup_updates = 5
    config.learning.b2 = 0.99
    config.checkpoint.every = 20
    config.evaluation.every = 20
    config.evaluation.benchmarks = ("runs/words/heldout.jsonl",)
    config.evaluation.samples = 8
    config.evaluation.max_response_tokens = 40
    return config

"""SmolLM2-135M-Instruct adds and subtracts two numbers: the task `chain_sum` of reasoning-gym, without a warm start.

    python examples/reasoning_gym_problems.py --generator=chain_sum --output=runs/sums \\
        --settings=min_terms=2,max_terms=2,min_digits=1,max_digits=2
    python -m reinforce_ada_jax.train --config=configs/smollm2_sums.py --workdir=runs/sums/grpo \\
        --config.collection.strategy=grpo --config.collection.group_size=8

Hardware: two CPU cores, 4 GB of memory. The model is that of `make smollm2` (docs/smollm2.md).
Source of the numbers: our own trials. A response is right if its last number is the answer.
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """16 iterations of 24 prompts, one update each."""
    config = defaults()
    config.iterations = 16
    config.model.path = "runs/smollm2/model.gguf"
    config.data.prompts = "runs/sums/problems.jsonl"
    config.data.template = "chat"  # the model's own, with its default system message
    config.data.system = config.data.instruction = ""
    config.data.max_prompt_tokens = 64
    config.reward.kind = "gsm8k"
    config.collection.prompts_per_iteration = 24
    config.sampling.max_response_tokens = 32
    config.sampling.window = 4
    config.sampling.page_size = 16
    config.learning.prompts_per_update = 24
    config.learning.learning_rate = 3e-5
    config.learning.schedule = "linear"  # with a constant rate small updates fall late (docs/smollm2.md)
    config.learning.warmup_updates = 2
    config.learning.b2 = 0.99
    config.checkpoint.every = 16
    config.checkpoint.keep = 1
    config.evaluation.every = 8
    config.evaluation.benchmarks = ("runs/sums/heldout.jsonl",)
    config.evaluation.samples = 4
    config.evaluation.max_response_tokens = 32
    return config

"""SmolLM2-135M-Instruct counts letters: a published language model, trained on a laptop's CPU (docs/smollm2.md).

    make smollm2

or, after the warm start, one of its three runs:

    python -m reinforce_ada_jax.train --config=configs/smollm2_char_count.py --workdir=runs/smollm2/grpo \\
        --config.collection.strategy=grpo --config.collection.group_size=8

Hardware: two CPU cores, 4 GB of memory.
Source of the numbers: our own trials; the learning rate is tuned for none of the methods but `exact`, which has 3e-6
(docs/smollm2.md). The task is that of the recipe `char_count` of verl-project/verl-recipe. Its sizes, for an
accelerator: words of 10 to 20 letters, 9,000 problems, 128 prompts an iteration, minibatches of 16, learning rate 1e-6,
two epochs. Here words have 3 to 5 letters, and an iteration has 16 prompts and one update.
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """20 iterations of 16 prompts, one update each."""
    config = defaults()
    config.iterations = 20
    config.model.path = "runs/smollm2/warm"
    config.data.prompts = "runs/smollm2/data/problems.jsonl"
    config.data.template = "chat"  # the model's own, with its default system message
    config.data.system = config.data.instruction = ""
    config.data.max_prompt_tokens = 48
    config.reward.kind = "math"
    config.collection.prompts_per_iteration = 16
    config.sampling.max_response_tokens = 48
    config.sampling.window = 4  # a step takes long: the host can decide often, and prompts wait less for their rounds
    config.sampling.page_size = 16
    config.learning.prompts_per_update = 16
    config.learning.learning_rate = 1e-5
    config.learning.warmup_updates = 2
    config.learning.b2 = 0.99
    config.checkpoint.every = 10
    config.checkpoint.keep = 1
    config.evaluation.every = 5
    config.evaluation.benchmarks = ("runs/smollm2/data/heldout.jsonl",)
    config.evaluation.samples = 4
    config.evaluation.max_response_tokens = 48
    return config

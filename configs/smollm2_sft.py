"""Warm start of SmolLM2-135M-Instruct on worked answers, before it counts letters by itself (docs/smollm2.md).

    python -m reinforce_ada_jax.sft --config=configs/smollm2_sft.py --workdir=runs/smollm2/sft
    python -m reinforce_ada_jax.export --workdir=runs/smollm2/sft --output=runs/smollm2/warm

Hardware: two CPU cores, 4 GB of memory.
Source of the numbers: our own trials. The task is that of the recipe `char_count` of verl-project/verl-recipe, which
trains for one epoch on 9,000 problems with batches of 64 and the learning rate 2e-5. Here words have 3 to 5 letters,
and 50 updates of 32 answers are enough for one right answer in two.
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """One epoch of 1,600 worked answers, 32 an update."""
    config = defaults()
    config.model.path = "runs/smollm2/model.gguf"
    config.data.prompts = "runs/smollm2/data/demonstrations.jsonl"
    config.data.template = "chat"  # the model's own, with its default system message
    config.data.system = config.data.instruction = ""
    config.data.max_prompt_tokens = 48
    config.sampling.max_response_tokens = 48
    config.collection.prompts_per_iteration = 32
    config.learning.prompts_per_update = 32
    config.learning.learning_rate = 5e-5
    config.learning.warmup_updates = 5
    config.learning.b2 = 0.95
    config.learning.weight_decay = 0.1
    config.sft.validation = "runs/smollm2/data/validation.jsonl"
    config.evaluation.every = 10
    return config

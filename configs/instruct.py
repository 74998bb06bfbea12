"""Any instruct model, on this machine: its name, or its folder, is all that a command needs beside the problems.

    reinforce-ada prepare --config=instruct --config.model.path=MODEL --input=problems.jsonl --output=prompts.jsonl
    reinforce-ada train --config=instruct --config.model.path=MODEL --workdir=runs/mine --config.data.prompts=FILE
    reinforce-ada evaluate --config=instruct --config.model.path=MODEL --workdir=runs/mine --benchmarks=heldout.jsonl
    reinforce-ada export --workdir=runs/mine --output=models/mine

In the repository, the second one is

    python -m reinforce_ada_jax.train --config=configs/instruct.py --workdir=runs/mine --config.model.path=MODEL \
        --config.data.prompts=FILE

Each prints what was chosen: the chat template of the model with its own system message, prompts and responses of up to
512 tokens, slots and precision for the device. `train --dry_run` adds how long an iteration takes here. Adapters
are trained (LoRA), so memory is that of the weights, the cache and activations.

Hardware: one device; a CPU for models below a billion weights. For several devices set `mesh`.
Source of the numbers: rank and learning rate are those of the paper's recipe with LoRA (arXiv 2510.04996); sizes are
ours, for minutes an iteration. Nothing here was tuned for a model.
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """50 iterations of 16 prompts, one update each."""
    config = defaults()
    config.iterations = 50
    config.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.data.prompts = "hf:openai/gsm8k:main:train"
    config.data.template = "chat"
    config.data.system = ""  # what the template says by itself
    config.data.max_prompt_tokens = 512
    config.reward.kind = "math"
    config.collection.prompts_per_iteration = 16
    config.sampling.max_response_tokens = 512
    config.learning.prompts_per_update = 16
    config.learning.learning_rate = 5e-6
    config.lora.rank = 32
    config.checkpoint.every = 5
    config.checkpoint.keep = 1
    config.evaluation.every = 0
    config.evaluation.samples = 4
    config.evaluation.max_response_tokens = 512
    return config

"""Reinforce-Ada on Qwen3-4B-Instruct-2507.

    python -m reinforce_ada_jax.train --config=configs/qwen3_4b.py --workdir=runs/qwen3_4b \\
        --config.model.path=models/Qwen3-4B-Instruct-2507

Hardware: v5p-8, one host of 4 chips with 95 GB each. Weights, moments and gradients are float32 and sharded over all of
them; decoding is split over `tensor` only. The sizes follow from the chips' memory on paper; no slice has timed them.
Prompts: the published hard set, through `datasets` (pip install '.[hub]'); the paper has no easy one
for this model. A JSONL file does as well: --config.data.prompts=FILE. The benchmarks are read
through `datasets`, too; name files, or none: --config.evaluation.benchmarks='()'.
Source of the numbers: arXiv 2510.04996 and its reference script: 512 prompts an iteration, 4 updates, M = 8, N = 4,
n = 4, clip 0.2 / 0.28, learning rate 1e-6, 1,024 + 2,048 tokens, evaluation with up to 4,096.
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """The published run; what isn't named here has its default (docs/settings.md)."""
    config = defaults()
    config.model.path = "models/Qwen3-4B-Instruct-2507"
    config.data.prompts = "hf:RLHFlow/reinforce_ada_hard_prompt"
    config.reward.kind = "reference"
    config.sampling.slots = 128
    config.learning.micro_batches = 64  # 8 rows at a time
    config.mesh.tensor = 4
    # The published evaluation, every 50 iterations: avg@32 at temperature 1 with up to 4,096 tokens, by its graders.
    config.evaluation.benchmarks = (
        "hf:weqweasdas/math500",
        "hf:weqweasdas/minerva_math",
        "hf:weqweasdas/olympiadbench",
        "hf:weqweasdas/aime_hmmt_brumo_cmimc_amc23",
    )
    return config

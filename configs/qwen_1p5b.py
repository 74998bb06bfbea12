"""Reinforce-Ada on Qwen2.5-Math-1.5B.

    python -m reinforce_ada_jax.train --config=configs/qwen_1p5b.py --workdir=runs/qwen_1p5b \\
        --config.model.path=models/Qwen2.5-Math-1.5B

Hardware: v5e-8, one host of 8 chips with 16 GB each. Weights, moments and gradients are float32 and sharded over all of
them; decoding runs in 4 replicas of 64 slots, each on 2 chips. Compiled ahead of time for v5e:2x4 (jax 0.10.2) with
evaluations of 4,096 tokens, a chip holds 9.2 GiB in decoding (weights, 6,401 pages, its share of the learner) and 10.7
GiB in the update of 512 rows of 3,072 tokens (commit 443ea384); without evaluations 7.4 and 9.1 (docs/scale.md). No
slice has timed it.
Prompts: the published hard set, through `datasets` (pip install '.[hub]'); the paper's easy set is
hf:RLHFlow/reinforce_ada_simple_prompt_1-5b. Both are called ..._1.5b and easy where they are announced. A JSONL file
does as well: --config.data.prompts=FILE. The benchmarks are read through `datasets`, too; name files, or none:
--config.evaluation.benchmarks='()'.
Source of the numbers: arXiv 2510.04996 and its reference script: 512 prompts an iteration, 4 updates, M = 8, N = 4,
n = 4, clip 0.2 / 0.28, learning rate 1e-6, 1,024 + 2,048 tokens, evaluation with up to 4,096.
"""

from ml_collections import ConfigDict

from reinforce_ada_jax.config import defaults


def get_config() -> ConfigDict:
    """The published run; what isn't named here has its default (docs/settings.md)."""
    config = defaults()
    config.model.path = "models/Qwen2.5-Math-1.5B"
    config.data.prompts = "hf:RLHFlow/reinforce_ada_hard_prompt_1-5b"
    config.reward.kind = "reference"
    config.sampling.slots = 64
    config.learning.micro_batches = 64  # 8 rows at a time
    config.mesh.fsdp = 4
    config.mesh.tensor = 2
    # The published evaluation, every 50 iterations: avg@32 at temperature 1 with up to 4,096 tokens, by its graders.
    config.evaluation.benchmarks = (
        "hf:weqweasdas/math500",
        "hf:weqweasdas/minerva_math",
        "hf:weqweasdas/olympiadbench",
        "hf:weqweasdas/aime_hmmt_brumo_cmimc_amc23",
    )
    return config

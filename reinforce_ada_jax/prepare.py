"""Chooses prompts to train on, by how often a model solves them.

    python -m reinforce_ada_jax.prepare --config=configs/qwen_1p5b.py --input=problems.jsonl --output=prompts.jsonl \\
        --max_pass_rate=0.125

A problem is kept if it is no duplicate, its prompt has at most data.max_prompt_tokens tokens, and its reference answer
passes its own verification. The model (model.path) must also solve a share p of --samples draws with min_pass_rate < p
<= max_pass_rate. Draws are made as in training (the `sampling` section). With the default --min_pass_rate=0, problems
that were never solved are left out. The hard set of the paper (arXiv 2510.04996) is 0 < p <= 0.125 of 16 draws, its
easy set 0 < p <= 0.313.

prompts.manifest.json has the numbers of problems that were left out, by reason. The folder prompts.draws keeps every
response. So the same command continues after a kill, and another range of pass rates needs no new draws.
"""

import contextlib
import pathlib

from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import command
from reinforce_ada_jax.files import buckets, local_copy

SAMPLES, MIN_PASS_RATE, MAX_PASS_RATE = 16, 0.0, 0.313


def main(
    config: Config,
    source: str,
    output: buckets.Named,
    pass_rates: tuple[float, float],
    samples: int,
    dry_run: bool = False,
) -> None:
    """Prepares the prompts; Ctrl-C ends it with a message."""
    from reinforce_ada_jax.evaluation.preparation import OutputFiles, prepare
    from reinforce_ada_jax.planning import here

    folder, name = pathlib.Path(output).parent, pathlib.Path(output).name  # also of a URL, as pathlib shortens it
    with contextlib.ExitStack() as stack:
        with cli.user_input():
            ours = OutputFiles(pathlib.Path(name)).names
            copied, _ = stack.enter_context(local_copy.opened(folder, "--output", lambda file: file.startswith(ours)))
        files = OutputFiles(copied / name)
        stack.enter_context(cli.interruptible(f"Graded responses are stored in {buckets.origin(files.draws)}"))
        prepare(config, source, files, pass_rates, samples, cost=here.drawing_line if dry_run else None)


if __name__ == "__main__":
    CONFIG = cli.define_config()
    INPUT = flags.DEFINE_string(
        "input", None, "Problems: a JSONL file, or any other source that data.prompts may name.", required=True
    )
    OUTPUT = flags.DEFINE_string("output", None, "The JSONL file of prompts to write.", required=True)
    LEAST = flags.DEFINE_float("min_pass_rate", MIN_PASS_RATE, "Pass rates must lie above it (exclusive).")
    MOST = flags.DEFINE_float("max_pass_rate", MAX_PASS_RATE, "Pass rates may reach it (inclusive).")
    COUNT = flags.DEFINE_integer("samples", SAMPLES, "Responses drawn for each problem.")
    DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check the input, and print what would run and how long it takes.")
    command.run(
        lambda: main(
            cli.resolved(CONFIG), INPUT.value, buckets.named(OUTPUT.value),
            (LEAST.value, MOST.value), COUNT.value, DRY_RUN.value,
        )
    )  # fmt: skip

"""`bench.split`: iterations a second with a sampler and a learner at once, in turn, and with all devices for both.

The iterations are those of training, with a random model (`iteration.py`): lengths and verdicts are scripted. All
iterations have the same prompts, so they do the same work.
"""

import contextlib
import dataclasses
import functools
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
from absl import flags

from bench import command_line, engines, inputs, iteration, models
from bench.iteration import ClockedRun
from bench.measuring import in_turns, machine
from bench.workloads import Lengths
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection.selection import Shuffled
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed.signals import Stop
from reinforce_ada_jax.policy.architecture import Architecture

# Iterations of a block: the variants take turns by blocks, and a block ends when nothing is in flight.
ITERATIONS = 4
WORK = ("collection/responses", "collection/kept", "collection/tokens", "update/count")
TIMES = {"draw_s": "time/collect_s", "update_s": "time/update_s", "hand_over_s": "time/reshard_s"}


def variants(config: Config) -> dict[str, dict[str, Any]]:
    """Returns the settings of each variant: the same two sides at once and in turn, and all devices for both."""
    sampler, learner = config.mesh.sampler or 1, config.mesh.learner
    split = {"mesh.sampler": sampler}
    both = {"mesh.sampler": 0, "mesh.data": config.mesh.data * (1 + sampler // learner)}
    return {
        "split": split | {"collection.max_staleness": 1},
        "turns": split | {"collection.max_staleness": 0},
        "together": both,
    }


def timed_block(run: ClockedRun, iterations: int, turn: int) -> dict[str, Any]:
    """Runs iterations, 2 in turn 0, each with one collection and its updates, from idle devices to idle devices.

    A collection that is drawn ahead counts in the block that draws it. The collection of the first iteration was drawn
    before the block; the block waits for the one that its last iteration begins.
    """
    iterations = iterations if turn else 2
    begin = time.perf_counter()
    all_metrics = [run.next_iteration() for _ in range(iterations)]
    run.run.ahead.wait(Stop())
    seconds = time.perf_counter() - begin
    times = {name: statistics.mean(metrics[key] for metrics in all_metrics) for name, key in TIMES.items()}
    work = [tuple(metrics[key] for key in WORK) for metrics in all_metrics]
    tokens = statistics.mean(metrics["collection/tokens"] for metrics in all_metrics)
    speed = {"iterations_per_s": iterations / seconds, "seconds": seconds / iterations}
    return speed | times | {"tokens": tokens, "work": work}


def _described(block: dict[str, Any]) -> str:
    parts = ", ".join(f"{name.removesuffix('_s').replace('_', '-')} {block[name]:.2f}" for name in TIMES)
    return f"{block['seconds']:.2f} s an iteration ({parts})"


def measure(
    config: Config, *, repeat: int, lengths: Lengths, architecture: Architecture, iterations: int = ITERATIONS
) -> dict[str, Any]:
    """Measures blocks of iterations of each variant in turns; the first block of each compiles and is not timed.

    Returns:
      By variant, medians over blocks: iterations a second; seconds of an iteration, of its collection, of its updates
      and of its hand-over of weights; and its tokens. "ratio" is iterations a second of "split" divided by those of
      "turns", "ratio_to_together" divided by those of "together".

    Raises:
      ValueError: the configuration can't be run, or there are too few devices.
      RuntimeError: the variants did not do the same work.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs = {}
        for name, changes in variants(config).items():
            changed = config_lib.replaced(config, changes | {"iterations": 10**6})
            run = iteration.begin(changed, pathlib.Path(folder) / name, lengths, architecture, stack)
            # Every iteration draws the same prompts, whose scripted lengths are the same each time.
            prompts = run.run.prompts[: changed.collection.prompts_per_iteration]
            selection = Shuffled(prompts, changed.seed)
            run.run = dataclasses.replace(run.run, prompts=prompts, selection=selection)
            runs[name] = functools.partial(timed_block, run, iterations)
        timed = in_turns(runs, repeat, _described)
    work = {each for blocks in timed.values() for block in blocks for each in block.pop("work")}
    if len(work) != 1:
        raise RuntimeError(f"the variants did not do the same work: {', '.join(WORK)} were {sorted(work)}.")
    result: dict[str, Any] = {
        name: {key: statistics.median(block[key] for block in blocks[1:]) for key in blocks[0]}
        | {"all_seconds": [block["seconds"] for block in blocks[1:]]}
        for name, blocks in timed.items()
    }
    speed = {name: result[name]["iterations_per_s"] for name in result}
    return result | machine() | {
        "ratio": speed["split"] / speed["turns"], "ratio_to_together": speed["split"] / speed["together"],
        **dict(zip(WORK, work.pop(), strict=True)), "iterations": iterations, "blocks": repeat,
        "devices": len(jax.devices()), "model": models.describe(architecture),
    }  # fmt: skip


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures the configuration of the flags."""
    config = inputs.config_of(options)
    return measure(
        config,
        repeat=options.repeat or 5,
        lengths=inputs.response_lengths(options, config.sampling.max_response_tokens),
        architecture=models.shaped(options.shape or "128x4"),
    )


if __name__ == "__main__":
    command_line.start("split", run, before=engines.use_one_device_per_replica)

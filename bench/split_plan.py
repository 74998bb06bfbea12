"""Predicted iterations a second of a TPU slice: all chips draw and learn in turn, or a part of them draws ahead.

Drawing is simulated with the real scheduling, so it has its tail, in which few slots are busy. Programs take their
least time (`planning/roofline.py`). So all numbers are optimistic, with and without the split.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from absl import flags

from bench import adaptive, workloads
from bench.simulation import Cost
from bench.workloads import Lengths, Workload
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.learning import platform
from reinforce_ada_jax.learning.learner import scores_in_update
from reinforce_ada_jax.planning import collectives
from reinforce_ada_jax.planning.plan import Statistics, packed_share
from reinforce_ada_jax.planning.report import engine_options, find_architecture
from reinforce_ada_jax.planning.roofline import (
    BatchLayout,
    Chip,
    chip_of,
    decode_weight_bytes,
    layer_weights,
    roofline,
    score_call,
    update_call,
)
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.splash_attention import block_size
from reinforce_ada_jax.sampling.state import EngineOptions, kv_token_bytes

MEAN_PROMPT_TOKENS = 150  # of the published prompts (docs/scale.md)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of the parts of an iteration."""

    draw: float
    learn: float
    hand_over: float

    def in_turn(self) -> float:
        """Returns the seconds of an iteration whose parts follow each other."""
        return self.draw + self.learn + self.hand_over

    def at_once(self) -> float:
        """Returns the seconds of an iteration that is drawn while the one before is learned."""
        return max(self.draw, self.learn) + self.hand_over


def draw_seconds(
    config: Config, a: Architecture, options: EngineOptions, chip: Chip, devices: int, workload: Workload
) -> float:
    """Simulates the collection of an iteration on `devices` chips; it ends with the slowest replica's share."""
    tensor = config.mesh.tensor
    products = 2 * options.slots * (a.num_layers * layer_weights(a) + a.vocab_size * a.hidden_size) / chip.flops
    weights = decode_weight_bytes(a, options.dtype, options.weight_dtype) / chip.bandwidth
    cached = kv_token_bytes(a, options.dtype, options.attention, options.kv_dtype) / chip.bandwidth
    cost = Cost(decode_step=max(weights, products) / tensor, cached_token=cached / tensor)
    limit, replicas = config.sampling.max_response_tokens, devices // tensor
    options = dataclasses.replace(options, max_prompt_tokens=workload.max_prompt_tokens, max_response_tokens=limit)
    shares = [dataclasses.replace(workload, prompts=workload.prompts[first::replicas]) for first in range(replicas)]
    return max(adaptive.simulate(share, options, cost, barrier=False, limit=limit)["seconds"] for share in shares)


def batch_layout(config: Config, a: Architecture, chip: Chip, devices: int) -> BatchLayout:
    """Returns the minibatch of an update on `devices` chips, all of them along `fsdp` but for `mesh.tensor`."""
    learning, shards = config.learning, devices // config.mesh.tensor
    dtype = jnp.dtype(config.model.compute_dtype)
    resolved = platform.resolve("tpu", learning, hidden_size=a.hidden_size, head_dim=a.head_dim, dtype=dtype)
    strategy = strategies.build(config.collection, regularized=config.regularized)
    kept = strategy.max_kept or config.collection.group_size
    token_bytes = platform.activation_bytes(a, resolved.remat, dtype)
    micro_rows = platform.micro_rows("tpu", config, shards, token_bytes)
    row_tokens = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    copied = a.num_layers * layer_weights(a) * dtype.itemsize / config.mesh.tensor
    return BatchLayout(
        micro_batches=-(-learning.prompts_per_update * kept // micro_rows),
        micro_rows=micro_rows,
        row_tokens=row_tokens,
        head_tokens=config.sampling.max_response_tokens,
        prompt_tokens=config.data.max_prompt_tokens,
        head_tile=resolved.head_tile,
        head_kernels=resolved.head_backend == "pallas_tpu",
        remat=resolved.remat,
        attention_block=block_size(row_tokens) if resolved.attention == "splash" else None,
        row_shards=shards,
        weight_shards=shards,
        tensor_shards=config.mesh.tensor,
        itemsize=dtype.itemsize,
        gathers_once=shards > 1 and platform.gathers_once(learning.gather_weights, copied, chip.hbm_bytes),
    )


def learn_seconds(config: Config, a: Architecture, chip: Chip, devices: int, filled: float) -> float:
    """Returns the least seconds of an iteration's scoring and updates on `devices` chips.

    `filled` is the share of rows that packing leaves (`plan.packed_share`).
    """
    layout = batch_layout(config, a, chip, devices)
    sent = {update: collectives.learner_sent_bytes(a, layout, update=update) for update in (False, True)}
    masters = jnp.dtype(config.model.parameter_dtype).itemsize
    seconds = roofline(update_call(a, layout, masters), chip, sent[True])[0]
    if not scores_in_update(config):
        seconds += roofline(score_call(a, layout), chip, sent[False])[0]
    return config.collection.prompts_per_iteration // config.learning.prompts_per_update * filled * seconds


def predict_sizes(
    config: Config,
    a: Architecture,
    options: EngineOptions,
    chip: Chip,
    devices: int,
    samplers: Sequence[int],
    lengths: Lengths,
) -> dict[str, dict[str, float]]:
    """Returns the times of `devices` chips in turn, and of each number of chips in `samplers` that draws ahead.

    The weights are handed over through one link of each sampler's chip, in the precision of decoding.
    """
    workload = workloads.adaptive(config.collection, config.collection.prompts_per_iteration, lengths, vocab_size=1000)
    filled = packed_share(config, Statistics(MEAN_PROMPT_TOKENS, float(workload.lengths.mean()), draws=0.0))
    hand_over = a.num_parameters * jnp.dtype(options.dtype).itemsize / config.mesh.tensor / chip.link

    def times(drawing: int, learning: int) -> Times:
        drawn = draw_seconds(config, a, options, chip, drawing, workload)
        return Times(drawn, learn_seconds(config, a, chip, learning, filled), hand_over)

    together = times(devices, devices)
    result = {"together": dataclasses.asdict(together) | {"iteration": together.in_turn()}}
    for sampler in samplers:
        split = times(sampler, devices - sampler)
        ratio = together.in_turn() / split.at_once()
        result[f"{sampler}+{devices - sampler}"] = dataclasses.asdict(split) | {
            "iteration": split.at_once(), "ratio": ratio
        }  # fmt: skip
    return result


def predict(config: Config, options: flags.FlagValues) -> dict[str, Any]:
    """Predicts the configuration of the flags on the slice --topology, by the share of its chips that draw.

    Raises:
      ValueError: the slice or the model is not known, or can't be split.
    """
    chip = chip_of(options.topology)
    if chip.platform != "tpu":
        raise ValueError(f"--topology={options.topology}: `bench.split` predicts times of TPU slices alone.")
    config = platform.chosen_dtype(config, chip.platform)
    devices = math.prod(map(int, options.topology.partition(":")[2].split("x")))
    a, source = find_architecture(config.model.path, options.model)
    tensor, lengths = config.mesh.tensor, workloads.parse_lengths(options.lengths or workloads.ADAPTIVE_LENGTHS)
    samplers = [n for n in (devices // 4, devices // 2, 3 * devices // 4) if n and n % tensor == 0]
    if devices % tensor or not samplers:
        raise ValueError(
            f"--topology={options.topology} has {devices} chips, mesh.tensor is {tensor}: neither a quarter nor half "
            "of them is a multiple of it. Name a larger slice, or lower mesh.tensor."
        )
    sizes = predict_sizes(config, a, engine_options(config, a, chip.platform), chip, devices, samplers, lengths)
    return {"predicted": True, "topology": options.topology, "model": source, **sizes}

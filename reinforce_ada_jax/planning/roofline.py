"""FLOPs and bytes that a run's programs need at least, and the seconds that a chip needs for them.

This module only counts; nothing is compiled here. FLOPs are those of products with weights and of causal attention,
with padding, but without the recomputation of a backward pass; for a token only its chosen experts count. Bytes are
weights (of all experts), cache and optimiser state, each read or written as few times as possible. Activations,
transfers between chips and the start of kernels are not counted, so the least time is a lower bound. XLA's
`cost_analysis` can't replace these counts: it counts the body of a loop once and sees nothing inside Pallas kernels.
"""

import dataclasses

import jax.numpy as jnp

from reinforce_ada_jax.learning.platform import TPU_FLOPS, tpu_bytes
from reinforce_ada_jax.planning.gpus import GPUS, MEMORY_SHARE
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.sampling.state import EngineOptions, kv_token_bytes

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device, as the compiler sees it."""

    hbm_bytes: int  # memory that a program may use
    bandwidth: float  # of HBM, bytes per second
    flops: float  # peak in bfloat16, per second
    platform: str = "tpu"  # "tpu" or "gpu"


# Bandwidth and peak: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, each "per chip" (tpu7x bandwidth: jax's
# pallas/mosaic/tpu_info.py). A tpu7x chip is two devices, and a v4 chip is compiled for as two (a real one may show
# them as one): they have half a chip.
CHIPS = {
    "v4": Chip(tpu_bytes("TPU v4"), 1200e9 / 2, TPU_FLOPS["TPU v4"]),
    "v5e": Chip(tpu_bytes("TPU v5 lite"), 819e9, TPU_FLOPS["TPU v5 lite"]),
    "v5p": Chip(tpu_bytes("TPU v5"), 2765e9, TPU_FLOPS["TPU v5"]),
    "v6e": Chip(tpu_bytes("TPU v6 lite"), 1640e9, TPU_FLOPS["TPU v6 lite"]),
    "tpu7x": Chip(tpu_bytes("TPU7x"), 7400e9 / 2, TPU_FLOPS["TPU7x"]),
}
# Peaks: NVIDIA's data sheets of the A100 80GB SXM, H100 SXM and H200, without sparsity.
GPU_PEAKS = {"a100": 312e12, "h100": 989e12, "h200": 989e12}
CHIPS |= {
    name: Chip(int(MEMORY_SHARE * gpu.memory_bytes), gpu.bandwidth, GPU_PEAKS[name], "gpu")
    for name, gpu in GPUS.items()
}


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Least work of one device: floating-point operations, and bytes read from or written to HBM."""

    flops: float | int
    bytes: float | int

    def __add__(self, other: "ProgramCost") -> "ProgramCost":
        return ProgramCost(self.flops + other.flops, self.bytes + other.bytes)


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """Shape of the batch of an update or a scoring pass, and how the mesh splits it."""

    micro_batches: int  # number of micro-batches
    micro_rows: int  # rows of one micro-batch, on all devices together
    row_tokens: int  # positions of a row, padding included
    head_tokens: int  # positions of a row that meet the output head
    row_shards: int  # devices along `data`, `fsdp` and `context`, of all slices
    weight_shards: int  # devices along `fsdp` and `context`
    tensor_shards: int  # devices along `tensor`
    itemsize: int  # bytes of an activation
    adapter_weights: int = 0  # weights of one layer's adapters where only those are trained; 0: all weights are trained


def _weight_itemsize(dtype: str, weight_dtype: str) -> int:
    return jnp.dtype(dtype if weight_dtype == "model" else weight_dtype).itemsize


def seen_tokens(a: Architecture, tokens: float) -> float:
    """Returns how many of `tokens` the next token sees, as a mean over layers; sliding layers see a window at most."""
    share = len(a.sliding_layers) / a.num_layers
    return tokens if not a.window else (1 - share) * tokens + share * min(tokens, a.window)


def decode_weight_bytes(a: Architecture, dtype: str, weight_dtype: str = "model") -> int:
    """Returns the bytes of weights that a decode step reads: all but an embedding that isn't also the output head.

    It assumes that the slots together choose all experts. With weights in int8, norms and biases are counted as a byte
    for each number, and scales are left out: together they are 0.1 % of the weights.
    """
    read = a.num_parameters - (0 if a.tied_embedding else a.vocab_size * a.hidden_size)
    return read * _weight_itemsize(dtype, weight_dtype)


def chip_of(topology: str) -> Chip:
    """Returns the chip that a topology names; ValueError if it is not known."""
    generation, _, shape = topology.partition(":")
    if generation not in CHIPS or not shape:
        raise ValueError(
            f"--topology is {topology!r}; write CHIP:SHAPE with a chip of {', '.join(CHIPS)}, such as v5e:2x4 or "
            "h100:8."
        )
    return CHIPS[generation]


# ---- decoding ----------------------------------------------------------------------------------------------------


def _adapter_weights(a: Architecture, o: EngineOptions) -> int:
    return 0 if o.adapters is None else lora.num_parameters(a, o.adapters)


def decode_step(a: Architecture, o: EngineOptions, tensor: int, mean_context: float | int) -> ProgramCost:
    """Returns the cost of one token for every slot, on each of `tensor` devices.

    It has 2 FLOPs per weight and slot, and 4 N H per layer for each token that a slot sees (q k and p v). Every weight
    and the live cache of the slots are read once. Adapters that are kept apart are read like weights; one half of each
    isn't split over `tensor`, but is counted as if it were.
    """
    adapters = _adapter_weights(a, o)
    matrices = a.num_layers * a.layer_weights(active=True) + a.vocab_size * a.hidden_size + adapters
    seen = seen_tokens(a, mean_context)
    attention = 4 * a.num_heads * a.head_dim * a.num_layers * seen
    cache = o.slots * seen * kv_token_bytes(a, o.dtype, o.attention, o.kv_dtype)
    weights = decode_weight_bytes(a, o.dtype, o.weight_dtype) + adapters * jnp.dtype(o.dtype).itemsize
    return ProgramCost(o.slots * (2 * matrices + attention) / tensor, (weights + cache) / tensor)


def prefill_chunk(a: Architecture, o: EngineOptions, tensor: int, prompt_tokens: float | int) -> ProgramCost:
    """Returns the cost of `prefill_tokens` tokens of prompts of `prompt_tokens`, on each of `tensor` devices.

    It is counted as in `decode_step`, without the head, and as if each token saw all tokens of its prompt.
    """
    matrices, adapters = a.num_layers * a.layer_weights(active=True), _adapter_weights(a, o)
    attention = 4 * a.num_heads * a.head_dim * a.num_layers * seen_tokens(a, prompt_tokens)
    positions = o.prefill_tokens
    size = a.num_layers * a.layer_weights() * _weight_itemsize(o.dtype, o.weight_dtype)
    size += adapters * jnp.dtype(o.dtype).itemsize
    size += positions * kv_token_bytes(a, o.dtype, o.attention, o.kv_dtype)
    return ProgramCost(positions * (2 * (matrices + adapters) + attention) / tensor, size / tensor)


# ---- learning ----------------------------------------------------------------------------------------------------


def learner_call(a: Architecture, b: BatchLayout, *, update: bool) -> ProgramCost:
    """Returns the cost of a scoring pass over a minibatch, or of the summed gradients of an update, on each device.

    A pass has 2 FLOPs per weight and position, for the head only at the positions that predict a response token. Causal
    attention has 2 N H T^2 per layer; of the devices along `context` this is the mean, and the last one has nearly
    twice as much. Gradients need two more passes; for weights under adapters, which have no gradient, one more. Every
    pass of a micro-batch reads all its weights, which are split over `tensor` only.
    """
    passes = 3 if update else 1
    of_frozen = passes - (update and b.adapter_weights > 0)
    layer = 2 * b.row_tokens * (of_frozen * a.layer_weights(active=True) + passes * b.adapter_weights)
    layer += passes * 2 * a.num_heads * a.head_dim * b.row_tokens**2
    head = of_frozen * 2 * a.vocab_size * a.hidden_size * b.head_tokens
    rows = b.micro_batches * b.micro_rows / (b.row_shards * b.tensor_shards)
    weights = of_frozen * a.layer_weights() + passes * b.adapter_weights
    size = b.micro_batches * a.num_layers * weights * b.itemsize / b.tensor_shards
    return ProgramCost(rows * (a.num_layers * layer + head), size)


def optimizer_call(a: Architecture, b: BatchLayout) -> ProgramCost:
    """Returns the cost of the optimiser's step, on each device; its FLOPs are not counted.

    It reads gradients, and reads and writes weights and both moments, all float32.
    """
    trained = a.num_layers * b.adapter_weights or a.num_parameters
    return ProgramCost(0, 7 * 4 * trained / (b.weight_shards * b.tensor_shards))


def roofline(cost: ProgramCost, chip: Chip) -> tuple[float, str]:
    """Returns (least seconds, their cause: "bandwidth" or "compute")."""
    return max((cost.bytes / chip.bandwidth, "bandwidth"), (cost.flops / chip.flops, "compute"))

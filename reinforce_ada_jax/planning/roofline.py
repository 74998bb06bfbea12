"""FLOPs and bytes that a run's programs need at least, and the seconds that a chip needs for them.

Arithmetic only; nothing is compiled here. FLOPs are those of the matrix products, attention's among them: XLA computes
the whole square before it masks, splash attention the blocks up to the diagonal. Bytes are weights, cache, gradients,
optimiser state, the activations kept between layers and attention's scores, each as seldom as possible; other
activations, transfers between chips and the start of kernels are not counted, so the least time is a lower bound.

XLA's `cost_analysis` can't replace these counts: it counts the body of a loop once and sees nothing inside Pallas
kernels. `ProgramCost.flops_loops_once` is counted the same way, so that the two can be compared.
"""

import dataclasses
import math

import jax.numpy as jnp

from reinforce_ada_jax.learning.platform import TPU_FLOPS, tpu_bytes
from reinforce_ada_jax.planning.gpus import GPUS, MEMORY_SHARE
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.sampling.state import EngineOptions, kv_token_bytes

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device, as the compiler sees it.

    Attributes:
      hbm_bytes: memory that a program may use.
      bandwidth: of HBM, bytes per second.
      flops: peak in bfloat16, per second.
      platform: "tpu" or "gpu".
    """

    hbm_bytes: int
    bandwidth: float
    flops: float
    platform: str = "tpu"


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
    """Least work of one device.

    Attributes:
      flops: floating-point operations.
      bytes: read from or written to HBM.
      flops_loops_once: FLOPs with the body of every loop counted once, as XLA counts them; None: not comparable.
    """

    flops: float | int
    bytes: float | int
    flops_loops_once: float | int | None = None


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """Shape of the batch of an update or a scoring pass, and how the mesh splits it.

    Attributes:
      micro_batches: number of micro-batches.
      micro_rows: rows of one micro-batch, on all devices together.
      row_tokens: positions of a row, padding included.
      head_tokens: positions of a row that meet the output head.
      prompt_tokens: limit of a prompt.
      head_tile: (response positions, vocabulary entries) of a block in which logits exist.
      head_kernels: the head runs in Pallas kernels, which recompute the logits and which XLA doesn't count.
      remat: one of `transformer.REMAT`: what the backward pass recomputes.
      attention_block: positions of a block of the attention's kernels; None: XLA's attention of the whole square.
      attention_backward: products of the kernels' backward pass: 7 of splash attention, 5 of cuDNN's.
      row_shards: devices along `data` and `fsdp`.
      weight_shards: devices along `fsdp`.
      tensor_shards: devices along `tensor`.
      itemsize: bytes of an activation.
      adapter_weights: weights of one layer's adapters where only those are trained; 0: all weights are trained.
    """

    micro_batches: int
    micro_rows: int
    row_tokens: int
    head_tokens: int
    prompt_tokens: int
    head_tile: tuple[int, int]
    head_kernels: bool
    remat: str
    attention_block: int | None
    row_shards: int
    weight_shards: int
    tensor_shards: int
    itemsize: int
    attention_backward: int = 7
    adapter_weights: int = 0

    @property
    def devices(self) -> int:
        """Devices that share the work."""
        return self.row_shards * self.tensor_shards


def layer_weights(a: Architecture) -> int:
    """Weights of one layer's matrices."""
    return a.hidden_size * (a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads) + 3 * a.ffn_size)


def _weight_itemsize(dtype: str, weight_dtype: str) -> int:
    return jnp.dtype(dtype if weight_dtype == "model" else weight_dtype).itemsize


def decode_weight_bytes(a: Architecture, dtype: str, weight_dtype: str = "model") -> int:
    """Weights that a decode step reads: all but an embedding that isn't also the output head (one row per slot).

    The scales, norms and biases of weights in int8 are counted as a byte for each number; they are 0.1 % of them.
    """
    read = a.num_parameters - (0 if a.tied_embedding else a.vocab_size * a.hidden_size)
    return read * _weight_itemsize(dtype, weight_dtype)


def chip_of(topology: str) -> Chip:
    """Returns the chip that a topology names.

    Raises:
      ValueError: the chip is not known.
    """
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
    """Cost of one token for every slot, on each of `tensor` devices.

    2 FLOPs per weight and slot, 4 N H per layer for each token that a slot sees (q k and p v). Every weight is read
    once, and the slots' live cache. Adapters beside them are read like weights; one half of each isn't split over
    `tensor`, and is counted as if it were.
    """
    adapters = _adapter_weights(a, o)
    matrices = a.num_layers * layer_weights(a) + a.vocab_size * a.hidden_size + adapters
    attention = 4 * a.num_heads * a.head_dim * a.num_layers * mean_context
    cache = o.slots * mean_context * kv_token_bytes(a, o.dtype, o.attention, o.kv_dtype)
    weights = decode_weight_bytes(a, o.dtype, o.weight_dtype) + adapters * jnp.dtype(o.dtype).itemsize
    return ProgramCost(o.slots * (2 * matrices + attention) / tensor, (weights + cache) / tensor)


def prefill_chunk(a: Architecture, o: EngineOptions, tensor: int, prompt_tokens: float | int) -> ProgramCost:
    """Cost of `prefill_tokens` tokens of prompts of `prompt_tokens`, on each of `tensor` devices.

    As `decode_step`, without the head; each token meets all those of its prompt, seen or not.
    """
    matrices, adapters = a.num_layers * layer_weights(a), _adapter_weights(a, o)
    attention = 4 * a.num_heads * a.head_dim * a.num_layers * prompt_tokens
    positions = o.prefill_tokens
    weights = matrices * _weight_itemsize(o.dtype, o.weight_dtype) + adapters * jnp.dtype(o.dtype).itemsize
    size = weights + positions * kv_token_bytes(a, o.dtype, o.attention, o.kv_dtype)
    return ProgramCost(positions * (2 * (matrices + adapters) + attention) / tensor, size / tensor)


# ---- learning ----------------------------------------------------------------------------------------------------


def _flops(a: Architecture, b: BatchLayout, passes: int) -> tuple[float, float]:
    """FLOPs of a device, (in all, with every loop's body once), where each product is computed `passes` times.

    2 per weight and position, for the head only at the positions that predict a response token; 4 N H T^2 per layer.
    A product with weights that remat keeps is computed once less. The head's two backward kernels each recompute the
    logits. Splash attention leaves out blocks above the diagonal; of its 7 backward products 3 are recomputed, and of
    cuDNN's 5 one.

    Weights under adapters have no gradient: theirs and the head's products are computed once less, and no kernel
    recomputes the logits for it. One half of each adapter isn't split over `tensor`; it is counted as if it were.
    """
    saves = b.remat == "dots" and passes > 1
    frozen = b.adapter_weights > 0 and passes > 1
    matrices = 2 * b.row_tokens * ((passes - saves - frozen) * layer_weights(a) + (passes - saves) * b.adapter_weights)
    square = 2 * a.num_heads * a.head_dim * b.row_tokens**2
    if b.attention_block is None:
        attention = passes * 2 * square
        visible = matrices + attention
    else:
        blocks = math.ceil(b.row_tokens / b.attention_block)
        attention = (2 if passes == 1 else 2 + 2 + b.attention_backward) * square * (blocks + 1) / (2 * blocks)
        visible = matrices
    layer = matrices + attention
    products = passes - 1 if frozen else passes + (b.head_kernels and passes > 1)
    head = products * 2 * a.vocab_size * a.hidden_size * b.head_tokens
    positions, vocab = b.micro_rows * b.head_tokens / b.row_shards, a.vocab_size / b.tensor_shards
    tile = products * 2 * a.hidden_size * min(positions, b.head_tile[0]) * min(vocab, b.head_tile[1])
    device_rows = b.micro_rows / b.devices
    total = b.micro_batches * device_rows * (a.num_layers * layer + head)
    return total, device_rows * visible + (0 if b.head_kernels else tile)


def _layer_bytes(a: Architecture, b: BatchLayout, *, weight_reads: int, score_passes: int) -> float:
    """Bytes of a micro-batch in the layers: their weights, whole along `fsdp`, and attention's scores [rows, N, T, T],
    which splash attention keeps inside of its kernels."""
    weights = weight_reads * a.num_layers * (layer_weights(a) + b.adapter_weights) * b.itemsize / b.tensor_shards
    scores = score_passes * a.num_layers * a.num_heads * b.micro_rows * b.row_tokens**2 * b.itemsize / b.devices
    return weights + (scores if b.attention_block is None else 0)


def _head_bytes(a: Architecture, b: BatchLayout, *, backward: bool) -> float:
    """Bytes that the sweeps over the vocabulary read, whole along `fsdp`.

    Those for statistics and for the hidden states' gradient read the head once for each block of positions; the one for
    the gradient of a head that is trained reads the hidden states once for each block of the vocabulary.
    """
    head = a.vocab_size * a.hidden_size * b.itemsize / b.tensor_shards
    positions = b.micro_rows * b.head_tokens / b.row_shards
    blocks = math.ceil(positions / b.head_tile[0])
    if not backward:
        return blocks * head
    if b.adapter_weights:
        return 2 * blocks * head
    hidden = a.vocab_size / b.tensor_shards / b.head_tile[1] * positions * a.hidden_size * b.itemsize
    return (2 * blocks + 1) * head + hidden


def score_call(a: Architecture, b: BatchLayout) -> ProgramCost:
    """Cost of the old policy's log-probabilities of a minibatch, on each device: one forward pass."""
    flops, once = _flops(a, b, 1)
    size = _layer_bytes(a, b, weight_reads=1, score_passes=2) + _head_bytes(a, b, backward=False)
    return ProgramCost(flops, b.micro_batches * size, once)


def update_call(a: Architecture, b: BatchLayout, master_itemsize: int) -> ProgramCost:
    """Cost of one update on a minibatch, on each device.

    Every product is computed forwards, once more where the backward pass recomputes its layer, and twice backwards:
    8 FLOPs per weight and position where 6 are necessary; under adapters 6 where 4 are. The layers' inputs are written
    and read, and kept results of products with weights; sums of gradients are read and written for every micro-batch;
    the optimiser reads and writes weights and both moments, of adapters only where those are trained.
    """
    sums, step = gradient_call(a, b, master_itemsize), optimizer_call(a, b, master_itemsize)
    return dataclasses.replace(sums, bytes=sums.bytes + step.bytes)


def _trained_bytes(a: Architecture, b: BatchLayout, master_itemsize: int) -> float:
    """Bytes of the trained weights, on each device."""
    trained = a.num_layers * b.adapter_weights or a.num_parameters
    return trained * master_itemsize / (b.weight_shards * b.tensor_shards)


def optimizer_call(a: Architecture, b: BatchLayout, master_itemsize: int) -> ProgramCost:
    """Cost of the optimiser's step of `update_call`; its FLOPs are not those of products."""
    return ProgramCost(0, 7 * _trained_bytes(a, b, master_itemsize))


def gradient_call(a: Architecture, b: BatchLayout, master_itemsize: int) -> ProgramCost:
    """Cost of the summed gradients of `update_call`."""
    flops, once = _flops(a, b, 4)
    shard = _trained_bytes(a, b, master_itemsize)
    saves = b.remat == "dots"
    width = a.hidden_size / b.row_shards
    if saves:
        width += (a.head_dim * (a.num_heads + 2 * a.num_kv_heads) + a.hidden_size + 2 * a.ffn_size) / b.devices
    activations = 2 * a.num_layers * b.micro_rows * b.row_tokens * width * b.itemsize
    size = _layer_bytes(a, b, weight_reads=3 - saves, score_passes=8) + _head_bytes(a, b, backward=True)
    return ProgramCost(flops, b.micro_batches * (size + activations + 2 * shard), once)


def necessary_flops_per_token(a: Architecture, row_tokens: int, adapter_weights: int = 0) -> int:
    """FLOPs that an update needs per position of a row of T tokens, by the usual rule.

    6 per weight and 12 N H T per layer; under adapters 4 per weight and 6 per weight of theirs.
    """
    all_adapters = a.num_layers * adapter_weights
    weights = 4 * a.num_parameters + 6 * all_adapters if all_adapters else 6 * a.num_parameters
    return weights + 12 * a.num_layers * a.num_heads * a.head_dim * row_tokens


def features_call(a: Architecture, b: BatchLayout) -> ProgramCost:
    """Cost of the value head's hidden states of one chunk of prompts, on each device."""
    matrices = layer_weights(a) + b.adapter_weights
    layer = b.micro_rows * b.prompt_tokens * (2 * matrices + 4 * a.num_heads * a.head_dim * b.prompt_tokens)
    weights = a.num_layers * matrices * b.itemsize / b.tensor_shards
    return ProgramCost(a.num_layers * layer / b.devices, weights, layer / b.devices)


def roofline(cost: ProgramCost, chip: Chip) -> tuple[float, str]:
    """Returns (least seconds, what needs them: "bandwidth" or "compute")."""
    return max((cost.bytes / chip.bandwidth, "bandwidth"), (cost.flops / chip.flops, "compute"))

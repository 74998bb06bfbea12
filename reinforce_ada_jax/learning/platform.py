"""Implementations of the learner's programs for a platform: every setting with the value "auto" is resolved here."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from reinforce_ada_jax.config import Config, LearningConfig, replaced
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.learning.scan_logprobs import TILE
from reinforce_ada_jax.policy import cudnn_attention, rounded
from reinforce_ada_jax.policy.architecture import Architecture

# Tokens of a micro-batch on CPUs: its activations stay in the caches, and its products are as fast as larger ones.
CPU_TOKENS = 2048
# Bytes of activations that a micro-batch keeps for the backward pass on CPUs. SmolLM2-135M keeps 0.7 MB a token. With
# 1,536 tokens the program of an update took 1,654 MB beside its arguments, with 384 it took 824 MB, as much as the
# optimiser's step; they are enough for the full rate of a product.
CPU_ACTIVATION_BYTES = 2**29
# (rows, vocab) of the loss on GPUs. A product of 1,024 x 1,024 logits has 32 tiles of 128 x 256 for the 132
# multiprocessors of an H100; one of 4,096 x 8,192 has a thousand. docs/performance.md has its traffic.
GPU_TILE = (4096, 8192)
# GiB that a program may use on a TPU device, by its kind: the limit in error messages of libtpu 0.0.51. A TPU7x chip
# is two devices, and a v4 chip is compiled for as two.
TPU_GIB = {"TPU v4": 15.25, "TPU v5 lite": 15.75, "TPU v5": 95.73, "TPU v6 lite": 31.24, "TPU7x": 94.74}
# Peak in bfloat16 of such a device, FLOP/s: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, each "per chip".
TPU_FLOPS = {
    "TPU v4": 275e12 / 2, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12, "TPU7x": 2307e12 / 2,
}  # fmt: skip
# The same of other devices, roughly: an A100, and two cores of a processor, whose products reach 1.2e11 (AVX2, float32)
# to 1e12 (AVX-512, bfloat16). A program of one micro-batch of SmolLM2-135M spends a tenth of its time on memory that it
# touches for the first time.
OTHER_FLOPS = {"gpu": 312e12, "cpu": 5e11}
# Smallest block of the kernels of `policy.splash_attention`.
SPLASH_BLOCK = 128
# With this many weights or more, products take most of the time on a CPU, so their precision decides it.
LARGE = 10**7
# Seconds of one program of an update's chain, at the peak rate; real programs take longer.
PROGRAM_S = 2.0
# Largest share of a TPU's memory for the copy of `gathers_once`; published runs with 17 % fit (docs/scale.md).
GATHERED_SHARE = 0.18


def tpu_bytes(device_kind: str) -> int:
    """Returns the memory that a program may use on a TPU device; 0 on a device of another kind."""
    return int(TPU_GIB.get(device_kind, 0) * 2**30)


@dataclasses.dataclass(frozen=True)
class Platform:
    """Implementations of the learner's programs."""

    head_backend: str  # passes over the vocabulary: "scan" or "pallas_tpu"
    head_tile: tuple[int, int]  # (rows, vocab) whose logits exist at a time
    attention: str  # "jnp", "blocks" (`policy.blocked_attention`), "splash" or "cudnn"
    refusal: str  # why the attention of a GPU is not "cudnn"
    max_segments: int  # most sequences of a row
    remat: str  # what the backward pass computes again, a name of `transformer.REMAT`
    interpret: bool  # run TPU kernels without a TPU

    def describe(self) -> str:
        """Returns the choices as text, with the reason why a GPU computes attention in blocks."""
        reason = f" (not cudnn: {self.refusal})" if self.refusal else ""
        rows, vocab = self.head_tile
        return (
            f"learner attention {self.attention}{reason}, output head {self.head_backend} in tiles of {rows:,} x "
            f"{vocab:,}, recomputes {self.remat}"
        )


def chosen_dtype(config: Config, name: str, num_parameters: int = 0) -> Config:
    """Returns the configuration with the `model.compute_dtype` of a platform and a model.

    Invariant numerics take float32. On CPUs a model of `LARGE` or more parameters takes bfloat16 where its products are
    faster, as measured here, unless it has adapters. Callers pass 0 parameters for a model with experts.
    """
    if config.model.compute_dtype != "auto":
        return config
    rounds = num_parameters >= LARGE and not config.lora.rank and rounded.is_faster()
    is_fast = config.model.numerics != "invariant" and (name != "cpu" or rounds)
    return replaced(config, {"model.compute_dtype": "bfloat16" if is_fast else "float32"})


def activation_dtype(dtype: DTypeLike, name: str) -> np.dtype:
    """Returns the type of activations of a model in `dtype`: float32 where its products are rounded."""
    return jnp.dtype(jnp.float32 if rounded.applies(dtype, name) else dtype)


def describe_dtype(dtype: DTypeLike, name: str, num_parameters: int) -> str:
    """Returns the precision; a second line warns of a large model in bfloat16 on a CPU that is not fast in it."""
    if jnp.dtype(dtype) == jnp.float32 or name != "cpu":
        return str(jnp.dtype(dtype))
    warning = ""
    if num_parameters >= LARGE and not rounded.is_faster():
        warning = (
            "\nwarning: this processor is not faster in bfloat16. Set model.compute_dtype (`serve`: --dtype) to auto."
        )
    return f"bfloat16 in products, float32 elsewhere{warning}"


def special_attention(architecture: Architecture) -> str:
    """Returns what a model's attention has that cuDNN's kernels lack; empty if nothing."""
    return "sinks of attention" if architecture.attention_sinks else "sliding windows" * bool(architecture.window)


def of_mesh(mesh: Mesh, learning: LearningConfig, architecture: Architecture, dtype: DTypeLike) -> Platform:
    """Chooses implementations for the devices of a mesh, as `resolve` does."""
    device = mesh.devices.flat[0]
    return resolve(
        device.platform, learning, hidden_size=architecture.hidden_size, head_dim=architecture.head_dim, dtype=dtype,
        special=special_attention(architecture), capability=str(getattr(device, "compute_capability", "")),
        context=mesh.shape["context"],
    )  # fmt: skip


def check_parts(platform: Platform, mesh: Mesh, config: Config) -> None:
    """Raises ValueError where the kernels of TPUs can't take the parts into which `mesh.context` cuts rows."""
    context, row_tokens = mesh.shape["context"], config.row_tokens
    if platform.attention == "splash" and context > 1 and row_tokens % (SPLASH_BLOCK * context):
        raise ValueError(
            f"data.max_prompt_tokens + sampling.max_response_tokens is {row_tokens}, and splash attention takes parts "
            f"of a multiple of {SPLASH_BLOCK} tokens: with mesh.context = {context} use a multiple of "
            f"{SPLASH_BLOCK * context}."
        )


def head_tile(name: str, hidden_size: int, dtype: DTypeLike) -> tuple[int, int]:
    """Returns (rows, vocab) whose logits exist at a time.

    On TPUs two blocks of each are in VMEM: with 512 x 512, bfloat16 and a hidden size of 4,096 the kernel of d_hidden
    takes 40 MiB, and the logits in addition. Fewer rows mean more traffic: the head is read once for each block of
    them.
    """
    if name == "tpu":
        return (512, 512) if hidden_size * jnp.dtype(dtype).itemsize <= 2 * 4096 else (256, 256)
    return GPU_TILE if name == "gpu" else TILE


def resolve(
    name: str,
    learning: LearningConfig,
    *,
    hidden_size: int,
    head_dim: int,
    dtype: DTypeLike,
    special: str = "",
    capability: str = "",
    context: int = 1,
) -> Platform:
    """Chooses implementations for the platform `name` ("cpu", "gpu", "tpu"), as far as the settings leave it open.

    `dtype` is that of activations, `special` is of `special_attention`, `capability` the `compute_capability` of a GPU,
    `context` the number of parts of a row. Raises ValueError if `learning.attention` is "cudnn", and cuDNN can't
    compute it.
    """
    on_tpu, on_cpu = name == "tpu", name == "cpu"
    refusal = cudnn_attention.refusal(capability, dtype, head_dim, packed=learning.responses_per_row > 1)
    if special and not refusal:
        refusal = f"the model has {special}"
    if context > 1 and not refusal:
        refusal = "mesh.context cuts rows"
    if learning.attention == "cudnn" and refusal:
        raise ValueError(f"learning.attention is 'cudnn', and {refusal}: set it to 'auto'.")

    def chosen(value: str, auto: str) -> str:
        return auto if value == "auto" else value

    return Platform(
        head_backend="pallas_tpu" if on_tpu else "scan",
        head_tile=head_tile(name, hidden_size, dtype),
        attention=chosen(learning.attention, "splash" if on_tpu else "blocks" if on_cpu or refusal else "cudnn"),
        refusal=refusal if name == "gpu" and learning.attention == "auto" else "",
        max_segments=learning.responses_per_row,
        remat=chosen(learning.remat, "dots" if on_cpu else "full"),
        interpret=not on_tpu,
    )


def activation_bytes(architecture: Architecture, remat: str, dtype: DTypeLike) -> int:
    """Returns the bytes of a token that are kept for the backward pass: inputs of layers, and what `remat` keeps.

    "dots" keeps the results of the products with weights, and that of attention.
    """
    a = architecture
    numbers = a.hidden_size
    if remat == "dots":
        query, keys = a.num_heads * a.head_dim, 2 * a.num_kv_heads * a.head_dim
        # Of experts only the router's logits are stored: the backward pass computes their grouped products again.
        numbers += 2 * query + keys + 2 * a.hidden_size + (a.num_experts or 2 * a.ffn_size)
    return a.num_layers * numbers * jnp.dtype(dtype).itemsize


def row_layout(mesh: Mesh, config: Config, architecture: Architecture) -> RowLayout:
    """Returns the layout of the learner's rows: long ones on CPUs, where attention in blocks can share prompts.

    A row of one prompt and one response at their limits rarely has room for another response. A layer has about 12
    weights for each pair of hidden numbers, so attention to as many tokens as there are hidden numbers takes a tenth of
    the operations of the layer. Longer rows have that many tokens, if each device's part of a micro-batch can fill one.

    Experts are recorded for each response, so models with experts share no prompts. With `learning.responses_per_row` =
    1 nothing is packed.
    """
    name, per_row = mesh.devices.flat[0].platform, config.learning.responses_per_row
    dtype = activation_dtype(config.model.compute_dtype, name)
    platform = of_mesh(mesh, config.learning, architecture, dtype)
    is_packed = per_row > 1 and mesh.shape["context"] == 1 and config.model.numerics == "fast"
    if name != "cpu" or platform.attention != "blocks" or not is_packed:
        return RowLayout(per_row)
    activations = _cpu_tokens(activation_bytes(architecture, platform.remat, dtype))
    parts = mesh_lib.parts(mesh, "batch") * max(1, config.learning.micro_batches)
    of_part = -(-_responses(config) // parts) * config.row_tokens
    tokens = max(config.row_tokens, min(architecture.hidden_size, activations, of_part))
    most = min(tokens, tokens // config.row_tokens * per_row)
    return RowLayout(most, tokens, shares_prompts=not architecture.num_experts)


def _responses(config: Config) -> int:
    """Returns the responses of a minibatch of whole groups."""
    return config.learning.prompts_per_update * config.collection.group_size


def _cpu_tokens(token_bytes: int) -> int:
    """Returns the most tokens of a micro-batch on CPUs, if the backward pass keeps `token_bytes` for each."""
    return min(CPU_TOKENS, CPU_ACTIVATION_BYTES // token_bytes)


def micro_rows(name: str, config: Config, row_shards: int, token_bytes: int, layout: RowLayout) -> int:
    """Returns the rows of a micro-batch: those of a minibatch of whole groups, divided by `learning.micro_batches`.

    With 0 it is the minibatch. On CPUs it is then at most 2,048 tokens and 512 MiB of activations (`token_bytes` each),
    or one row for each device. Of the sizes from half of the largest on, the one with the fewest empty rows is chosen.
    """
    micro_batches = max(1, config.learning.micro_batches)
    rows = layout.num_rows(_responses(config), config.row_tokens, row_shards * micro_batches) // row_shards
    if config.learning.micro_batches or name != "cpu":
        return row_shards * (rows // micro_batches)
    most = min(rows, max(1, _cpu_tokens(token_bytes) // (row_shards * layout.row_tokens(config.row_tokens))))
    return row_shards * min(range(most, most // 2, -1), key=lambda size: -rows % size)


def micro_rows_on(mesh: Mesh, config: Config, architecture: Architecture) -> int:
    """Returns `micro_rows` for the devices of a mesh."""
    name = mesh.devices.flat[0].platform
    dtype = activation_dtype(config.model.compute_dtype, name)
    token_bytes = activation_bytes(architecture, of_mesh(mesh, config.learning, architecture, dtype).remat, dtype)
    layout = row_layout(mesh, config, architecture)
    return micro_rows(name, config, mesh_lib.parts(mesh, "batch"), token_bytes, layout)


def micro_batches_per_program(micro_flops: float, name: str, device_kind: str) -> int:
    """Returns the micro-batches of an update that one program computes; between two programs a run can end.

    They are as many as take `PROGRAM_S` at the peak rate, which is rough where there is no TPU.
    """
    peak = TPU_FLOPS.get(device_kind) or OTHER_FLOPS.get(name, OTHER_FLOPS["gpu"])
    return max(1, int(PROGRAM_S * peak / micro_flops))


def update_program(mesh: Mesh, config: Config, architecture: Architecture) -> int:
    """Returns `micro_batches_per_program` for the devices of a mesh, which share each micro-batch."""
    device = mesh.devices.flat[0]
    row_tokens = row_layout(mesh, config, architecture).row_tokens(config.row_tokens)
    flops = 6 * architecture.active_parameters * micro_rows_on(mesh, config, architecture) * row_tokens
    return micro_batches_per_program(flops / mesh.size, device.platform, device.device_kind)


def gathers_once(copy_bytes: float, device_bytes: float) -> bool:
    """Returns True where an update gathers the layers' weights once, and not in each micro-batch.

    `copy_bytes` are those of the gathered weights on each device, `device_bytes` those of `tpu_bytes`.
    """
    return copy_bytes <= GATHERED_SHARE * device_bytes

"""Compiles a run's programs for a TPU slice that isn't there, and says whether they fit and how fast they could be.

    python -m reinforce_ada_jax.compile_check --config=configs/qwen_1p5b.py --topology=v5e:2x4 [--model=DIR]
        [--mean_context=TOKENS] [--json=FILE]

Needs `pip install libtpu` (the TPU compiler; any machine will do) and of the model only its config.json, or nothing for
a model whose sizes are known (`policy/published.py`). Exit code 1: something doesn't fit; 2: the input is at fault.

Memory is the compiler's own account, per device. FLOPs and bytes are counted here by hand, because `cost_analysis`
counts the body of a loop once and sees nothing inside Pallas kernels; the least time follows from them and says
nothing of communication, activations, or how well the hardware is used. Nothing here has run on a TPU.
"""

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental import topologies
from jax.sharding import Mesh
from ml_collections import ConfigDict

from reinforce_ada_jax import assembly, command
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax import mesh as mesh_lib
from reinforce_ada_jax.policy.architecture import Architecture, from_hf
from reinforce_ada_jax.policy.huggingface import read_config
from reinforce_ada_jax.policy.published import PUBLISHED
from reinforce_ada_jax.policy.transformer import nest, param_shardings, weight_shapes
from reinforce_ada_jax.sampling.engine import Engine, buckets, options_from_config
from reinforce_ada_jax.sampling.paged_attention import FOR_PLATFORM
from reinforce_ada_jax.sampling.pallas_attention import pool_head_size
from reinforce_ada_jax.sampling.state import EngineOptions

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a TPU slice, as the compiler sees it.

    Attributes:
      hbm_bytes: what a program may use.
      bandwidth: of HBM, bytes a second.
      flops: peak in bfloat16, a second.
    """

    hbm_bytes: int
    bandwidth: float
    flops: float


# Bandwidth and peak: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, each "per chip" (tpu7x bandwidth: jax's
# pallas/mosaic/tpu_info.py). hbm_bytes: the "available HBM" of libtpu 0.0.51's own CompileTimeHbmOom. A tpu7x chip is
# two devices, and a v4 chip is compiled for as two (a real one may show them as one): those have half a chip each.
CHIPS = {
    "v4": Chip(int(15.25 * GIB), 1200e9 / 2, 275e12 / 2),
    "v5e": Chip(int(15.75 * GIB), 819e9, 197e12),
    "v5p": Chip(int(95.73 * GIB), 2765e9, 459e12),
    "v6e": Chip(int(31.24 * GIB), 1640e9, 918e12),
    "tpu7x": Chip(int(94.74 * GIB), 7400e9 / 2, 2307e12 / 2),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does at least: floating-point operations, and bytes read from or written to HBM."""

    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program of a run.

    Attributes:
      name: what it does.
      lower: gives the lowered program for its abstract arguments.
      work: of one `unit`.
      unit: what `work` counts: a call, or one turn of the loop inside.
      beside_bytes: what else a training run keeps on each device meanwhile.
    """

    name: str
    lower: Callable[[], Any]
    work: Work
    unit: str
    beside_bytes: int


# ---- counting ----------------------------------------------------------------------------------------------------


def _layer_weights(a: Architecture) -> int:
    """Weights of one layer's matrices."""
    return a.hidden_size * (a.head_size * (2 * a.num_heads + 2 * a.num_kv_heads) + 3 * a.ffn_size)


def token_bytes(a: Architecture, o: EngineOptions) -> int:
    """Of one token's keys and values in the cache, all layers, with the columns that pages have for the kernel."""
    columns = pool_head_size(a.head_size, o.attention)
    return 2 * a.num_layers * a.num_kv_heads * columns * jnp.dtype(o.dtype).itemsize


def decode_turn(a: Architecture, o: EngineOptions, tensor: int, mean_context: int) -> Work:
    """One token for every slot, on each of `tensor` devices.

    2 FLOPs a weight and slot, 4 N H a layer for each token that a slot sees (q k and p v). Every weight is read once
    (of an embedding that isn't also the output head only a row a slot, not counted), and the slots' live cache.
    """
    head = a.vocab_size * a.hidden_size
    matrices = a.num_layers * _layer_weights(a) + head
    attention = 4 * a.num_heads * a.head_size * a.num_layers * mean_context
    weights = (a.num_parameters - (0 if a.tied_embedding else head)) * jnp.dtype(o.dtype).itemsize
    cache = o.slots * mean_context * token_bytes(a, o)
    return Work(o.slots * (2 * matrices + attention) / tensor, (weights + cache) / tensor)


def prefill_call(a: Architecture, o: EngineOptions, tensor: int, tokens: int) -> Work:
    """`prefill_rows` prompts of a bucket of `tokens`, on each of `tensor` devices.

    As `decode_turn`, without the head; attention over the whole square, which is what XLA computes before it masks.
    """
    matrices = a.num_layers * _layer_weights(a)
    attention = 4 * a.num_heads * a.head_size * a.num_layers * tokens
    positions = o.prefill_rows * tokens
    bytes_ = matrices * jnp.dtype(o.dtype).itemsize + positions * token_bytes(a, o)
    return Work(positions * (2 * matrices + attention) / tensor, bytes_ / tensor)


def roofline(work: Work, chip: Chip) -> tuple[float, str]:
    """(least seconds, which of the two takes them: "bandwidth" or "compute")."""
    by_bytes, by_flops = work.bytes / chip.bandwidth, work.flops / chip.flops
    return max(by_bytes, by_flops), "bandwidth" if by_bytes >= by_flops else "compute"


def learner_bytes(architecture: Architecture, config: ConfigDict, mesh: Mesh) -> tuple[int, int]:
    """(master weights, AdamW's two moments) on each device."""
    shapes = {name: shape for name, (shape, _) in weight_shapes(architecture).items()}
    shards = jax.tree.map(lambda s, x: math.prod(s.shard_shape(x)), param_shardings(architecture, mesh), nest(shapes))
    weights = sum(jax.tree.leaves(shards)) * jnp.dtype(config.model.parameter_dtype).itemsize
    return weights, 2 * weights


# ---- programs ----------------------------------------------------------------------------------------------------


def engine_programs(engine: Engine, config: ConfigDict, mean_context: int) -> list[Program]:
    """The engine's own jitted programs on the engine's mesh: the decode window, and prefill by bucket of length."""
    a, o, mesh = engine.architecture, engine.options, engine.mesh
    tensor, params, lower = mesh.shape["tensor"], engine.abstract_weights(), engine.programs()
    weights, moments = learner_bytes(a, config, mesh)
    same_arrays = jax.tree.map(
        lambda x, there: x.dtype == config.model.parameter_dtype and x.sharding.is_equivalent_to(there, x.ndim),
        params,
        param_shardings(a, mesh),
    )
    beside = moments if all(jax.tree.leaves(same_arrays)) else weights + moments

    def prefill(tokens):
        work = prefill_call(a, o, tensor, tokens)
        return Program(f"prefill {o.prefill_rows} x {tokens}", lower[f"prefill {tokens}"], work, "call", beside)

    work = decode_turn(a, o, tensor, mean_context)
    window = Program(f"decode window of {o.window}", lower["decode window"], work, "turn", beside)
    return [window, *(prefill(tokens) for tokens in buckets(o.max_prompt_tokens))]


def compile_program(program: Program, chip: Chip) -> dict[str, Any]:
    """Compiles, and says what `main` prints and writes; sizes and work per device.

    `hbm_peak_bytes` is the program alone, arguments included. Where it doesn't compile for want of memory, `arguments`
    and `temporaries` are None, and the peak too unless it was HBM that ran out.
    """
    begin = time.monotonic()
    arguments = temporaries = peak = reason = None
    try:
        memory = program.lower().compile().memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        peak = memory.peak_memory_in_bytes
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        peak = needed_bytes(reason)
    seconds, bound = roofline(program.work, chip)
    over = 0 if peak is None else max(0, peak + program.beside_bytes - chip.hbm_bytes)
    return {
        "program": program.name,
        "compile_seconds": round(time.monotonic() - begin, 1),
        "hbm_argument_bytes": arguments,
        "hbm_temporary_bytes": temporaries,
        "hbm_peak_bytes": peak,
        "hbm_beside_bytes": program.beside_bytes,
        "hbm_limit_bytes": chip.hbm_bytes,
        "fits": reason is None and not over,
        "over_bytes": over,
        "reason": reason,
        "unit": program.unit,
        "flops": program.work.flops,
        "bytes": program.work.bytes,
        "least_seconds": seconds,
        "bound": bound,
    }


def needed_bytes(message: str) -> int | None:
    """The HBM that a CompileTimeHbmOom message asks for: "... (27.14G) exceeds available HBM (15.75G)"."""
    found = re.search(r"\(([\d.]+)([KMG])\) exceeds available HBM", message)
    return int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[found[2]]) if found else None


# ---- input -------------------------------------------------------------------------------------------------------


def chip_of(topology: str) -> Chip:
    """The chip of a topology's name.

    Raises:
      ValueError: no such chip.
    """
    generation, _, shape = topology.partition(":")
    if generation not in CHIPS or not shape:
        raise ValueError(
            f"--topology is {topology!r}; write CHIP:SHAPE with a chip of {', '.join(CHIPS)}, such as v5e:2x4 or "
            "v5p:2x2x1."
        )
    return CHIPS[generation]


def topology_devices(topology: str) -> list[jax.Device]:
    """The devices of a slice, which need not exist.

    Raises:
      ValueError: no compiler here, or no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for a TPU needs its compiler, which any machine can run: pip install libtpu.")
    # The compiler asks where it runs: first a metadata server, which hangs outside Google's cloud, and then these, of
    # which it complains where they are missing. What they say changes nothing: the topology is named.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    jax.config.update("jax_platforms", "cpu")  # leave a TPU that is here to those who use it
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology={topology}: {error}") from error


def find_architecture(path: str, model: str | None) -> tuple[Architecture, str]:
    """(architecture, where it was found): the --model folder, the configuration's, or the published sizes.

    Raises:
      ValueError: in none of them.
    """
    if model is not None:
        return read_config(model), model
    folder = assembly.model_folder(path)
    if folder.is_dir():
        return read_config(folder), str(folder)
    if folder.name in PUBLISHED:
        return from_hf(PUBLISHED[folder.name]), f"the published sizes of {folder.name}"
    raise ValueError(
        f"{folder} is not a folder, and the sizes of {folder.name!r} aren't known here (only of "
        f"{', '.join(PUBLISHED)}): --model=DIR with a config.json is enough."
    )


def engine_options(config: ConfigDict, architecture: Architecture) -> EngineOptions:
    """The run's engine on a TPU.

    Raises:
      ValueError: it asks for the attention of a GPU.
    """
    # Which tokens end a response changes no size, and the tokenizer that says so may not be here.
    options = options_from_config(config, architecture.eos_ids or (0,))
    attention = FOR_PLATFORM["tpu"] if config.sampling.attention == "auto" else config.sampling.attention
    if attention == "pallas_gpu":
        raise ValueError("sampling.attention is 'pallas_gpu': a TPU takes auto, pallas_tpu or jnp.")
    return dataclasses.replace(options, attention=attention)


# ---- output ------------------------------------------------------------------------------------------------------


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def row(result: dict[str, Any]) -> str:
    """A line of the table."""
    fits = "yes" if result["fits"] else f"NO: {_gib(result['over_bytes'])} GiB over" if result["over_bytes"] else "NO"
    return (
        f"{result['program']:22}{result['compile_seconds']:7.1f} s{_gib(result['hbm_argument_bytes']):>11}"
        f"{_gib(result['hbm_temporary_bytes']):>13}{_gib(result['hbm_peak_bytes']):>7}"
        f"{_gib(result['hbm_beside_bytes']):>8}{_gib(result['hbm_limit_bytes']):>8}"
        f"{result['flops'] / 1e9:12,.0f}{result['bytes'] / 1e9:9.2f}"
        f"{1e3 * result['least_seconds']:10.2f} ms a {result['unit']}, {result['bound']:9}  {fits}"
    )


HEADER = (
    f"{'program':22}{'compile':>9}{'arguments':>11}{'temporaries':>13}{'peak':>7}{'beside':>8}{'limit':>8}"
    f"{'GFLOP':>12}{'GB':>9}{'at least':>10}"
)


def main(config: ConfigDict, topology: str, model: str | None, mean_context: int | None, file: str | None) -> None:
    """Compiles one program after the other, and ends the process with code 1 where one doesn't fit."""
    with command.user_input():
        config_lib.validate(config)
        chip = chip_of(topology)
        architecture, source = find_architecture(config.model.path, model)
        options = engine_options(config, architecture)
        longest = options.max_prompt_tokens + options.max_response_tokens
        mean_context = longest // 2 if mean_context is None else mean_context
        if not 1 <= mean_context <= longest:
            raise ValueError(f"--mean_context is {mean_context}; a slot sees 1 to {longest} tokens.")
        if file is not None and not pathlib.Path(file).absolute().parent.is_dir():
            raise ValueError(f"--json={file}: the folder to write it to does not exist.")
        devices = topology_devices(topology)
        mesh = mesh_lib.make_mesh(**config.mesh, devices=devices)
        engine = Engine(architecture, options, mesh=mesh)
        programs = engine_programs(engine, config, mean_context)
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(
        f"slice    {topology}, {len(devices)} devices of {_gib(chip.hbm_bytes)} GiB; mesh {axes}\n"
        f"model    {architecture.family}, {architecture.num_parameters:,} weights, from {source}\n"
        f"engine   {engine.replicas} replicas, each of {options.slots} slots, {options.pages:,} pages of "
        f"{options.page_size} tokens, {options.attention}, "
        f"{options.dtype}; slots see {mean_context:,} tokens in the mean\n\n"
        f"Per device; memory in GiB; `beside` is the learner's, which a training run keeps there too.\n{HEADER}",
        flush=True,
    )
    results = []
    for program in programs:
        with command.user_input():
            results.append(compile_program(program, chip))
        print(row(results[-1]), flush=True)
        if results[-1]["reason"]:
            print(f"    {results[-1]['reason']}", flush=True)
    tokens = engine.replicas * options.slots / results[0]["least_seconds"]
    print(f"\nDecoding: at most {tokens:,.0f} tokens/s with every slot busy (a roofline, not a measurement).")
    if file is not None:
        pathlib.Path(file).write_text(json.dumps(results, indent=2) + "\n")
    if not all(result["fits"] for result in results):
        sys.exit(command.STOPPED)


if __name__ == "__main__":
    CONFIG = command.define_config()
    TOPOLOGY = flags.DEFINE_string("topology", None, "The slice: v5e:2x4, v5p:2x2x1, v6e:2x4, ...", required=True)
    MODEL = flags.DEFINE_string("model", None, "A folder with the model's config.json, in place of model.path.")
    CONTEXT = flags.DEFINE_integer("mean_context", None, "Tokens that a slot sees in the mean; half of what it may.")
    JSON = flags.DEFINE_string("json", None, "Where to write the results as a list.")
    command.run(lambda: main(CONFIG.value, TOPOLOGY.value, MODEL.value, CONTEXT.value, JSON.value))

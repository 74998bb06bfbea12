"""The work of `compile_check`: it compiles the programs for the named devices, and prints the table and the plan."""

import dataclasses
from collections.abc import Callable

from jax.sharding import Mesh

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.config.rules import longest_response
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.files import gguf
from reinforce_ada_jax.learning.platform import chosen_dtype
from reinforce_ada_jax.planning import plan as plan_lib
from reinforce_ada_jax.planning.compilation import ProgramResult, compile_program, resident_result, topology_devices
from reinforce_ada_jax.planning.gpus import answering_for
from reinforce_ada_jax.planning.plan import Deployment, Statistics
from reinforce_ada_jax.planning.programs import AbstractRun, abstract_run, engine_programs, learner_programs
from reinforce_ada_jax.planning.roofline import GIB, chip_of
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import Architecture, from_hf
from reinforce_ada_jax.policy.huggingface import read_config
from reinforce_ada_jax.policy.presets import PUBLISHED
from reinforce_ada_jax.sampling.draft_choice import with_drafts
from reinforce_ada_jax.sampling.engine import choose_apart
from reinforce_ada_jax.sampling.paged_attention import FOR_PLATFORM
from reinforce_ada_jax.sampling.programs import num_replicas
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.training import components as components_lib

HEADER = (
    f"{'program':22}{'compile':>9}{'arguments':>11}{'temporaries':>13}{'peak':>7}{'beside':>8}{'limit':>8}"
    f"{'GFLOP':>14}{'GB':>10}{'at least':>11}"
)


def find_architecture(path: str, model: str | None) -> tuple[Architecture, str]:
    """Returns (architecture, its source): --model, model.path, or the published sizes; ValueError if none has it."""
    if model is not None:
        return read_config(model), model
    folder = components_lib.local_folder(path)
    if folder.is_dir() or gguf.find(folder) is not None:
        return read_config(folder), str(folder)
    name = folder.name.partition("@")[0]
    if name in PUBLISHED:
        return from_hf(PUBLISHED[name]), f"the published sizes of {name}"
    raise ValueError(
        f"{folder} is not a folder, and the sizes of {name!r} aren't known here (only of "
        f"{', '.join(PUBLISHED)}): --model=DIR with a config.json is enough."
    )


def engine_options(config: Config, architecture: Architecture, platform: str) -> EngineOptions:
    """Returns the options of the run's engine; ValueError if sampling.attention is another platform's."""
    # The tokens that end a response change no size, and the tokenizer that has them may not be here.
    options = components_lib.engine_options(config, architecture, architecture.eos_ids or (0,))
    own = FOR_PLATFORM[platform]
    attention = own if config.sampling.attention == "auto" else config.sampling.attention
    if attention not in (own, "jnp"):
        raise ValueError(f"sampling.attention is {attention!r}: a {platform.upper()} takes auto, {own} or jnp.")
    apart = choose_apart(attention, options.dtype)
    options = dataclasses.replace(options, attention=attention, apart=apart)
    return with_drafts(options, architecture, config.sampling.drafts, platform)


def table_row(result: ProgramResult) -> str:
    fits = "yes" if result.fits else f"NO: {_gib(result.over_bytes)} GiB over" if result.over_bytes else "NO"
    return (
        f"{result.program:22}{result.compile_seconds:7.1f} s{_gib(result.hbm_argument_bytes):>11}"
        f"{_gib(result.hbm_temporary_bytes):>13}{_gib(result.hbm_peak_bytes):>7}"
        f"{_gib(result.hbm_beside_bytes):>8}{_gib(result.hbm_limit_bytes):>8}"
        f"{result.flops / 1e9:14,.0f}{result.bytes / 1e9:10,.2f}"
        f"{1e3 * result.least_seconds:11,.2f} ms a {result.unit}, {result.bound:9}  {fits}"
    )


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def _introduction(topology: str, deployment: Deployment, source: str, run: AbstractRun, means: Statistics) -> str:
    architecture, options, mesh = deployment.architecture, deployment.options, run.learner.mesh
    adapters, gathered = "", "; they share one copy of the layers' weights" if run.learner.gathers_once else ""
    between, slices = "", mesh_lib.num_slices(mesh)
    if slices > 1:
        size = mesh_lib.shard_bytes(run.state.params)
        topology = f"{slices} x {topology}"
        between = f"\nbetween  slices: an update sums {_gib(size)} GiB of gradients of each device, once"
    update = run.learner.update
    chain = f", {update.micro_batches_per_program} in a program" if update.is_chain(run.batch) else ""
    if run.learner.lora is not None:
        adapters = (
            f"; {lora.num_parameters(architecture, run.learner.lora):,} weights of adapters are trained, those under "
            f"them stay in {deployment.config.model.compute_dtype}"
        )
    return (
        f"slice    {topology}, {mesh.size} devices of {_gib(deployment.chip.hbm_bytes)} GiB; mesh "
        f"{mesh_lib.describe(mesh)}{between}\n"
        f"model    {architecture.family}, {architecture.described_size}, from {source}\n"
        f"engine   {num_replicas(run.engine.mesh)} replicas, each of {options.slots} slots, {options.pages:,} pages of "
        f"{options.page_size} tokens, {options.attention}, "
        f"{options.dtype}; slots see {means.context:,.0f} tokens in the mean\n"
        f"learner  {run.batch.tokens.shape[0]} micro-batches of {run.learner.micro_rows} rows of "
        f"{run.batch.tokens.shape[2]:,} tokens{chain}{gathered}{adapters}\n\n"
        f"Per device; memory in GiB; `beside` is what else a training run keeps there meanwhile.\n{HEADER}"
    )


def _mesh_over(topology: str, slices: int, config: Config) -> Mesh:
    if config.mesh.sampler:
        raise ValueError(
            f"mesh.sampler is {config.mesh.sampler}: the programs of a slice are checked where all devices draw and "
            "learn. Set mesh.sampler to 0, and check a slice of the learner's devices, then one of "
            "the sampler's."
        )
    devices = topology_devices(topology, slices)
    mesh = mesh_lib.make_mesh(**config.mesh.axes, devices=devices)
    if mesh.size < len(devices):
        of_all = topology if slices == 1 else f"{topology} with --slices={slices}"
        raise ValueError(
            f"--topology={of_all} has {len(devices)} devices, mesh.data * mesh.fsdp * mesh.context * mesh.tensor "
            f"only {mesh.size}: set --config.mesh.fsdp={len(devices) * config.mesh.fsdp // mesh.size}, or name a "
            "smaller slice."
        )
    return mesh


def check_slice(
    config: Config, topology: str, model: str | None, means: Statistics, log: Callable[[str], None], *, slices: int = 1
) -> list[ProgramResult]:
    """Compiles one program after the other for a slice, or several, and logs the table and the plan for these means.

    Returns:
      The programs' results; only `resident_result` where that alone is too much.

    Raises:
      ValueError: the slice, the model or the mesh is impossible.
    """
    chip = chip_of(topology)
    config = chosen_dtype(config, chip.platform)
    architecture, source = find_architecture(config.model.path, model)
    architecture = architecture.for_texts(config.data.max_prompt_tokens + longest_response(config))
    options = engine_options(config, architecture, chip.platform)
    run = abstract_run(config, architecture, options, _mesh_over(topology, slices, config))
    deployment = Deployment(config, architecture, options, chip)
    programs = engine_programs(run, means.context) + learner_programs(run)
    log(_introduction(topology, deployment, source, run, means))
    resident = resident_result(run, chip)
    if not resident.fits:
        too_much = (
            f"nothing is compiled: learner state ({_gib(run.learner_bytes)}) and cache ({_gib(run.cache_bytes)}) "
            f"are {_gib(resident.over_bytes)} GiB over"
        )
        log("\nchange   ".join([too_much, *plan_lib.remedies(deployment, [resident], run.learner_bytes)]))
        return [resident]
    results = []
    for program in programs:
        with answering_for(run.learner.mesh.devices.flat[0]):
            results.append(compile_program(program, chip))
        log("\n    ".join(filter(None, (table_row(results[-1]), results[-1].reason))))
    plan = plan_lib.plan_text(deployment, results, means, run.learner_bytes)
    log(f"\nA lower bound, not a measurement:\n{plan}")
    return results

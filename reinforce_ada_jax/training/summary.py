"""Text that a command prints before it begins: model, stop tokens, mesh, memory, budget, lengths, files."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.config import Config, EvaluationConfig, SamplingConfig, changed, longest_response
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.learning import layer_gather
from reinforce_ada_jax.learning import platform as platform_lib
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.sampling.programs import num_replicas
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.reward_check import output_file


def model_and_mesh(config: Config, components: Components, who: str) -> list[str]:
    """Returns the lines on the model and the devices; `who` names the weights."""
    architecture, stop_ids = components.architecture, components.engine.options.stop_ids
    stop = ", ".join(f"{id} {components.tokenizer.token(id)!r}" for id in stop_ids)
    precision = platform_lib.describe_dtype(
        config.model.compute_dtype, jax.default_backend(), architecture.num_parameters
    )
    axes, kind = mesh_lib.describe(components.mesh), jax.devices()[0].device_kind
    mesh = f"{axes} of {kind}"
    if config.mesh.sampler:
        mesh = f"learner {axes}, sampler {mesh_lib.describe(components.engine.mesh)}, of {kind}"
    return [
        f"model       {who}: {architecture.family}, {architecture.described_size}; stops on {stop}",
        f"precision   {precision}",
        f"mesh        {mesh}",
    ]


def _compute(config: Config, components: Components) -> str:
    """Returns a line on the implementations that were chosen for the platform."""
    mesh, architecture = components.mesh, components.architecture
    platform = mesh.devices.flat[0].platform
    chosen = platform_lib.of_mesh(mesh, config.learning, architecture, jnp.dtype(config.model.compute_dtype))
    in_program = platform_lib.update_program(mesh, config, architecture)
    micro_rows = platform_lib.micro_rows_on(mesh, config, architecture)
    responses = config.learning.prompts_per_update * config.collection.group_size
    rows = platform_lib.row_layout(mesh, config, architecture).num_rows(responses, config.row_tokens, micro_rows)
    chain = f", {in_program} micro-batches of an update in a program" if rows > micro_rows * in_program else ""
    gathered = ""
    if not config.lora.rank and layer_gather.is_chosen(architecture, mesh, config):
        gathered = ", gathers the layers' weights once an update"
    if config.model.numerics == "invariant":
        chosen = dataclasses.replace(chosen, attention="invariant", refusal="")
    decode = components.engine.options.attention
    return f"compute     {platform}: decode attention {decode}, {chosen.describe()}{chain}{gathered}"


def weight_bytes(config: Config, components: Components) -> tuple[int, int]:
    """Returns the bytes of what a run trains, with its moments in float32, and of the base of its adapters."""
    architecture, adapters = components.architecture, lora.make(config.lora)
    if adapters is None:
        return 3 * 4 * architecture.num_parameters, 0
    base = architecture.num_parameters * jnp.dtype(config.model.compute_dtype).itemsize
    return 3 * 4 * lora.num_parameters(architecture, adapters), base


def cache(components: Components) -> str:
    """Returns the size of the cache of keys and values, with the pages and slots that it comes from."""
    options, replicas = components.engine.options, num_replicas(components.engine.mesh)
    each = f" in each of {replicas} replicas" if replicas > 1 else ""
    chosen = f"; {components.slots_reason}" if components.slots_reason else ""
    return (
        f"cache {components.engine.cache_bytes / 2**20:,.1f} MiB{each} ({options.pages} pages of {options.page_size} "
        f"tokens, {options.slots} slots{chosen})"
    )


def _beyond(config: Config, components: Components) -> str:
    """Returns a remark if prompts and responses together are longer than the model was made for.

    The prompts of an environment's engine have the earlier turns in them, and the turn that is drawn is one of these.
    """
    options = components.engine.options
    return components.architecture.beyond(options.max_prompt_tokens if config.environment.path else options.most_tokens)


def model_and_memory(config: Config, components: Components, who: str) -> list[str]:
    """Returns the lines of `model_and_mesh` and one on memory, for a command that only draws."""
    weight_bytes = components.architecture.num_parameters * jnp.dtype(config.model.compute_dtype).itemsize
    beyond = _beyond(config, components)
    memory = f"memory      weights {weight_bytes / 2**20:,.1f} MiB, {cache(components)}{beyond}"
    return [*model_and_mesh(config, components, who), memory]


def drawing(
    model: Sequence[str],
    counts: Mapping[str, tuple[int, int]],
    read: Sequence[str],
    samples: int,
    sampling: SamplingConfig | EvaluationConfig,
    output: pathlib.Path,
    *,
    reward: str = "",
) -> str:
    """Returns the summary of the draws that `evaluate` or `prepare` will make.

    `model` has the lines of `model_and_memory`, `counts` the numbers of problems and of problems still to be drawn by
    set, and `read` a line on the columns of each source. `reward` says what a reference answer gets.
    """
    sets = [
        f"{name} {problems:,}" + (f" ({problems - missing:,} of them stored)" if missing < problems else "")
        for name, (problems, missing) in counts.items()
    ]
    return "\n".join(
        [
            *model,
            *(f"read        {line}" for line in read),
            f"problems    {', '.join(sets)}",
            f"responses   {samples} each at temperature {sampling.temperature:g}, top_k {sampling.top_k}, top_p "
            f"{sampling.top_p:g}, up to {sampling.max_response_tokens:,} tokens",
            *([f"reward      {reward}"] if reward else []),
            f"files       {buckets.origin(output)}",
        ]
    )


def dry_run(config: Config, text: str) -> str:
    """Returns the text of a dry run: the settings that are not at their defaults, then `text`, what would run."""
    settings = "\n".join(f"  {key} = {value!r}" for key, value in sorted(changed(config).items()))
    end = "dry run: the input is valid. Nothing was started, and no file of the run was written."
    return f"Settings that differ from their defaults:\n{settings}\n\n{text}\n\n{end}"


def summary(
    config: Config,
    workdir: pathlib.Path,
    components: Components,
    strategy: Strategy,
    *,
    num_prompts: int,
    read: str,
    reward: str = "",
    copy_bytes: int = 0,
) -> str:
    """Returns the summary of a run: model, machine, budget, what a reward of the user's gives, where the files go.

    `copy_bytes` is the size of the copy of the weights that decoding reads, on each device.
    """
    architecture, options = components.architecture, components.engine.options
    collection = config.collection
    adapters = lora.make(config.lora)
    trained = architecture.num_parameters if adapters is None else lora.num_parameters(architecture, adapters)
    trained_bytes, base_bytes = weight_bytes(config, components)
    over = ""
    if adapters is not None:
        over = f" of {trained:,} adapter weights (rank {adapters.rank}, alpha {adapters.alpha:g}, on "
        over += f"{', '.join(adapters.targets)}), their base {base_bytes / 2**20:,.1f} MiB"
    if copy_bytes:
        over += f", copy for decoding {copy_bytes / 2**20:,.1f} MiB"
    limit = "any number of" if strategy.max_draws is None else f"at most {strategy.max_draws}"
    updates = collection.prompts_per_iteration // config.learning.prompts_per_update
    updates_each = "one update" if updates == 1 else f"{updates} updates"
    ahead = ", while the next iteration is drawn" if config.draws_ahead else ""
    prints = f"; it prints to {buckets.origin(output_file(workdir))}" if config.reward.path else ""
    turns = ""
    if config.environment.path:
        turns = f", turns up to {options.max_response_tokens:,}"
    return "\n".join(
        [
            *model_and_mesh(config, components, str(components.folder)),
            _compute(config, components),
            f"problems    {read}",
            f"memory      weights and moments {trained_bytes / 2**20:,.1f} MiB{over}, {cache(components)}",
            f"budget      {config.iterations} iterations of {collection.prompts_per_iteration} prompts (of "
            f"{num_prompts:,}), {updates_each} each{ahead}; {collection.strategy}: {limit} responses a prompt, "
            f"groups of {collection.group_size}",
            f"lengths     prompts up to {config.data.max_prompt_tokens:,} tokens (template {config.data.template}), "
            f"responses up to {longest_response(config):,}{turns}{_beyond(config, components)}",
            *([f"reward      {reward}{prints}"] if reward else []),
            f"files       {buckets.origin(workdir)}: config.json, metrics.jsonl, checkpoints/, evaluations/, samples/",
        ]
    )

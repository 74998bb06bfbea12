"""Engines of the rollout benchmarks, real or simulated, and one pass of a workload through them."""

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from bench import models
from bench.inputs import architecture_of
from bench.measuring import machine
from bench.simulation import Cost
from bench.workloads import Workload
from reinforce_ada_jax.collection.collect import CollectOptions, collect
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.planning.roofline import decode_weight_bytes
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import TAIL, Engine, choose_apart, enough_open_prompts, enough_pages
from reinforce_ada_jax.sampling.paged_attention import choose_backend
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams, kv_token_bytes
from reinforce_ada_jax.types import Pool, Request


def _only_cpu() -> bool:
    """Returns True if JAX will find nothing but CPUs; may be called before JAX looks for devices."""
    platforms = jax.config.values["jax_platforms"]
    if platforms:
        return platforms == "cpu"
    return not any(importlib.util.find_spec(name) for name in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"))


def use_one_device_per_replica(options: flags.FlagValues) -> None:
    """On a CPU, gives each replica a device; to be called before JAX looks for devices.

    The default is a replica for each core, and as many threads: `tiny_model` made 10,800 tokens/s with one replica of
    one thread and 8,100 with one of two. With `--threads` there is one replica, which is faster for models that outgrow
    the caches. Replicas share XLA's threads, of which there is at least one for each.
    """
    if _only_cpu() and not options.simulate:
        options.replicas = options.replicas or (1 if options.threads else len(os.sched_getaffinity(0)))
        os.environ["NPROC"] = str(options.threads or 1)  # XLA's number of threads, or that of devices if it is more
        jax.config.update("jax_num_cpu_devices", options.replicas)


def engine_options(workload: Workload, options: flags.FlagValues) -> EngineOptions:
    """Returns the options of each replica, just large enough for a workload's prompts and responses.

    Raises:
      ValueError: the replicas can't share the slots.
    """
    replicas = options.replicas or 1
    if options.slots % replicas:
        raise ValueError(f"--slots={options.slots} can't be shared by {replicas} replicas.")
    slots = options.slots // replicas
    # With a barrier no prompt is closed before the last round has begun: all of them stay open.
    few = enough_open_prompts(slots, options.samples_per_round)
    open_prompts = max(slots, len(workload.prompts)) if options.barrier else few
    attention = choose_backend(options.attention)
    made = EngineOptions(
        slots=slots, window=options.window, page_size=options.page_size, pages=options.pages,
        open_prompts=options.open_prompts or open_prompts, prefill_tokens=options.prefill_tokens,
        max_prompt_tokens=workload.max_prompt_tokens,
        max_response_tokens=(options.max_response_tokens if options.simulate else None) or int(workload.lengths.max()),
        stop_ids=(), seed=0, dtype=options.dtype, apart=choose_apart(attention, options.dtype), attention=attention,
        kv_dtype=options.kv_dtype, weight_dtype=options.weight_dtype, tail=TAIL,
    )  # fmt: skip
    return made if options.pages else dataclasses.replace(made, pages=enough_pages(made))


def make_rollouts(
    architecture: Architecture, params: Params, options: EngineOptions, replicas: int
) -> tuple[Rollouts, Params]:
    """Returns an engine of `replicas` replicas, and the weights on its devices."""
    mesh = mesh_lib.make_mesh(data=replicas)
    return Rollouts(Engine(architecture, options, mesh=mesh)), jax.device_put(
        params, NamedSharding(mesh, PartitionSpec())
    )


def draw(
    rollouts: Rollouts,
    params: Params,
    workload: Workload,
    *,
    stream: int = 0,
    limit: int | None = None,
    barrier: bool = False,
    speculative: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Pool]:
    """Draws the whole workload once; `params` are empty for a simulated engine.

    Repetitions with another `stream` draw other tokens. The token limit of a response is `limit`, as in a run that does
    not know lengths before, or by default its prescribed length, which then ends it.
    """

    def sampling(request: Request) -> SamplingParams:
        return SamplingParams(limit or workload.length(request), workload.temperature)

    sample_fn = rollouts.sampler(params, stream=stream, sampling=sampling)
    return collect(
        workload.prompts,
        sample_fn,
        workload.verify,
        workload.strategy,
        CollectOptions(barrier=barrier, speculative=speculative),
        on_progress=on_progress,
    )


def check_lengths(pools: list[Pool], workload: Workload) -> int:
    """Returns the number of response tokens; RuntimeError where a response doesn't have its prescribed length."""
    tokens = 0
    for response in (response for pool in pools for response in pool.responses):
        length = int(workload.lengths[int(response.prompt_id), response.draw])
        if len(response.tokens) != length or len(response.logprobs) != length:
            raise RuntimeError(
                f"draw {response.draw} of prompt {response.prompt_id} has {len(response.tokens)} tokens, {length} "
                "are prescribed."
            )
        tokens += length
    return tokens


def decode_bytes(architecture: Architecture, workload: Workload, decode_steps: int, o: EngineOptions) -> int:
    """Returns the bytes that decoding a workload must read: the weights in each step, and each token's live cache."""
    prompt = np.array([len(prompt.tokens) for prompt in workload.prompts])[:, None]
    # Token t of a response, from 0, sees prompt + t tokens.
    visible = int((workload.lengths * prompt + workload.lengths * (workload.lengths - 1) // 2).sum())
    weights = decode_steps * decode_weight_bytes(architecture, o.dtype, o.weight_dtype)
    return weights + visible * kv_token_bytes(architecture, o.dtype, kv_dtype=o.kv_dtype)


def simulation_cost(options: flags.FlagValues) -> Cost:
    """Returns the costs from --bandwidth and --model, changed by --cost; without either a step takes 10 ms.

    With --bandwidth, decoding only reads memory, and prefill costs nothing.
    """
    cost = Cost(decode_step=0.01)
    if options.bandwidth:
        architecture = architecture_of(options)
        cost = Cost(
            decode_step=decode_weight_bytes(architecture, options.dtype, options.weight_dtype) / options.bandwidth,
            cached_token=kv_token_bytes(architecture, options.dtype, kv_dtype=options.kv_dtype) / options.bandwidth,
        )
    changes = dict(item.partition("=")[::2] for item in options.cost)
    unknown = sorted(changes.keys() - vars(cost).keys())
    if unknown:
        raise ValueError(f"--cost has no {unknown[0]!r}; it has {', '.join(vars(cost))}.")
    return dataclasses.replace(cost, **{name: float(seconds) for name, seconds in changes.items()})


def describe(architecture: Architecture, options: EngineOptions, replicas: int) -> dict[str, Any]:
    """Returns the engine's sizes and device for a report; slots, pages and open prompts are those of each replica."""
    names = (
        "slots", "window", "page_size", "pages", "open_prompts", "attention", "dtype", "kv_dtype", "weight_dtype",
        "drafts",
    )  # fmt: skip
    return {name: getattr(options, name) for name in names} | machine() | {
        "replicas": replicas, "model": models.describe(architecture)
    }  # fmt: skip

"""`bench.adaptive`: rounds until scripted verdicts balance, on a model that costs next to nothing; and simulations.

In a simulation the scheduling is real, there is no model, and the seconds come from a cost for each program.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import flags

from bench import command_line, engines, models, workloads
from bench.inputs import random_weights
from bench.simulation import Cost, Hosts, SimulatedEngine
from bench.workloads import Workload
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.training.sharded_collection import split
from reinforce_ada_jax.types import Pool

# Rounds smaller than a group need a correction (config/collection_rules.py); draws do not depend on it.
GROUP_SIZE = 4


def _summary(rollouts: Rollouts, pools: list[Pool], seconds: float) -> dict[str, Any]:
    counts = rollouts.counts
    useful = sum(len(response.tokens) for pool in pools for response in pool.responses)
    return {
        "seconds": seconds,
        "useful_tokens": useful,
        "useful_tokens_per_s": useful / seconds,
        "useful_share": useful / max(counts.slot_steps, 1),
        "slot_utilisation": counts.slot_utilisation,
        "responses": sum(len(pool.responses) for pool in pools),
        "discarded_tokens": sum(sum(pool.discarded) for pool in pools),
        "redone_share": counts.redone / max(counts.tokens, 1),
        "prefills": counts.prefills,
        "turns": counts.slot_steps // (rollouts.engine.options.slots * rollouts.engine.replicas),
        "windows": counts.windows,
        "dispatches": counts.dispatches,
    }


def _with_barrier(once: Callable[[bool], dict[str, Any]], barrier: bool, repeat: int = 1) -> dict[str, Any]:
    """Returns the run with the median time; runs without and with a barrier take turns."""
    kinds = (False, True) if barrier else (False,)
    runs = [[once(kind) for kind in kinds] for _ in range(repeat)]
    medians = [sorted(column, key=lambda run: run["seconds"])[repeat // 2] for column in zip(*runs, strict=True)]
    result = medians[0]
    if barrier:
        result["barrier"] = medians[1]
        if medians[1]["useful_tokens"] != result["useful_tokens"]:
            raise RuntimeError(f"with the barrier other samples were drawn: {result}")
        result["barrier_ratio"] = medians[1]["seconds"] / result["seconds"]
    return result


def measure(
    options: flags.FlagValues, workload: Workload, engine_options: EngineOptions, *, speculative: bool
) -> dict[str, Any]:
    """Measures a workload on a warm engine, and with --barrier the same samples with all rounds in step."""
    architecture, replicas = models.smallest(), options.replicas or 1
    params = random_weights(options, architecture, options.dtype)
    rollouts, params = engines.make_rollouts(architecture, params, engine_options, replicas)
    progress = Progress(total=1, done=0)

    def report(closed: int, drawn: int) -> None:
        progress.phase(f"{closed}/{len(workload.prompts)} prompts, {drawn:,} responses")

    def once(barrier: bool) -> dict[str, Any]:
        begin = time.perf_counter()
        pools = engines.draw(rollouts, params, workload, barrier=barrier, speculative=speculative, on_progress=report)
        seconds = time.perf_counter() - begin
        engines.check_lengths(pools, workload)
        return _summary(rollouts, pools, seconds)

    # Warm-up: the same programs, but two tokens a response.
    engines.draw(rollouts, params, dataclasses.replace(workload, lengths=np.minimum(workload.lengths, 2)))
    result = _with_barrier(once, options.barrier, options.repeat or 1)
    progress.close()
    return result | engines.describe(architecture, engine_options, replicas)


def simulate(
    workload: Workload,
    options: EngineOptions,
    cost: Cost,
    *,
    barrier: bool,
    limit: int | None,
    speculative: bool = False,
) -> dict[str, Any]:
    """Measures a workload in virtual time; `limit` as in `engines.draw`."""
    lengths = workload.lengths_by_draw()

    def once(barrier: bool) -> dict[str, Any]:
        engine = SimulatedEngine(options, cost, lengths)
        rollouts = Rollouts(engine)
        pools = engines.draw(rollouts, {}, workload, limit=limit, barrier=barrier, speculative=speculative)
        return _summary(rollouts, pools, engine.seconds)

    return {"simulated": True} | _with_barrier(once, barrier)


def simulate_hosts(
    workload: Workload,
    options: EngineOptions,
    cost: Cost,
    num_hosts: int,
    *,
    limit: int | None,
    speculative: bool = False,
) -> dict[str, Any]:
    """Simulates hosts that decode in step, each with the options' slots and its share of the prompts.

    Returns:
      `waited_share`: share of the collection's time in which a host waits for others, as a mean over hosts;
      `unequal_work_share`: this share if each host ran its windows alone, and waited only at the end.
    """
    hosts, shards = Hosts(num_hosts), split([1.0] * len(workload.prompts), num_hosts)

    def draw(host: int) -> dict[str, Any]:
        prompts = [workload.prompts[index] for index in shards[host]]
        lengths = {
            (str(index), draw): int(n) for index in shards[host] for draw, n in enumerate(workload.lengths[index])
        }
        engine = SimulatedEngine(options, cost, lengths, hosts, host)
        rollouts, shard = Rollouts(engine), dataclasses.replace(workload, prompts=prompts)
        pools = engines.draw(rollouts, {}, shard, limit=limit, speculative=speculative)
        return _summary(rollouts, pools, engine.seconds)

    with ThreadPoolExecutor(num_hosts) as threads:
        summaries = list(threads.map(draw, range(num_hosts)))
    seconds = hosts.seconds
    in_step, slowest = float(seconds.max(axis=0).sum()), float(seconds.sum(axis=1).max())
    return {
        "simulated": True,
        "hosts": num_hosts,
        "seconds": in_step,
        "waited_share": 1 - seconds.mean(axis=0).sum() / in_step,
        "unequal_work_share": 1 - seconds.sum(axis=1).mean() / slowest,
        "in_step_ratio": in_step / slowest,
        "slot_utilisation": float(np.mean([summary["slot_utilisation"] for summary in summaries])),
        "useful_tokens": sum(summary["useful_tokens"] for summary in summaries),
        "responses": sum(summary["responses"] for summary in summaries),
        "windows": seconds.shape[1],
    }


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures, or with --simulate simulates, the workload of the flags."""
    small = options.samples_per_round < GROUP_SIZE
    collection = CollectionConfig(
        strategy=options.strategy, group_size=GROUP_SIZE, samples_per_round=options.samples_per_round,
        max_rounds=options.max_rounds, correction="exact" if small else "none",
    )  # fmt: skip
    speculative = small if options.speculative is None else options.speculative
    lengths = workloads.parse_lengths(options.lengths or workloads.ADAPTIVE_LENGTHS)
    workload = workloads.adaptive(
        collection, options.prompts, lengths, models.smallest().vocab_size, scale=options.scale, seed=options.seed
    )
    engine_options = engines.engine_options(workload, options)
    if not options.simulate:
        return measure(options, workload, engine_options, speculative=speculative)
    cost = engines.simulation_cost(options)
    if options.hosts > 1:
        return simulate_hosts(
            workload, engine_options, cost, options.hosts, limit=options.max_response_tokens, speculative=speculative
        )
    return simulate(
        workload, engine_options, cost, barrier=options.barrier, limit=options.max_response_tokens,
        speculative=speculative,
    )  # fmt: skip


if __name__ == "__main__":
    command_line.start("adaptive", run, before=engines.use_one_device_per_replica)

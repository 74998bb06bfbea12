"""`benchmark adaptive`: rounds until scripted verdicts balance, on a model that costs next to nothing; and simulations.

In a simulation the scheduling is real, there is no model, and the seconds come from a cost for each program.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags

from reinforce_ada_jax.benchmarks import engines, models, workloads
from reinforce_ada_jax.benchmarks.inputs import random_weights
from reinforce_ada_jax.benchmarks.workloads import Workload
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.simulation import Cost, SimulatedEngine
from reinforce_ada_jax.sampling.state import EngineOptions
from reinforce_ada_jax.types import Pool


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
    """Returns the run of median time, without and with a barrier in turns."""
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
    """Measures the same in virtual time; `limit` as in `engines.draw`."""
    lengths = workload.lengths_by_draw()

    def once(barrier: bool) -> dict[str, Any]:
        engine = SimulatedEngine(options, cost, lengths)
        rollouts = Rollouts(engine)
        pools = engines.draw(rollouts, {}, workload, limit=limit, barrier=barrier, speculative=speculative)
        return _summary(rollouts, pools, engine.seconds)

    return {"simulated": True} | _with_barrier(once, barrier)


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures, or with --simulate simulates, the workload of the flags."""
    sizes = workloads.AdaptiveSizes(
        prompts=options.prompts, scale=options.scale, samples_per_round=options.samples_per_round,
        max_rounds=options.max_rounds, strategy=options.strategy,
    )  # fmt: skip
    small = sizes.samples_per_round < sizes.group_size
    speculative = small if options.speculative is None else options.speculative
    lengths = workloads.parse_lengths(options.lengths or workloads.ADAPTIVE_LENGTHS)
    workload = workloads.adaptive(sizes, lengths, models.smallest().vocab_size, options.seed)
    engine_options = engines.engine_options(workload, options)
    if not options.simulate:
        return measure(options, workload, engine_options, speculative=speculative)
    cost = engines.simulation_cost(options)
    return simulate(
        workload, engine_options, cost, barrier=options.barrier, limit=options.max_response_tokens,
        speculative=speculative,
    )  # fmt: skip

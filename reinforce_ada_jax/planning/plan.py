"""What an iteration would take on a slice, what would still fit beside it, and what to change where something doesn't.

Rooflines of `compile_check`'s programs, added up: every phase at its least time, one after the other.
"""

import dataclasses
from typing import Any

import numpy as np

from reinforce_ada_jax.analysis import enumeration
from reinforce_ada_jax.config import CollectionConfig, Config
from reinforce_ada_jax.planning.roofline import GIB, Chip, decode_turn, prefill_call, roofline, token_bytes
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.sampling.engine import buckets
from reinforce_ada_jax.sampling.state import EngineOptions

# Share of slot-steps that make a token: simulated at full size with 256 slots (docs/performance.md, "Rounds").
BUSY_SLOTS = 0.936
# Pass rates for which draws are expected; more of them change the mean by less than 1 %.
NUM_PASS_RATES = 512


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a run's prompts and responses are like, in the mean.

    Attributes:
      prompt_tokens: of a prompt.
      response_tokens: of a response.
      draws: responses drawn for a prompt.
      filled: share of a minibatch's rows that hold a response; below 1 where a strategy keeps any number of them.
    """

    prompt_tokens: float
    response_tokens: float
    draws: float
    filled: float = 1.0

    @property
    def context(self) -> float:
        """Tokens that a slot sees in the mean, were all responses of one length."""
        return self.prompt_tokens + self.response_tokens / 2


def expected_draws(collection: CollectionConfig, beta: tuple[float, float]) -> float:
    """Draws for a prompt under the strategy, pass rates being Beta distributed; of dapo, before it draws anew."""
    pass_rates = np.random.default_rng(0).beta(*beta, NUM_PASS_RATES)
    return float(enumeration.expectations(collection, pass_rates).draws.mean())


def packed_share(config: Config, statistics: Statistics) -> float:
    """Rows of the update for each response, at least: 1 where none share a row."""
    if config.learning.responses_per_row == 1:
        return 1.0
    row = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    useful = (statistics.prompt_tokens + statistics.response_tokens) / row
    return max(useful, 1 / config.learning.responses_per_row)


def phases(
    config: Config,
    architecture: Architecture,
    options: EngineOptions,
    mesh_shape: dict[str, int],
    chip: Chip,
    results: list[dict[str, Any]],
    statistics: Statistics,
) -> dict[str, float]:
    """Least seconds of each phase of an iteration.

    Args:
      config: of the run.
      architecture: of the model.
      options: of one replica's engine.
      mesh_shape: devices along each axis.
      chip: one of them.
      results: what `compile_check.compile_program` gave for the run's programs.
      statistics: of prompts and responses.
    """
    tensor, replicas = mesh_shape["tensor"], mesh_shape["data"] * mesh_shape["fsdp"]
    prompts = config.collection.prompts_per_iteration
    updates = prompts // config.learning.prompts_per_update
    by_name = {result["program"]: result for result in results}
    live = updates * statistics.filled * packed_share(config, statistics)
    window = next(result for name, result in by_name.items() if name.startswith("decode"))
    turns = prompts * statistics.draws * statistics.response_tokens / (options.slots * replicas * BUSY_SLOTS)
    turn = decode_turn(architecture, options, tensor, statistics.context)
    bucket = next(size for size in buckets(options.max_prompt_tokens) if size >= statistics.prompt_tokens)
    call, _ = roofline(prefill_call(architecture, options, tensor, bucket), chip)
    return {
        "reshard": by_name["reshard"]["least_seconds"] if "reshard" in by_name else 0.0,
        "prefill": prompts / (options.prefill_rows * replicas) * call,
        "decode": turns * roofline(turn, chip, window["sent_bytes"] or 0.0)[0],
        "score": live * by_name["score"]["least_seconds"],
        "update": live * by_name["update"]["least_seconds"],
    }


def spare_bytes(results: list[dict[str, Any]]) -> int | None:
    """HBM of a chip that is free when it is fullest; negative where something doesn't fit; None: not known.

    The cache is there in every program, as an argument or beside it, so that this is what it can grow by.
    """
    if any(result["hbm_peak_bytes"] is None for result in results):
        return None
    return min(r["hbm_limit_bytes"] - r["hbm_peak_bytes"] - r["hbm_beside_bytes"] for r in results)


def pages_that_fit(architecture: Architecture, options: EngineOptions, tensor: int, spare: int) -> int:
    """Pages of a replica's cache that fit into its devices' memory; 0 or less: not one does."""
    page = options.page_size * token_bytes(architecture, options) // tensor
    return options.pages + spare // page


def slots_that_fit(options: EngineOptions, pages: int) -> int:
    """Slots for which so many pages are enough, whatever they hold, with a quarter more prompts open than slots."""
    return int(max(0, pages - 1) / (options.table_width + 1.25 * options.prompt_width))


def next_micro_batches(config: Config) -> int | None:
    """The least greater number of micro-batches that the configuration may have; None: a row a device is the least."""
    shards = config.mesh.data * config.mesh.fsdp
    rows = config.learning.prompts_per_update * config.collection.group_size // shards
    return next((n for n in range(config.learning.micro_batches + 1, rows + 1) if rows % n == 0), None)


def remedies(
    config: Config, architecture: Architecture, options: EngineOptions, results: list[dict[str, Any]], state: int
) -> list[str]:
    """What to change, a line each, the cheapest first; nothing where all fits.

    Args:
      config: of the run.
      architecture: of the model.
      options: of one replica's engine.
      results: of the run's programs.
      state: bytes of weights and moments on each device, weights under adapters among them.
    """
    failed = [result for result in results if not result["fits"]]
    if not failed:
        return []
    limit, lines = failed[0]["hbm_limit_bytes"], []
    tensor, spare = config.mesh.tensor, spare_bytes(results)
    known = any(result["program"] == "update" for result in results)  # else programs aren't compiled yet
    learning = [result["program"] for result in failed if result["program"] in ("update", "score")]
    if spare is not None:
        pages = pages_that_fit(architecture, options, tensor, spare)
        slots = slots_that_fit(options, pages)
        if slots >= 1:
            lines.append(
                f"sampling.slots = {slots} (now {options.slots}) with sampling.pages = {pages:,} (now "
                f"{options.pages:,}): "
                + ("so large a cache fits beside everything else." if known else "more can't fit, whatever runs.")
            )
    if "update" in learning and config.learning.remat == "dots":
        lines.append("learning.remat = full (now dots): update computes a third more and keeps a layer's input alone.")
    more = next_micro_batches(config)
    if learning and more is not None:
        lines.append(
            f"learning.micro_batches = {more} (now {config.learning.micro_batches}): {' and '.join(learning)} hold "
            "fewer rows at a time; results don't change."
        )
    if 2 * tensor <= architecture.num_kv_heads and architecture.num_kv_heads % (2 * tensor) == 0:
        lines.append(
            f"mesh.tensor = {2 * tensor} (now {tensor}): weights and cache of decoding are split once more; as many "
            "chips with half of mesh.fsdp, or twice as many."
        )
    times = 2
    while state / times > limit / 2:
        times *= 2
    lines.append(
        f"a larger slice, with mesh.fsdp = {times * config.mesh.fsdp} (now {config.mesh.fsdp}) or more: weights and "
        f"moments take {state / GIB:.2f} of {limit / GIB:.2f} GiB a chip, and {state / times / GIB:.2f} on {times} "
        "times as many."
    )
    return lines


def plan_text(
    config: Config,
    architecture: Architecture,
    options: EngineOptions,
    mesh_shape: dict[str, int],
    chip: Chip,
    results: list[dict[str, Any]],
    statistics: Statistics,
    state: int,
) -> str:
    """The plan as lines to print; arguments as of `phases` and `remedies`."""
    lines = []
    spare = spare_bytes(results)
    if spare is not None and spare >= 0:
        pages = pages_that_fit(architecture, options, mesh_shape["tensor"], spare)
        lines.append(
            f"room     {spare / GIB:.2f} GiB a chip are never used: {pages:,} pages would fit ({options.pages:,} are "
            f"asked for), so {slots_that_fit(options, pages):,} slots ({options.slots:,})"
        )
    lines += [f"change   {line}" for line in remedies(config, architecture, options, results, state)]
    seconds = phases(config, architecture, options, mesh_shape, chip, results, statistics)
    total, chips = sum(seconds.values()), int(np.prod(list(mesh_shape.values())))
    drawn = config.collection.prompts_per_iteration * statistics.draws * statistics.response_tokens
    rows = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    useful = (statistics.prompt_tokens + statistics.response_tokens) / rows
    each = ", ".join(f"{name} {value:,.2f} s" for name, value in seconds.items())
    lines += [
        f"lengths  prompts of {statistics.prompt_tokens:,.0f} tokens and responses of "
        f"{statistics.response_tokens:,.0f} in the mean, {statistics.draws:.1f} draws a prompt, {BUSY_SLOTS:.1%} of "
        "slots busy",
        f"plan     an iteration takes at least {total:,.1f} s: {each}",
        f"         at most {drawn / total / chips:,.0f} tokens/s/chip sampled and trained on; {drawn / total:,.0f} on "
        f"{chips} chips",
        f"         a response fills {useful:.0%} of the {rows:,} positions of a row of the update; "
        + (
            "each has its own (learning.responses_per_row = 1)"
            if config.learning.responses_per_row == 1
            else f"packed, they take {packed_share(config, statistics):.0%} of the time of rows of their own, or more"
        ),
    ]
    return "\n".join(lines)

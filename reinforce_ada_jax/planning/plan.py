"""Memory that is left on a slice, the changes to make where something doesn't fit, and the least time of an iteration.

The time is the sum of the programs' rooflines: all phases take their least time, one after the other, with busy slots.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.learning.learner import scores_in_update
from reinforce_ada_jax.planning.compilation import ProgramResult
from reinforce_ada_jax.planning.roofline import GIB, Chip, decode_step, prefill_chunk, roofline
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.sampling.rings import layout
from reinforce_ada_jax.sampling.state import EngineOptions, kv_token_bytes

# The programs of a scoring pass and of an update; a run has "score" and "update" alone, or all of them.
SCORE = ("begin scores", "score")
UPDATE = ("begin update", "update", "finish update")


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A run on a slice: `options` are those of one replica's engine, and `config.mesh` covers the slice."""

    config: Config
    architecture: Architecture
    options: EngineOptions
    chip: Chip


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Means over a run's prompts and responses."""

    prompt_tokens: float | int  # of a prompt
    response_tokens: float | int  # of a response
    draws: float  # responses drawn for a prompt
    filled: float = 1.0  # share of a minibatch's rows with a response; may be below 1 if any number is kept

    @property
    def context(self) -> float:
        """Mean number of tokens that a slot sees, if all responses have the same length."""
        return self.prompt_tokens + self.response_tokens / 2


def statistics(
    config: Config, *, prompt_tokens: int | None = None, response_tokens: int | None = None, draws: float | None = None
) -> Statistics:
    """Returns the given means; for None, a length is half of its limit, and draws are those of the first round."""
    limits = {
        "--mean_prompt_tokens": (prompt_tokens, config.data.max_prompt_tokens),
        "--mean_response_tokens": (response_tokens, config.sampling.max_response_tokens),
    }
    for name, (value, limit) in limits.items():
        if value is not None and not 1 <= value <= limit:
            raise ValueError(f"{name} is {value}; it must be 1 to {limit}.")
    prompt, response = (limit // 2 if value is None else value for value, limit in limits.values())
    if draws is not None and not draws > 0:
        raise ValueError(f"--mean_draws is {draws}; it must be above 0.")
    collection = config.collection
    if draws is None:
        rounds = ("balance", "positive", "estimate")  # the others draw a group at a time
        draws = collection.samples_per_round if collection.strategy in rounds else collection.group_size
    # A strategy that keeps any number of responses pads its minibatches to the largest.
    strategy = strategies.build(collection, regularized=config.regularized)
    max_kept = max(strategy.max_kept or 0, collection.group_size)
    filled = min(1.0, draws / max_kept) if max_kept > collection.group_size else 1.0
    return Statistics(prompt, response, draws, filled)


def packed_share(config: Config, means: Statistics) -> float:
    """Returns the least number of update rows per response; 1 where none share a row."""
    row_tokens = config.row_tokens
    useful = (means.prompt_tokens + means.response_tokens) / row_tokens
    return min(1.0, max(useful, 1 / config.learning.responses_per_row))


def phases(run: Deployment, results: Sequence[ProgramResult], means: Statistics) -> dict[str, float]:
    """Returns the least seconds of each phase of an iteration."""
    config, options, mesh = run.config, run.options, run.config.mesh
    replicas, prompts = mesh.learner // mesh.tensor, config.collection.prompts_per_iteration
    seconds = {result.program: result.least_seconds for result in results}
    steps = prompts * means.draws * means.response_tokens / (options.slots * replicas)
    step = decode_step(run.architecture, options, mesh.tensor, means.context)
    chunks = prompts * means.prompt_tokens / (options.prefill_tokens * replicas)
    chunk = prefill_chunk(run.architecture, options, mesh.tensor, means.prompt_tokens)
    updates = prompts // config.learning.prompts_per_update * means.filled * packed_share(config, means)
    scored = (not scores_in_update(config)) + bool(config.learning.kl_coefficient)  # policy and reference
    return {
        "reshard": seconds.get("reshard", 0.0),
        "prefill": chunks * roofline(chunk, run.chip)[0],
        "decode": steps * roofline(step, run.chip)[0],
        "score": updates * scored * sum(seconds.get(name, 0.0) for name in SCORE),
        "update": updates * sum(seconds.get(name, 0.0) for name in UPDATE),
    }


# ---- memory ------------------------------------------------------------------------------------------------------


def spare_bytes(results: Sequence[ProgramResult]) -> int | None:
    """Returns the HBM of a chip that no program uses; negative where one doesn't fit; None where a peak is not known.

    Every program has the cache as an argument or beside it, so the cache can grow by this much.
    """
    spare = [
        result.hbm_limit_bytes - result.hbm_peak_bytes - result.hbm_beside_bytes
        for result in results
        if result.hbm_peak_bytes is not None
    ]
    return min(spare) if len(spare) == len(results) else None


def pages_that_fit(run: Deployment, spare: int) -> int:
    """Returns the pages of a replica's cache that fit into its devices' memory beside its rings; 0 or less: none."""
    in_pool = np.sum(~layout(run.architecture, run.options).slides)
    return run.options.pages + _spare_pages(run, spare) // max(1, int(in_pool))


def slots_that_fit(run: Deployment, spare: int) -> int:
    """Returns the number of slots whose pages fit at full length, with the options' ratio of open prompts to slots."""
    options, cache = run.options, layout(run.architecture, run.options)
    rings, sliding, prompts = cache.rings, int(np.sum(cache.slides)), options.open_prompts / options.slots
    of_slot = (len(cache.slides) - sliding) * (options.table_width + prompts * options.prompt_width)
    if rings is not None:
        of_slot += sliding * (rings.of_slot + prompts * rings.of_prompt)
    return int(max(0, cache.total + _spare_pages(run, spare) - len(cache.slides)) / of_slot)


def _spare_pages(run: Deployment, spare: int) -> int:
    """Returns the pages of a single layer that `spare` bytes of each device have room for."""
    o = run.options
    token = kv_token_bytes(run.architecture, o.dtype, o.attention, o.kv_dtype)
    return spare // (o.page_size * token // run.architecture.num_layers // run.config.mesh.tensor)


def _next_micro_batches(config: Config) -> int | None:
    """Returns the next larger valid number of micro-batches; None where a device has one row already."""
    shards = config.mesh.data * config.mesh.fsdp
    rows = config.learning.prompts_per_update * config.collection.group_size // shards
    return next((n for n in range(max(1, config.learning.micro_batches) + 1, rows + 1) if rows % n == 0), None)


def remedies(run: Deployment, results: Sequence[ProgramResult], learner_bytes: int) -> list[str]:
    """Returns the changes that make the run fit, a line each, the cheapest first; nothing where all fits.

    `learner_bytes` are the bytes of weights and moments on each device, including weights under adapters.
    """
    failed = [result for result in results if not result.fits]
    if not failed:
        return []
    config, options, lines = run.config, run.options, []
    limit, tensor, spare = failed[0].hbm_limit_bytes, config.mesh.tensor, spare_bytes(results)
    compiled = any(result.program == "update" for result in results)
    learning = [result.program for result in failed if result.program in ("update", "score")]
    if spare is not None:
        pages = pages_that_fit(run, spare)
        slots = slots_that_fit(run, spare)
        if slots >= 1:
            lines.append(
                f"sampling.slots = {slots} (now {options.slots}) with sampling.pages = {pages:,} (now "
                f"{options.pages:,}): "
                + ("this cache fits beside everything else." if compiled else "more can't fit, whatever runs.")
            )
    if "update" in learning and config.learning.remat == "dots":
        lines.append("learning.remat = full (now dots): update computes a third more and keeps a layer's input alone.")
    micro_batches = _next_micro_batches(config)
    if learning and micro_batches is not None:
        lines.append(
            f"learning.micro_batches = {micro_batches} (now {config.learning.micro_batches}): {' and '.join(learning)} "
            "hold fewer rows at a time; results don't change."
        )
    elif learning and config.mesh.context == 1:
        lines.append("mesh.context = 2 (now 1), with half of mesh.fsdp: two devices share each row.")
    if 2 * tensor <= run.architecture.num_kv_heads and run.architecture.num_kv_heads % (2 * tensor) == 0:
        lines.append(
            f"mesh.tensor = {2 * tensor} (now {tensor}): weights and cache of decoding are split once more; as many "
            "chips with half of mesh.fsdp, or twice as many."
        )
    times = 2
    while learner_bytes / times > limit / 2:
        times *= 2
    lines.append(
        f"a larger slice, with mesh.fsdp = {times * config.mesh.fsdp} (now {config.mesh.fsdp}) or more: weights and "
        f"moments take {learner_bytes / GIB:.2f} of {limit / GIB:.2f} GiB a chip, and "
        f"{learner_bytes / times / GIB:.2f} on {times} times as many."
    )
    return lines


def plan_text(run: Deployment, results: Sequence[ProgramResult], means: Statistics, learner_bytes: int) -> str:
    """Returns the plan as lines to print; arguments as of `phases` and `remedies`."""
    config, options, lines = run.config, run.options, []
    spare = spare_bytes(results)
    if spare is not None and spare >= 0:
        pages = pages_that_fit(run, spare)
        lines.append(
            f"room     {spare / GIB:.2f} GiB a chip are never used: {pages:,} pages would fit ({options.pages:,} are "
            f"asked for), so {slots_that_fit(run, spare):,} slots ({options.slots:,})"
        )
    lines += [f"change   {line}" for line in remedies(run, results, learner_bytes)]
    seconds = phases(run, results, means)
    total, chips = sum(seconds.values()), config.mesh.learner
    drawn = config.collection.prompts_per_iteration * means.draws * means.response_tokens
    by_phase = ", ".join(f"{name} {value:,.2f} s" for name, value in seconds.items())
    lines += [
        f"lengths  prompts of {means.prompt_tokens:,.0f} tokens and responses of {means.response_tokens:,.0f} in the "
        f"mean, {means.draws:.1f} draws a prompt",
        f"time     an iteration takes at least {total:,.1f} s, by bytes and FLOPs: {by_phase}",
        f"         at most {drawn / total / chips:,.0f} tokens/s/chip sampled and trained on; {drawn / total:,.0f} on "
        f"{chips} chips",
    ]
    return "\n".join(lines)

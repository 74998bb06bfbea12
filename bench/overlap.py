"""`bench.overlap`: busy slots and seconds where one response of each iteration is much longer than the others.

The engine is simulated (simulation.py): steps, windows and pages of the real one, seconds from the cost of a step. The
host's side, the queue and the collection loop are the real ones. Verdicts take no time.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from absl import app, flags

from bench.simulation import Cost, SimulatedEngine
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CarriedRollouts, collect
from reinforce_ada_jax.sampling.engine import enough_open_prompts, enough_pages
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams
from reinforce_ada_jax.types import PartialRollouts, Prefetch, Prompt, Verdict

# (collection.overlap, collection.max_staleness)
WAYS = (("none", 0), ("finish", 1), ("finish", 4), ("in_flight", 1), ("in_flight", 2), ("in_flight", 4))
PROMPT_TOKENS, STEP_S = 60, 0.02
FIRST_COUNTED = 2  # iterations before it fill the slots


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a simulation; a flag for each."""

    prompts: int = 64  # of an iteration
    group_size: int = 8  # responses of a prompt
    slots: int = 64  # responses decoded at the same time
    mean_tokens: int = 200  # mean length of responses; lengths are 0.5 to 1.5 times the mean
    longest: int = 20  # length of one response in each iteration, as a multiple of the mean
    iterations: int = 8  # those from the third on are counted, so at least 3


@dataclasses.dataclass(frozen=True)
class Busy:
    """Outcome of one way, over the iterations that count."""

    slots: float  # share of slot-steps that made a token
    seconds: float  # of an iteration
    prefilled: float  # prefilled tokens of an iteration, including those of responses that continue


def lengths(sizes: Sizes, iterations: int, rng: np.random.Generator) -> dict[tuple[str, int], int]:
    """Returns the length of each draw; in each iteration one draw has the longest."""
    mean, found = sizes.mean_tokens, {}
    for iteration in range(iterations):
        prompt, draw = rng.integers(sizes.prompts), rng.integers(sizes.group_size)
        for row in range(sizes.prompts):
            drawn = rng.integers(mean // 2, mean + mean // 2, sizes.group_size)
            found |= {(f"{iteration}.{row}", number): int(tokens) for number, tokens in enumerate(drawn)}
        found[f"{iteration}.{prompt}", int(draw)] = sizes.longest * mean
    return found


def simulate(sizes: Sizes, overlap: str, ahead: int) -> Busy:
    """Returns the outcome of `collection.overlap` with `collection.max_staleness` = `ahead`."""
    of_draw = lengths(sizes, sizes.iterations + ahead, np.random.default_rng(0))
    in_flight, longest = overlap == "in_flight", sizes.longest * sizes.mean_tokens + 1
    options = EngineOptions(
        slots=sizes.slots, window=32, page_size=64, pages=0, prefill_tokens=512, max_prompt_tokens=PROMPT_TOKENS,
        open_prompts=enough_open_prompts(sizes.slots, sizes.group_size) + sizes.slots * in_flight,
        max_response_tokens=longest, stop_ids=(0,), seed=0, dtype="float32", begun_tokens=(longest - 1) * in_flight,
    )  # fmt: skip
    options = dataclasses.replace(options, pages=enough_pages(options))
    engine = SimulatedEngine(options, Cost(decode_step=STEP_S, prefill=STEP_S), of_draw)
    rollouts, partial, before_s = Rollouts(engine), {}, 0.0
    tokens = slot_steps = prefilled = 0
    for iteration in range(sizes.iterations):
        if iteration == FIRST_COUNTED:
            tokens, slot_steps, prefilled, before_s = 0, 0, 0, engine.seconds
        partial = _collect(sizes, rollouts, iteration, ahead, partial)
        counts = rollouts.counts
        tokens, slot_steps = tokens + counts.tokens, slot_steps + counts.slot_steps
        prefilled += counts.prefilled_tokens
    count = sizes.iterations - FIRST_COUNTED
    return Busy(tokens / slot_steps, (engine.seconds - before_s) / count, prefilled / count)


def _collect(
    sizes: Sizes, rollouts: Rollouts, iteration: int, ahead: int, partial: Mapping[str, PartialRollouts]
) -> dict[str, PartialRollouts]:
    """Draws an iteration; returns the rollouts of later iterations that it has begun."""

    def prompts(number: int) -> list[Prompt]:
        tokens = np.arange(PROMPT_TOKENS, dtype=np.int32)
        return [Prompt(f"{number}.{row}", "", "", tokens) for row in range(sizes.prompts)]

    later = {prompt.id: (prompt, number) for number in range(1, ahead + 1) for prompt in prompts(iteration + number)}
    prefetch = Prefetch([prompt for prompt, _ in later.values()], {name: number for name, (_, number) in later.items()})
    sampling = SamplingParams(rollouts.engine.options.max_response_tokens)
    collect(
        prompts(iteration),
        rollouts.sampler(None, stream=2 * iteration, prefetch_stream=2 * iteration + 2, sampling=sampling),
        lambda pairs: [Verdict(False, 0.0) for _ in pairs],
        strategies.fixed(sizes.group_size),
        carried=CarriedRollouts(partial, prefetch),
    )
    return prefetch.partial


def main(_: list[str]) -> None:
    sizes = Sizes(**{name: getattr(flags.FLAGS, name) for name in dataclasses.asdict(Sizes())})
    print("overlap    max_staleness  busy slots  s an iteration  prefilled tokens")
    for overlap, ahead in WAYS:
        busy = simulate(sizes, overlap, ahead)
        print(f"{overlap:9}  {ahead:13}  {busy.slots:10.3f}  {busy.seconds:14.1f}  {busy.prefilled:16,.0f}")


if __name__ == "__main__":
    for size, default in dataclasses.asdict(Sizes()).items():
        flags.DEFINE_integer(size, default, "See `Sizes` in bench/overlap.py.", lower_bound=1)
    app.run(main)

"""Selection: which prompts an iteration draws, and what each of them counts for in the update.

    shuffled       every epoch is a permutation of the data; each prompt counts 1
    proportional   prompts are drawn with the probabilities that give the least noise for the cost; each counts for 1
                   divided by its probability, in units of the mean

A selection is an object with the four methods of `Selection`; docs/strategies.md shows how to write one outside of the
package. How many responses are drawn for a prompt is the strategy's choice (strategies.py).
"""

import contextlib
import dataclasses
import json
import math
import numbers
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from reinforce_ada_jax import user_code
from reinforce_ada_jax.collection.advantages import Group
from reinforce_ada_jax.collection.averages import score_square
from reinforce_ada_jax.collection.estimators import Ema
from reinforce_ada_jax.collection.inclusion import inclusion_probabilities, systematic_sample
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Prefetch, Prompt

# Third number of the seed of an iteration's choice. It is not 0: numpy takes [seed, epoch, 0] for [seed, epoch].
_STREAM = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Prompts of one iteration."""

    prompts: Sequence[Prompt]  # those of the iteration, all different
    weights: Sequence[float] = ()  # factor of each prompt in the update, above 0; empty: 1 for every prompt
    replacements: Sequence[Prompt] = ()  # prompts that may replace dropped ones, in this order; their factor is 1
    upcoming: Prefetch = dataclasses.field(default_factory=lambda: Prefetch(()))  # begun by idle slots

    def weight_of(self) -> dict[str, float]:
        """Returns the factors by prompt id; ids that it lacks have the factor 1."""
        return {prompt.id: weight for prompt, weight in zip(self.prompts, self.weights, strict=False)}


@runtime_checkable
class Selection(Protocol):
    """Chooses the prompts of each iteration.

    The methods are called in this order: `choose`, `observe` with the groups drawn, `to_json`. Every process of a run
    calls them with the same arguments, so they must depend on nothing else.
    """

    def choose(self, count: int, rng: np.random.Generator, /) -> Choice:
        """Returns `count` different prompts; randomness is that of `rng`, and the state stays as it is."""
        ...

    def observe(self, groups: Sequence[Group], /) -> Mapping[str, float]:
        """Takes the groups of the prompts chosen last and of the replacements used; returns metrics."""
        ...

    def to_json(self) -> Mapping[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        ...

    def load_json(self, saved: Mapping[str, Any], /) -> None:
        """Restores the state that `to_json` returned."""
        ...


def running(source: str) -> contextlib.AbstractContextManager[None]:
    """Names the file and the line of errors where `source`, which is `collection.selection`, names a user's file."""
    path, is_file, _ = source.rpartition(":")
    setting = f"collection.selection is {source!r}"
    return user_code.failures(pathlib.Path(path), setting) if is_file else contextlib.nullcontext()


def choose(selection: Selection, count: int, seed: int, iteration: int) -> Choice:
    """Returns the checked choice of an iteration, whose randomness follows from the run's seed and its number.

    Raises ValueError if it has another number of prompts, a prompt twice, or weights that are not finite and above 0.
    """
    choice = selection.choose(count, np.random.default_rng([seed, iteration, _STREAM]))
    if not (isinstance(choice, Choice) and all(isinstance(prompt, Prompt) for prompt in choice.prompts)):
        raise ValueError(f"collection.selection chose {choice!r:.80}; it must return a Choice of prompts.")
    ids = {prompt.id for prompt in choice.prompts}
    if len(choice.prompts) != count or len(ids) != count:
        raise ValueError(
            f"collection.selection chose {len(choice.prompts):,} prompts, {len(ids):,} of them different, for "
            f"iteration {iteration}; it must choose {count:,} different ones (collection.prompts_per_iteration)."
        )
    weights = np.asarray(choice.weights, np.float64)
    if weights.size and (weights.shape != (count,) or not (np.isfinite(weights) & (weights > 0)).all()):
        raise ValueError(
            f"collection.selection gave {weights.size:,} weights, the least {weights.min():g}, for iteration "
            f"{iteration}; it must give {count:,} that are finite and above 0, or none."
        )
    return choice


def _check_count(count: int, prompts: Sequence[Prompt]) -> None:
    if not 1 <= count <= len(prompts):
        raise ValueError(
            f"An iteration takes {count:,} different prompts; there are {len(prompts):,}. Lower "
            "collection.prompts_per_iteration or add prompts."
        )


# ---- shuffled epochs -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PromptCursor:
    """Position in the endless sequence of prompts: `position` prompts of this epoch are done."""

    seed: int
    epoch: int = 0
    position: int = 0


def prompts_after(
    prompts: list[Prompt], cursor: PromptCursor, count: int, taken: set[str]
) -> list[tuple[Prompt, PromptCursor]]:
    """Returns up to `count` prompts in order, each with the cursor after it; fewer where the data has no more.

    All are different, and none has an id in `taken`. They may reach into the next epoch.
    """
    following: list[tuple[Prompt, PromptCursor]] = []
    taken = set(taken)
    while len(following) < count and len(taken) < len(prompts):
        order = np.random.default_rng([cursor.seed, cursor.epoch]).permutation(len(prompts))
        for position in range(cursor.position, len(prompts)):
            prompt = prompts[order[position]]
            if prompt.id not in taken and len(following) < count:
                taken.add(prompt.id)
                following.append((prompt, dataclasses.replace(cursor, position=position + 1)))
        cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, position=0)
    return following


def next_prompts(prompts: list[Prompt], cursor: PromptCursor, count: int) -> tuple[list[Prompt], PromptCursor]:
    """Returns the next `count` prompts, all different, and the cursor after them.

    Every epoch is a permutation drawn from (seed, epoch). A tail shorter than `count` is dropped, and the batch begins
    the next epoch: a batch over two epochs could have a prompt twice. The dropped prompts are as random as the
    permutation, so no prompt is favoured over the epochs.
    """
    _check_count(count, prompts)
    if cursor.position + count > len(prompts):
        cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, position=0)
    order = np.random.default_rng([cursor.seed, cursor.epoch]).permutation(len(prompts))
    end = cursor.position + count
    return [prompts[i] for i in order[cursor.position : end]], dataclasses.replace(cursor, position=end)


class Shuffled:
    """Every epoch is a permutation of the data. The state is the cursor: three integers."""

    def __init__(self, prompts: list[Prompt], seed: int, *, extra_batches: int = 0, ahead: int = 0):
        """Begins the first epoch.

        An iteration may use up to `extra_batches` times its number of prompts as replacements. Idle slots begin the
        prompts of the next `ahead` iterations, so replacements are not taken from these.
        """
        self._prompts, self._cursor = prompts, PromptCursor(seed)
        self._extra_batches, self._ahead = extra_batches, ahead
        self._chosen = 0
        self._after: list[PromptCursor] = []  # cursor after the prompts chosen and 0, 1, ... replacements

    def choose(self, count: int, rng: np.random.Generator) -> Choice:
        """Returns the next `count` prompts; `rng` is not used: the order is that of the epoch."""
        prompts, after = next_prompts(self._prompts, self._cursor, count)
        ids = {prompt.id for prompt in prompts}
        upcoming, cursor, ahead = list[Prompt](), after, dict[str, int]()
        for number in range(1, self._ahead + 1):
            following, cursor = next_prompts(self._prompts, cursor, count)
            # The end of an epoch and the beginning of the next one may share some prompts.
            new = [prompt for prompt in following if prompt.id not in ids]
            upcoming += new
            ahead |= {prompt.id: number for prompt in new}
            ids |= ahead.keys()
        replacements = prompts_after(self._prompts, after, self._extra_batches * count, ids)
        # With an overlap the next iterations' prompts are fixed: replacements don't move the cursor, and come again.
        self._after = [after, *(after if self._ahead else cursor for _, cursor in replacements)]
        self._chosen = count
        return Choice(prompts, replacements=[prompt for prompt, _ in replacements], upcoming=Prefetch(upcoming, ahead))

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Advances the cursor to after the prompts chosen and the replacements used; returns no metrics."""
        self._cursor = self._after[len(groups) - self._chosen]
        return {}

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self._cursor)

    def load_json(self, saved: Mapping[str, Any]) -> None:
        self._cursor = PromptCursor(**saved)


# ---- probabilities of least noise for their cost ---------------------------------------------------------------------

# Bins of expected pass rates; prompts of one bin have the same probability.
BINS = 10
# Factor of all sums of the bins after every iteration.
BIN_DECAY = 0.95
# Each bin begins with this many prompts that have the mean of all bins; they decide where a bin has few others.
BIN_PRIOR = 8.0
# Decay of a prompt's own counts at its next visit, and their prior.
PASS_RATE = {"decay": 0.7, "prior_correct": 0.5, "prior_wrong": 0.5}
# Share of equal probabilities: no prompt counts more than four times.
UNIFORM = 0.25


def bins_of(pass_rates: Float[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Returns the bin of each pass rate in [0, 1]."""
    return np.minimum((pass_rates * BINS).astype(int), BINS - 1)


class Proportional:
    """Draws prompt x with probability pi_x, proportional to sqrt(v_x / c_x), and counts it n / (N pi_x) times.

    The noise v_x = E[sum of a_i^2 |s_i|^2] and the cost c_x, in sampled tokens, are measured: they are means over the
    prompts drawn whose expected pass rate was in the same bin. So they hold for every strategy and objective. Errors of
    the expected pass rates make the choice worse, but not biased.
    """

    def __init__(self, prompts: Sequence[Prompt], *, uniform: float = UNIFORM):
        """Begins without a draw; no prompt counts more than 1 / `uniform` times."""
        self._prompts, self._uniform = prompts, uniform
        self._ids = [prompt.id for prompt in prompts]
        self._pass_rates = Ema(**PASS_RATE)
        self._bins = np.zeros((3, BINS))  # sums of noise and of tokens, and the number of prompts
        for prompt in prompts:  # as if it had been drawn once
            if prompt.pass_rate is not None:
                self._pass_rates.observe_counts(prompt.id, 1.0, prompt.pass_rate)

    def probabilities(self, count: int) -> Float[np.ndarray, " N"]:
        """Returns the inclusion probability of every prompt, in the order of the data; their sum is `count`."""
        means = self._bins.sum(axis=1) / max(self._bins[2].sum(), 1.0)
        noise, tokens, _ = self._bins + BIN_PRIOR * means[:, None]
        sizes = np.sqrt(noise / np.maximum(tokens, 1.0))
        return inclusion_probabilities(sizes[bins_of(self._pass_rates.estimate_ids(self._ids))], count, self._uniform)

    def choose(self, count: int, rng: np.random.Generator) -> Choice:
        """Returns a systematic sample of the prompts in random order."""
        pi = self.probabilities(count)
        sample = systematic_sample(pi, rng.permutation(len(pi)), rng.random())
        return Choice([self._prompts[index] for index in sample], (count / (len(pi) * pi[sample])).tolist())

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Adds noise, tokens and pass rates of the groups; returns metrics (docs/reference/metrics.md)."""
        pools = [group.pool for group in groups]
        bins = bins_of(self._pass_rates.estimate([pool.prompt for pool in pools]))  # before these draws
        self._bins *= BIN_DECAY
        for index, group in zip(bins, groups, strict=True):
            tokens = sum(response.num_sampled for response in group.pool.responses)
            self._bins[:, index] += _noise(group), tokens, 1.0
        self._pass_rates.observe(pools)
        weights = np.array([group.weight for group in groups])
        first = np.array([pool.correct[: pool.round_sizes[0]].mean() for pool in pools])
        return {
            "selection/pass_rate": float((weights * first).mean()),
            "selection/weight_max": float(weights.max()),
            "selection/effective_share": float(weights.mean() ** 2 / np.square(weights).mean()),
        }

    def to_json(self) -> dict[str, Any]:
        return {"pass_rates": self._pass_rates.to_json(), "bins": self._bins.tolist()}

    def load_json(self, saved: Mapping[str, Any]) -> None:
        self._pass_rates.load_json(saved["pass_rates"])
        self._bins = np.array(saved["bins"])


def _noise(group: Group) -> float:
    """Returns the sum of a_i^2 |s_i|^2 over the rows of a group, without the prompt's factor."""
    rows = zip(group.kept.tolist(), (group.advantages / group.weight).tolist(), strict=True)
    return math.fsum(advantage**2 * score_square(group.pool.responses[draw]) for draw, advantage in rows)


def observe(selection: Selection, groups: Sequence[Group], source: str) -> dict[str, float]:
    """Lets a selection learn from groups, and returns its metrics; `source` is `collection.selection`.

    Raises ValueError if a class of the user's fails, or a metric is no number.
    """
    with running(source):
        metrics = dict(selection.observe(groups) or {})
        for name, value in metrics.items():
            if not isinstance(value, numbers.Real):
                raise ValueError(f"the metric {name!r} is {value!r}; it must be a number")
    # metrics.jsonl has no numpy numbers other than float64.
    return {
        name: int(value) if isinstance(value, numbers.Integral) else float(value) for name, value in metrics.items()
    }


def state_of(selection: Selection, source: str) -> dict[str, Any]:
    """Returns the state of a selection as JSON; `source` is `collection.selection`.

    It is a copy: a user's class may return an object that its next `observe` changes.
    """
    with running(source):
        return json.loads(json.dumps(selection.to_json()))


# ---- from a configuration --------------------------------------------------------------------------------------------


def build(config: CollectionConfig, prompts: list[Prompt], seed: int, *, extra_batches: int = 0) -> Selection:
    """Returns the selection that the `collection` section of a configuration describes.

    Raises ValueError if there are too few prompts; or if the section names a class that is missing, fails in its first
    choice, or has a state that is no JSON.
    """
    _check_count(config.prompts_per_iteration, prompts)
    if config.selection == "shuffled":
        return Shuffled(prompts, seed, extra_batches=extra_batches, ahead=config.iterations_ahead)
    setting = f"collection.selection is {config.selection!r}"
    if config.selection == "proportional":
        if extra_batches:
            raise ValueError(
                f"{setting}, and the strategy {config.strategy} replaces the prompts that it drops: what is left is no "
                "sample of the data with known probabilities. Use the selection shuffled."
            )
        return Proportional(prompts)
    selection = user_code.load(config.selection, setting)(prompts, config)
    if not isinstance(selection, Selection):
        raise ValueError(f"{setting}, which made {selection!r}; it must have choose, observe, to_json and load_json.")
    with running(config.selection):
        choice = choose(selection, config.prompts_per_iteration, seed, 1)
        if unknown := {prompt.id for prompt in choice.prompts} - {prompt.id for prompt in prompts}:
            raise ValueError(f"it chose the prompt {min(unknown)!r}, which is not in the data; copies keep their id.")
        selection.load_json(json.loads(json.dumps(selection.to_json())))
    return selection

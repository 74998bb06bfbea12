"""Workloads of the rollout benchmarks: prompts, the prescribed length of every response, and scripted verdicts.

Lengths are prescribed because speed depends on them, and a random model does not know when to stop. A response ends at
its token limit, so every engine does exactly the same work.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.types import Prompt, Request, Response, Verdict

# Draws response lengths: (random generator, shape of the result) -> lengths.
Lengths = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
# Lengths of the adaptive workload: median, sigma, shortest, longest.
ADAPTIVE_LENGTHS = "500,0.8,16,2048"
# a and b of the Beta distribution of the prompts' pass rates.
PASS_RATES = (0.6, 1.2)


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """Prompts whose `id` is their index, with the length and verdict of each draw.

    Attributes:
      prompts: P prompts.
      lengths: int[P, N], tokens of each response; N is at least the strategy's `max_draws`.
      correct: bool[P, N], the verdict on each response.
      strategy: decides on the draws.
      temperature: of sampling.
      reference: (tokens int[T], log-probability of each token after the first float[T - 1]) under the model that the
        workload was made for, or None.
    """

    prompts: list[Prompt]
    lengths: np.ndarray
    correct: np.ndarray
    strategy: Strategy
    temperature: float = 1.0
    reference: tuple[np.ndarray, np.ndarray] | None = None

    def length(self, request: Request) -> int:
        """Returns the tokens of the response to a request."""
        return int(self.lengths[int(request.prompt.id), request.draw])

    def lengths_by_draw(self) -> dict[tuple[str, int], int]:
        """Returns all lengths by (prompt id, draw), for a simulation."""
        return {(str(index), draw): int(length) for (index, draw), length in np.ndenumerate(self.lengths)}

    def verify(self, pairs: list[tuple[Prompt, Response]]) -> Future[list[Verdict]]:
        """Returns the scripted verdicts, which a collection reads one window later, as those of verifier processes."""
        correct = [bool(self.correct[int(prompt.id), response.draw]) for prompt, response in pairs]
        verdicts = Future()
        verdicts.set_result([Verdict(each, float(each)) for each in correct])
        return verdicts

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.tokens) for prompt in self.prompts)


def _prompts(rows: list[np.ndarray]) -> list[Prompt]:
    return [Prompt(str(index), "", "", np.asarray(row, np.int32)) for index, row in enumerate(rows)]


def load(file: pathlib.Path) -> Workload:
    """Reads a file in the format of `rollout_tiny.json`, with a fixed number of draws for each prompt.

    Raises:
      ValueError: the file isn't there, isn't JSON, or its parts don't fit each other.
    """
    try:
        content = json.loads(file.read_text())
        lengths, reference = np.array(content["lengths"]), content["reference"]
        prompts = _prompts([np.array(row) for row in content["prompts"]])
        reference = (np.array(reference["tokens"], np.int32), np.array(reference["logp"], np.float32))
        samples, temperature = content["samples"], content["temperature"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is no workload ({type(error).__name__}: {error}): it must be a JSON file with prompts, samples, "
            "temperature, lengths and reference.tokens, reference.logp."
        ) from error
    if lengths.shape != (len(prompts), samples) or lengths.dtype.kind != "i" or lengths.min() < 1:
        raise ValueError(
            f"{file}: lengths must be {samples} whole numbers above 0 for each of the {len(prompts)} prompts."
        )
    correct = np.zeros(lengths.shape, bool)
    return Workload(prompts, lengths, correct, strategies.fixed(samples), temperature, reference)


def constant(length: int) -> Lengths:
    """Returns lengths that are all equal."""
    return lambda random, shape: np.full(shape, length)


def lognormal(median: float, sigma: float, shortest: float, longest: float) -> Lengths:
    """Returns lengths exp(log(median) + sigma * normal), clipped."""
    return lambda random, shape: np.clip(random.lognormal(np.log(median), sigma, shape), shortest, longest)


def parse_lengths(text: str) -> Lengths:
    """Returns the lengths that --lengths names.

    `text` is "median,sigma,shortest,longest" of `lognormal`, a file with one number a line, or a run's work directory:
    then lengths are drawn from its samples/*.jsonl.

    Raises:
      ValueError: it is none of these.
    """
    path = pathlib.Path(text)
    if path.is_dir():
        lines = [line for file in sorted(path.glob("samples/*.jsonl")) for line in file.read_text().splitlines()]
        seen = np.array([json.loads(line)["tokens"] for line in lines], int)
    elif path.is_file():
        seen = np.array(path.read_text().split(), int)
    elif len(text.split(",")) == 4:
        return lognormal(*map(float, text.split(",")))
    else:
        raise ValueError(
            f"--lengths={text} is neither four numbers (median,sigma,shortest,longest), nor a file with a number a "
            "line, nor a work directory."
        )
    if not seen.size or seen.min() < 1:
        raise ValueError(f"--lengths={text} holds no response lengths, or some below 1.")
    return lambda random, shape: random.choice(seen, shape)


def _whole(lengths: np.ndarray) -> np.ndarray:
    return np.maximum(1, np.round(lengths)).astype(int)


def synthetic(
    num_prompts: int, samples: int, prompt_tokens: int, lengths: Lengths, vocab_size: int, seed: int = 0
) -> Workload:
    """Returns random prompts of one length, with a fixed number of responses each."""
    random = np.random.default_rng(seed)
    drawn = _whole(lengths(random, (num_prompts, samples)))
    tokens = random.integers(0, vocab_size, (num_prompts, prompt_tokens))
    return Workload(_prompts(list(tokens)), drawn, np.zeros(drawn.shape, bool), strategies.fixed(samples))


def adaptive(
    collection: CollectionConfig,
    num_prompts: int,
    lengths: Lengths,
    vocab_size: int,
    *,
    scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Returns a workload whose rounds follow a `collection` section and scripted verdicts.

    A prompt's draws have one pass rate, and lengths independent of it, multiplied by `scale`; prompts have 8 to 16
    random tokens. A strategy without a limit of draws ends after `max_rounds` rounds of `samples_per_round`.
    """
    random = np.random.default_rng(seed)
    strategy, most = strategies.build(collection), collection.samples_per_round * collection.max_rounds
    if strategy.max_draws is None:
        next_draws = strategy.next_draws
        strategy = dataclasses.replace(
            strategy, next_draws=lambda progress: min(next_draws(progress), most - progress.drawn), max_draws=most
        )
    shape = num_prompts, max(most, strategy.max_draws or 0)
    pass_rates = random.beta(*PASS_RATES, (num_prompts, 1))
    drawn = _whole(scale * lengths(random, shape))
    correct = random.random(shape) < pass_rates
    tokens = [random.integers(0, vocab_size, n) for n in random.integers(8, 17, num_prompts)]
    return Workload(_prompts(tokens), drawn, correct, strategy)

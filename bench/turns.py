"""`bench.turns`: processor time of trajectories of several turns, beside responses of as many tokens in one turn.

The environment has fixed answers, which take no time. In a second measurement of the trajectories every turn is
prefilled whole. The three measurements alternate. Processor seconds are those of all threads of the process: other
programs change them less than the elapsed time.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from absl import flags

from bench import command_line, engines, inputs, workloads
from bench.measuring import median_ratio, processor_seconds
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import enough_pages
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams
from reinforce_ada_jax.types import Prompt, Request, RequestQueue, Response

ONE_TURN, TURNS, WHOLE = "one_turn", "turns", "turns_prefilled_whole"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lengths of a trajectory after its prompt.

    Attributes:
      turns: of the model.
      sampled: tokens of each turn.
      environment: tokens between two turns.
    """

    turns: int
    sampled: int
    environment: int

    @property
    def tokens(self) -> int:
        """All tokens after the prompt."""
        return self.turns * self.sampled + (self.turns - 1) * self.environment


class FixedTurns(RequestQueue):
    """Queue of trajectories of one shape, one for each prompt."""

    def __init__(self, prompts: Iterable[Prompt], shape: Shape, *, continues: bool):
        """Makes the requests of first turns; without `continues` the sampler does not know that others follow."""
        self.shape, self._continues = shape, continues
        self._waiting = collections.deque(self._request(prompt, 0) for prompt in prompts)
        self._in_flight: dict[str, tuple[Request, int]] = {}
        self._closed: list[str] = []

    def _request(self, prompt: Prompt, turn: int) -> tuple[Request, int]:
        is_followed = self._continues and turn + 1 < self.shape.turns
        return Request(prompt, 0, continues=f"{prompt.id}+" if is_followed else ""), turn

    def take(self, limit: int, *, wait: bool = True) -> list[Request]:
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        self._in_flight |= {request.prompt.id: (request, turn) for request, turn in taken}
        return [request for request, _ in taken]

    def closed(self) -> list[str]:
        closed, self._closed = self._closed, []
        return closed

    def receive(self, responses: Iterable[Response]) -> None:
        """Answers turns; the environment's tokens are the first tokens of the turn, repeated if it is shorter."""
        for response in responses:
            request, turn = self._in_flight.pop(response.prompt_id)
            if not self._continues:
                self._closed.append(response.prompt_id)  # as for a prompt without a following turn
            if turn + 1 == self.shape.turns:
                first = response.prompt_id.rstrip("+")
                self._closed += [first + "+" * turn for turn in range(self.shape.turns)]
            else:
                answer = np.resize(response.tokens, self.shape.environment)
                tokens = np.concatenate([request.prompt.tokens, response.tokens, answer])
                prompt = dataclasses.replace(request.prompt, id=f"{response.prompt_id}+", tokens=tokens)
                self._waiting.appendleft(self._request(prompt, turn + 1))


def draw(rollouts: Rollouts, params: Params, queue: FixedTurns, stream: int) -> int:
    """Draws all trajectories; returns the number of turns."""
    num_turns = 0
    sample_fn = rollouts.sampler(params, stream=stream, sampling=SamplingParams(queue.shape.sampled))
    for responses in sample_fn(queue):
        num_turns += len(responses)
        queue.receive(responses)
    return num_turns


def measure(
    architecture: Architecture, params: Params, prompts: list[Prompt], shape: Shape, options: EngineOptions, repeat: int
) -> dict[str, Any]:
    """Returns processor seconds, and the medians of their ratios to one turn; a first round is not counted.

    Args:
      architecture: of the model.
      params: its weights.
      prompts: one for each trajectory.
      shape: of the trajectories.
      options: of the engine that draws single turns. The engine of trajectories has prompts of up to all their tokens,
        and two more prompt rows for each request on the device: for its turn, and for the pages that it leaves.
      repeat: timed repetitions.

    Raises:
      RuntimeError: a turn was lost.
    """
    single = Shape(1, shape.tokens, 0)
    longer = dataclasses.replace(
        options, max_prompt_tokens=options.max_prompt_tokens + shape.tokens, max_response_tokens=shape.sampled,
        open_prompts=options.open_prompts + 2 * options.output_rows, pages=0,
    )  # fmt: skip
    longer = dataclasses.replace(longer, pages=enough_pages(longer))
    one, several = (engines.make_rollouts(architecture, params, each, 1) for each in (options, longer))
    runs = {ONE_TURN: (one, single, False), TURNS: (several, shape, True), WHOLE: (several, shape, False)}
    counts = {}

    def drawn(name: str, turn: int) -> None:
        (rollouts, weights), shape, continues = runs[name]
        num_turns = draw(rollouts, weights, FixedTurns(prompts, shape, continues=continues), turn)
        if num_turns != shape.turns * len(prompts):
            raise RuntimeError(f"{num_turns} turns were drawn, {shape.turns * len(prompts)} are prescribed.")
        counts[name] = rollouts.counts

    seconds = processor_seconds({name: functools.partial(drawn, name) for name in runs}, repeat)
    return {
        "trajectories": len(prompts), "tokens": len(prompts) * shape.tokens, "shape": dataclasses.asdict(shape),
        **{f"{name}_ratio": median_ratio(seconds[name], seconds[ONE_TURN]) for name in (TURNS, WHOLE)},
        **{
            name: {
                "cpu_s": float(np.median(found)), "all_cpu_s": found, "prefilled_tokens": counts[name].prefilled_tokens,
                "continued_tokens": counts[name].continued_tokens, "slot_utilisation": counts[name].slot_utilisation,
            }
            for name, found in seconds.items()
        },
    }  # fmt: skip


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures the model and the trajectories of the flags.

    Raises:
      ValueError: the tokens of a trajectory can't be shared by its turns.
    """
    architecture, tokens = inputs.architecture_of(options), options.response_tokens or 128
    sampled, rest = divmod(tokens - (options.turns - 1) * options.environment_tokens, options.turns)
    if sampled < 1 or rest:
        raise ValueError(
            f"--response_tokens={tokens}, less {options.turns - 1} times --environment_tokens="
            f"{options.environment_tokens}, can't be shared equally by --turns={options.turns}."
        )
    workload = workloads.synthetic(
        options.requests or 4 * options.slots, 1, options.prompt_tokens or 64, inputs.response_lengths(options, tokens),
        architecture.vocab_size, options.seed,
    )  # fmt: skip
    engine_options = engines.engine_options(workload, options)
    params = inputs.random_weights(options, architecture, options.dtype)
    shape = Shape(options.turns, sampled, options.environment_tokens)
    found = measure(architecture, params, workload.prompts, shape, engine_options, options.repeat or 3)
    return found | engines.describe(architecture, engine_options, 1)


if __name__ == "__main__":
    command_line.start("turns", run)

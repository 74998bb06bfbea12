"""Numbers of decode slots that a collection keeps busy, for devices where an idle slot costs as much as a busy one.

Rounds of a prompt follow one another, so a collection ends with the few prompts that need the most rounds. With many
slots most of them are idle by then. The collection loop itself runs here, with a clock in place of a model.
"""

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from reinforce_ada_jax.collection.collect import CollectOptions, collect
from reinforce_ada_jax.collection.strategies import Strategy
from reinforce_ada_jax.types import Prompt, RequestQueue, Response, Verdict

# Slots to choose from. On two cores a step of SmolLM2-135M's layers took 110, 159 and 244 ms of the processor with 8,
# 32 and 64 rows. More rows are hardly cheaper each, and evaluations, which fill any number, would take twice as long
# with 8 slots as with 32.
CHOICES = (64, 32, 16)
# Least share of busy slots. It is not higher, because pass rates and lengths differ from those assumed.
BUSY = 0.65
# More prompts than these keep more slots busy, and take longer to simulate.
MOST_PROMPTS = 128
# Spread of the logarithm of response lengths.
LENGTH_SPREAD = 0.4


def simulated(strategy: Strategy, pass_rates: Sequence[float], slots: int) -> tuple[float, float]:
    """Returns the busy slot time and the duration of a collection, in units of the length of a response.

    Nothing is drawn ahead of verdicts. Responses to a prompt are correct at random, with its pass rate as the
    probability.
    """
    prompts = [Prompt(str(row), problem="", answer="", tokens=np.zeros(1, np.int32)) for row in range(len(pass_rates))]
    busy = clock = 0.0

    def noise(prompt_id: str, draw: int) -> np.random.Generator:
        return np.random.default_rng((int(prompt_id), draw))

    def sample(queue: RequestQueue) -> Iterator[list[Response]]:
        nonlocal busy, clock
        running: list[tuple[float, str, int]] = []
        while True:
            for request in queue.take(slots - len(running)):
                duration = float(np.exp(LENGTH_SPREAD * noise(request.prompt.id, request.draw).standard_normal()))
                busy += duration
                heapq.heappush(running, (clock + duration, request.prompt.id, request.draw))
            if not running:
                return
            clock, prompt_id, draw = heapq.heappop(running)
            token, logprob = np.zeros(1, np.int32), np.zeros(1, np.float32)
            yield [Response(prompt_id, draw, token, logprob, False)]

    def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict]:
        correct = [
            bool(noise(prompt.id, response.draw).spawn(1)[0].random() < pass_rates[int(prompt.id)])
            for prompt, response in pairs
        ]
        return [Verdict(correct=each, reward=float(each)) for each in correct]

    collect(prompts, sample, verify, strategy, CollectOptions(estimate_fn=lambda _: np.asarray(pass_rates)))
    return busy, clock


def spread(num_prompts: int) -> list[float]:
    """Returns pass rates of at most `MOST_PROMPTS` prompts, spread evenly over [0, 1]."""
    count = min(num_prompts, MOST_PROMPTS)
    return ((np.arange(count) + 0.5) / count).tolist()


def busy_share(strategy: Strategy, pass_rates: Sequence[float], slots: int) -> float:
    """Returns the share of slot time that one collection fills; arguments are those of `simulated`."""
    busy, clock = simulated(strategy, pass_rates, slots)
    return busy / (slots * clock)


def choose_slots(strategy: Strategy, num_prompts: int) -> tuple[int, float]:
    """Returns the largest of `CHOICES` with a busy share of at least `BUSY`, or else the smallest; and that share.

    The pass rates of an iteration's prompts are assumed to be spread evenly over [0, 1].
    """
    pass_rates = spread(num_prompts)
    for slots in CHOICES[:-1]:
        share = busy_share(strategy, pass_rates, slots)
        if share >= BUSY:
            return slots, share
    return CHOICES[-1], busy_share(strategy, pass_rates, CHOICES[-1])

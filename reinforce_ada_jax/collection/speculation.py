"""Speculative draws: rounds of a prompt that idle slots start before the verdicts that ask for them.

Small rounds make long chains: with M = 1 a prompt that is never solved needs N responses one after another, each with a
verdict behind it. A sample is a function of its address, so draw 7 is the same response whether it starts now or three
rounds later. Where slots would be idle, the next draws of open prompts start at once. A round takes them as they are;
a prompt that closes before it needs them discards them, so no pool, stopping rule or verdict changes, only time.
"""

import heapq
from collections.abc import Iterable

from reinforce_ada_jax.collection.prompt_rollouts import Phase, PromptRollouts
from reinforce_ada_jax.types import Request


def probability_of_use(drawn: int, ahead: int) -> float:
    """Returns the probability that a speculative draw is needed, after `drawn` graded draws and `ahead` others.

    This is the rule of succession: the probability that a prompt, whose first `drawn` draws did not meet its rule, does
    not meet it with the next `ahead` draws either, if the chance that a draw meets it is uniform in [0, 1].
    """
    return (drawn + 1) / (drawn + ahead + 1)


def speculative_requests(prompts: Iterable[PromptRollouts], limit: int, max_draws: int | None) -> list[Request]:
    """Starts up to `limit` speculative draws, those that will most probably be needed first.

    Closed prompts, and prompts between two rounds, get none. Each request is for the next draw of its prompt, which is
    then listed as missing in the prompt's `speculative`.
    """

    def entry(rollouts: PromptRollouts) -> tuple[float, int, PromptRollouts]:
        drawn = len(rollouts.verdicts)
        return -probability_of_use(drawn, rollouts.next_draw - drawn), rollouts.index, rollouts

    def is_candidate(rollouts: PromptRollouts) -> bool:
        has_room = max_draws is None or rollouts.next_draw < max_draws
        return has_room and not rollouts.prefetch and rollouts.phase in (Phase.SAMPLING, Phase.VERIFYING)

    heap = [entry(rollouts) for rollouts in prompts if is_candidate(rollouts)]
    heapq.heapify(heap)
    requests = []
    while heap and len(requests) < limit:
        *_, rollouts = heapq.heappop(heap)
        requests.append(Request(rollouts.prompt, rollouts.next_draw))
        rollouts.speculative[rollouts.next_draw] = None
        if is_candidate(rollouts):
            heapq.heappush(heap, entry(rollouts))
    return requests

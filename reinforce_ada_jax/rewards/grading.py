"""From reward functions to verdicts: weighted sums, and failures with a reason and a traceback.

Both a worker and a pool without workers grade with this. `dialects` calls the functions.
"""

import logging
from collections.abc import Callable, Sequence

from reinforce_ada_jax.isolation import child
from reinforce_ada_jax.rewards import dialects
from reinforce_ada_jax.rewards.dialects import Columns, RewardFn
from reinforce_ada_jax.types import Verdict

# Grades one response: (response, answer, columns) -> the verdict, and why the grading failed, or "".
Grader = Callable[[str, str, Columns], tuple[Verdict, str]]


def _verdict(reward: dialects.Reward) -> Verdict:
    """Returns a verdict unchanged; for a number the verdict with that reward, which is correct if it is at least 1."""
    if reward is None:
        return Verdict(False, 0.0, "not_applicable")
    return reward if isinstance(reward, Verdict) else Verdict(reward >= 1.0, reward)


def weighted(names: Sequence[str], functions: Sequence[RewardFn], weights: Sequence[float]) -> RewardFn:
    """Returns the weighted sum of several functions, with the reward of each in `Verdict.rewards`.

    A function that returns None does not count. If all return None, the reward is 0, as in TRL, and the reason is
    "not_applicable". Otherwise the reason is the first one that a function gives. With a single function of weight 1,
    `correct` is that of its verdict; else a sum of at least 1 is correct.
    """

    def grade(response: str, answer: str, columns: Columns) -> Verdict:
        values = {name: call(response, answer, columns) for name, call in zip(names, functions, strict=True)}
        verdicts = {name: _verdict(value) for name, value in values.items() if value is not None}
        rewards = {name: float(verdict.reward) for name, verdict in verdicts.items()}
        if not verdicts:
            return _verdict(None)
        total = sum(weight * rewards[name] for name, weight in zip(names, weights, strict=True) if name in rewards)
        reason = next((verdict.reason for verdict in verdicts.values() if verdict.reason), "")
        alone = len(names) == 1 and weights[0] == 1.0
        correct = next(iter(verdicts.values())).correct if alone else total >= 1.0
        return Verdict(correct, dialects.number(total), reason, rewards=rewards)

    return grade


def guarded(grade: RewardFn, caught: type[BaseException], *, log: bool = True) -> Grader:
    """Returns a grader whose verdict has reason "error" where `grade` raises `caught` or returns no finite reward.

    The first exception is logged with its traceback; the metrics count all by reason.
    """
    logged = not log

    def graded(response: str, answer: str, columns: Columns) -> tuple[Verdict, str]:
        nonlocal logged
        try:
            return _verdict(grade(response, answer, columns)), ""
        except caught as error:
            if not logged:
                logging.getLogger(__name__).exception(
                    "Grading failed. Further failures of this process are counted, not logged."
                )
                logged = True
            return Verdict(False, 0.0, "error"), child.described(error)

    return graded

"""Messages of a verifier worker, checked field by field in the parent; `isolation.messages` carries them.

A reward may run code that a model wrote, in the worker's process, and such code can write to the worker's socket. So
the parent takes a verdict only with the number of the request that it answers.
"""

import sys
from collections.abc import Mapping
from typing import Any

from reinforce_ada_jax.isolation.child import MAX_TEXT
from reinforce_ada_jax.isolation.messages import Malformed
from reinforce_ada_jax.types import Verdict

MAX_REASON = 200


def _number(value: Any) -> float:
    """Returns a JSON number as a finite float."""
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise Malformed
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed
    return value


def verdict_to_json(verdict: Verdict, failure: str) -> dict[str, Any]:
    """Returns the answer to a request; `failure` is the traceback where the grading failed, else ""."""
    return {
        "correct": bool(verdict.correct),
        "reward": float(verdict.reward),
        "reason": str(verdict.reason)[:MAX_REASON],
        "rewards": {name: float(reward) for name, reward in verdict.rewards.items()},
        "failure": failure[-MAX_TEXT:],
    }


def verdict_from_json(message: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Returns the verdict and the failure's traceback of `verdict_to_json`; Malformed if a field is wrong."""
    rewards = message.get("rewards")
    if not isinstance(message.get("correct"), bool) or not isinstance(rewards, dict):
        raise Malformed
    verdict = Verdict(
        message["correct"],
        _number(message.get("reward")),
        _text(message.get("reason")),
        rewards={name: _number(reward) for name, reward in rewards.items()},
    )
    return verdict, _text(message.get("failure"))

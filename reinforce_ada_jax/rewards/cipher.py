"""Verifier of the built-in task: the response must be the deciphered word."""

from reinforce_ada_jax.types import Verdict


def grade(response: str, answer: str) -> Verdict:
    """Returns reward 1 if the response, without white space around it, is `answer`, else 0. It can't hang or crash."""
    correct = response.strip() == answer
    return Verdict(correct, float(correct))

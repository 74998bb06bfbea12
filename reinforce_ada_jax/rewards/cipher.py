"""The verifier of the built-in task: the response is the deciphered word, or it is wrong."""

from reinforce_ada_jax.types import Verdict


def grade(response: str, answer: str) -> Verdict:
    """Reward 1 for an exact match of the response's text (special tokens removed) with `answer`, 0 otherwise.

    White space around the response is ignored. The comparison can neither hang nor crash: no workers are needed.
    """
    correct = response.strip() == answer
    return Verdict(correct, float(correct))

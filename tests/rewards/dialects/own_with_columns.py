import re

from reinforce_ada_jax import Verdict


def grade(response, answer, level, *, tolerance=0.0):
    found = re.findall(r"#### (-?[0-9.,]+)", response)
    if not found:
        return Verdict(correct=False, reward=0.0, reason="no_answer")
    correct = abs(float(found[-1].replace(",", "")) - float(answer)) <= tolerance
    return Verdict(correct=correct, reward=float(correct), reason=f"level_{level}" if not correct else "")

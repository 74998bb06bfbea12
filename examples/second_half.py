"""A reward for the built-in task with many right responses: only the length and the second half of the letters count.

    python -m reinforce_ada_jax.train --config=configs/tiny.py --workdir=runs/second_half \
        --config.reward.path=examples/second_half.py:reward --config.reward.workers=1

A word of 6 symbols has 64^3 right responses, where `reward.kind=cipher` has one.
"""


def reward(response: str, answer: str) -> float:
    """Returns 1 where the response is as long as the answer, and its second half is that of the answer."""
    half = len(answer) // 2
    return float(len(response) == len(answer) and response[half:] == answer[half:])

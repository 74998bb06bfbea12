import re

import numpy as np

reasoning_start, reasoning_end = "<reasoning>", "</reasoning>"
match_numbers = re.compile(r"####\s*(-?[\d,\.]+)", flags=re.MULTILINE | re.DOTALL)


def match_format_exactly(prompts, completions, **kwargs):
    return [0 if reasoning_start not in response else 3.0 for response in completions]


def check_numbers(prompts, completions, answer, **kargs):
    extracted = [guess.group(1) if (guess := match_numbers.search(r)) is not None else None for r in completions]
    scores = []
    for guess, true_answer in zip(extracted, answer):
        if guess is None:
            scores.append(0)
            continue
        try:
            scores.append(1.0 if float(guess.replace(",", "")) == float(true_answer.strip()) else 0.0)
        except ValueError:
            scores.append(0)
    return np.array(scores, np.float32)

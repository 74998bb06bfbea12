"""Environments of docs/how_to/environments.md: a guessing game, and arithmetic with a calculator.

configs/game.py and configs/calculator.py train on them; examples/environment_models.py makes their problems and models.
"""

import re

NUMBERS = 7


class Game:
    """The answer is a number to be guessed; a wrong guess is answered by "higher" or "lower"."""

    def reset(self, problem):
        """Keeps the secret, and asks."""
        self.secret = int(problem["answer"])
        return [{"role": "user", "content": problem["problem"]}]

    def step(self, messages):
        """Returns 1 for the number itself, 0 for what is no number of the game, otherwise a hint."""
        guess = messages[-1]["content"].strip()
        if guess not in {str(number) for number in range(1, NUMBERS + 1)}:
            return 0.0
        if int(guess) == self.secret:
            return 1.0
        return [{"role": "user", "content": "higher" if int(guess) < self.secret else "lower"}]


def calculate(expression: str) -> int:
    """Computes a sum or a difference.

    Args:
      expression: two numbers with + or - between them, such as 12 + 3.
    """
    match = re.fullmatch(r"(\d{1,9}) ([+-]) (\d{1,9})", expression)
    if match is None:
        raise ValueError("the expression must be two numbers with + or - between them")
    left, right = int(match[1]), int(match[3])
    return left + right if match[2] == "+" else left - right


class Calculator:
    """A turn without a call is the answer to the problem."""

    tools = (calculate,)

    def reset(self, problem):
        """Keeps the answer, and asks."""
        self.answer = problem["answer"]
        return [{"role": "user", "content": problem["problem"]}]

    def step(self, messages):
        """Returns 1 for the right answer."""
        return float(messages[-1]["content"].strip() == self.answer)

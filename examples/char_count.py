r"""Problems and worked answers of the task "count a letter in a word", for docs/smollm2.md.

    python examples/char_count.py --output=runs/smollm2/data
    python examples/char_count.py --output=data --min_letters=10 --max_letters=20 --problems=9000 --heldout=1000 \
        --demonstrations=9000

"How many n are there in word n-i-n-e?" The worked answer has a line for each letter (`n = n.`, `i != n.`) and ends with
`\boxed{2} n in n-i-n-e.` The letters of a word are random. Its length is uniform, and so is the count. This is the
task of the recipe `char_count` in verl-project/verl-recipe; the second command has its sizes.

Written are problems.jsonl and heldout.jsonl for `train` and `evaluate` ("problem", "answer"), and demonstrations.jsonl
and validation.jsonl for `sft` ("prompt", "completion"): the first problems, and all that are held out, with their
worked answers.
"""

import pathlib
import string
from typing import NamedTuple

import numpy as np
import problem_files
from absl import flags

from reinforce_ada_jax import cli


class Problem(NamedTuple):
    """A letter, and the word in which it is counted."""

    letter: str
    word: str

    @property
    def spelled(self) -> str:
        """The word with dashes, so that each letter is a token of its own."""
        return "-".join(self.word)

    @property
    def text(self) -> str:
        """The question."""
        return f"How many {self.letter} are there in word {self.spelled}?"

    @property
    def answer(self) -> int:
        """Number of times that the letter is in the word."""
        return self.word.count(self.letter)

    @property
    def solution(self) -> str:
        """The worked answer: one line for each letter, then the count."""
        lines = [f"{each} {'=' if each == self.letter else '!='} {self.letter}." for each in self.word]
        return "\n".join([*lines, rf"\boxed{{{self.answer}}} {self.letter} in {self.spelled}."])


def make_problem(rng: np.random.Generator, min_letters: int, max_letters: int) -> Problem:
    """Returns a problem: the length of the word is uniform, and so is the count from 0 to this length."""
    length = int(rng.integers(min_letters, max_letters + 1))
    letter = str(rng.choice(list(string.ascii_lowercase)))
    others = [each for each in string.ascii_lowercase if each != letter]
    word = [str(each) for each in rng.choice(others, length)]
    for place in rng.permutation(length)[: rng.integers(0, length + 1)]:
        word[place] = letter
    return Problem(letter, "".join(word))


def splits(count: int, heldout: int, min_letters: int, max_letters: int, seed: int) -> tuple[list[Problem], ...]:
    """Returns (problems, heldout); no problem is there twice. ValueError: there are not as many."""
    rng = np.random.default_rng(seed)
    drawn = problem_files.distinct(lambda: make_problem(rng, min_letters, max_letters), count + heldout)
    return drawn[:count], drawn[count:]


class Sizes(NamedTuple):
    """Numbers of problems, of worked answers among them, of problems held out, and of letters of a word."""

    problems: int
    demonstrations: int
    heldout: int
    min_letters: int
    max_letters: int


def main(output: pathlib.Path, sizes: Sizes, seed: int) -> None:
    """Writes the four files into the new folder `output`."""
    letters = sizes.min_letters, sizes.max_letters
    with cli.user_input():
        if output.exists():
            raise ValueError(f"{output} exists already: remove it, or give another --output.")
        if not 2 <= letters[0] <= letters[1]:
            raise ValueError(
                f"--min_letters={letters[0]} and --max_letters={letters[1]}: a word has at least 2 letters, and the "
                "first number must not exceed the second."
            )
        problems, heldout = splits(sizes.problems, sizes.heldout, *letters, seed)
    output.mkdir(parents=True)
    for name, asked in (("problems", problems), ("heldout", heldout)):
        rows = [{"id": f"{name}-{n:05d}", "problem": p.text, "answer": str(p.answer)} for n, p in enumerate(asked)]
        problem_files.write(output / f"{name}.jsonl", rows)
    for name, worked in (("demonstrations", problems[: sizes.demonstrations]), ("validation", heldout)):
        problem_files.write(output / f"{name}.jsonl", [{"prompt": p.text, "completion": p.solution} for p in worked])
    words = f"words of {letters[0]} to {letters[1]} letters"
    print(f"{sizes.problems:,} problems, {sizes.heldout:,} held out, {words}: {output}")


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist.", required=True)
    PROBLEMS = flags.DEFINE_integer("problems", 3000, "Problems to train on.", 1, 10**6)
    DEMONSTRATIONS = flags.DEFINE_integer("demonstrations", 1600, "Of these, problems with a worked answer.", 1)
    HELDOUT = flags.DEFINE_integer("heldout", 96, "Problems held out.", 1, 10**6)
    MIN_LETTERS = flags.DEFINE_integer("min_letters", 3, "Fewest letters of a word.")
    MAX_LETTERS = flags.DEFINE_integer("max_letters", 5, "Most letters of a word.", upper_bound=100)
    SEED = flags.DEFINE_integer("seed", 0, "Of the problems.")

    def start() -> None:
        sizes = Sizes(PROBLEMS.value, DEMONSTRATIONS.value, HELDOUT.value, MIN_LETTERS.value, MAX_LETTERS.value)
        main(pathlib.Path(OUTPUT.value), sizes, SEED.value)

    cli.run(start)

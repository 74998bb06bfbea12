r"""Mazes in words: problems, worked answers, a reward, a tokenizer and a random model, for docs/maze.md.

    python examples/maze.py --output=runs/maze
    python examples/maze.py --output=runs/maze17 --size=17 --problems=1000000 --demonstrations=48000

The task is that of MaxRL (arXiv 2602.02710, appendix "Maze"). A maze of Prim's algorithm is written cell by cell: "WALL
START WALL PATH PATH PATH WALL NEWLINE ...". A response is a list of moves, "DOWN DOWN RIGHT RIGHT DONE", and is right
if they lead from the start to the goal without touching a wall. The start is in the upper left corner, the goal in the
lower right one, as in the paper's example. There is one way without detours; moves there and back are allowed, so more
than one response is right. The model is the paper's: a Qwen2 of 4 layers, width 256, 32 words.

The command writes problems.jsonl and heldout.jsonl for `train` and `evaluate` ("problem", "answer"), and
demonstrations.jsonl and validation.jsonl for `sft` ("prompt", "completion"): the first problems, and all that are held
out, with their shortest ways. model/ is a Hugging Face folder with random weights.
"""

import json
import pathlib
import tempfile
from typing import NamedTuple

import jax
import numpy as np
import problem_files
import tokenizers
from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.policy.architecture import from_hf

MOVES = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
WORDS = ("GRID_START", "GRID_END", "PATH_START", "DONE", "PATH", "WALL", "GOAL", "START", "NEWLINE", *MOVES)
VOCAB_SIZE = 32  # the paper's; the rest is reserved

Cell = tuple[int, int]


class Maze(NamedTuple):
    """The open cells of a square, from the start (1, 1) to the goal in the opposite corner.

    Attributes:
      size: cells of a side, walls included; odd.
      open: cells that are no wall, as (row, column).
    """

    size: int
    open: frozenset[Cell]

    @property
    def goal(self) -> Cell:
        """The cell in the lower right corner within the walls."""
        return self.size - 2, self.size - 2

    @property
    def text(self) -> str:
        """The rows of the maze in words; the reward reads them."""
        words = {(1, 1): "START", self.goal: "GOAL"}
        rows = [
            [words.get((row, column), "PATH" if (row, column) in self.open else "WALL") for column in range(self.size)]
            for row in range(self.size)
        ]
        return " ".join(" ".join([*row, "NEWLINE"]) for row in rows)

    @property
    def problem(self) -> str:
        """The prompt."""
        return f"GRID_START {self.text} GRID_END PATH_START"

    @property
    def solution(self) -> str:
        """The shortest way from the start to the goal."""
        ways, reached = [((1, 1), [])], {(1, 1)}
        for cell, moves in ways:
            if cell == self.goal:
                return " ".join([*moves, "DONE"])
            for move, neighbour in _neighbours(cell):
                if neighbour in self.open and neighbour not in reached:
                    reached.add(neighbour)
                    ways.append((neighbour, [*moves, move]))
        raise ValueError(f"this maze has no way to {self.goal}: {self.text}")


def _neighbours(cell: Cell, distance: int = 1) -> list[tuple[str, Cell]]:
    """Returns the cells that each move leads to."""
    return [(move, (cell[0] + distance * down, cell[1] + distance * right)) for move, (down, right) in MOVES.items()]


def make_maze(rng: np.random.Generator, size: int) -> Maze:
    """Returns a maze of Prim's algorithm: from a random room on, a random wall beside the maze is opened to a new room.

    Rooms are the cells with odd row and column, so a maze of 9 x 9 cells has 4 x 4 rooms.
    """
    first = tuple(int(2 * place + 1) for place in rng.integers(0, size // 2, 2))
    opened, walls = {first}, [(first, room) for _, room in _neighbours(first, 2)]
    while walls:
        index = int(rng.integers(len(walls)))
        walls[index], walls[-1] = walls[-1], walls[index]
        start, room = walls.pop()
        if room not in opened and all(0 < place < size for place in room):
            opened |= {room, ((start[0] + room[0]) // 2, (start[1] + room[1]) // 2)}
            walls += [(room, following) for _, following in _neighbours(room, 2)]
    return Maze(size, frozenset(opened))


def splits(count: int, heldout: int, size: int, seed: int) -> tuple[list[Maze], ...]:
    """Returns (problems, heldout); no maze is there twice. ValueError: there are not as many (192 of 7 x 7 cells)."""
    rng = np.random.default_rng(seed)
    drawn = problem_files.distinct(lambda: make_maze(rng, size), count + heldout)
    return drawn[:count], drawn[count:]


def reward(response: str, answer: str) -> float:
    """Returns 1 if the moves before DONE lead from START to GOAL, and never into a wall; `answer` is `Maze.text`.

    As in the paper's program, words that are no moves are passed over.
    """
    cells = {
        (row, column): word
        for row, words in enumerate(answer.split("NEWLINE"))
        for column, word in enumerate(words.split())
    }
    place = next(cell for cell, word in cells.items() if word == "START")
    words = response.split()
    for word in words[: words.index("DONE")] if "DONE" in words else words:
        if word in MOVES:
            place = place[0] + MOVES[word][0], place[1] + MOVES[word][1]
            if cells.get(place, "WALL") == "WALL":
                return 0.0
    return float(cells[place] == "GOAL")


def write_tokenizer(folder: pathlib.Path) -> None:
    """Writes a vocabulary of words, in which a prompt begins with <bos> and a response ends with <eos>."""
    reserved = (f"RESERVED_{number}" for number in range(VOCAB_SIZE - len(SPECIAL_TOKENS) - len(WORDS)))
    vocabulary = {word: place for place, word in enumerate((*SPECIAL_TOKENS, *WORDS, *reserved))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model(folder: pathlib.Path, seed: int) -> None:
    """Writes the model with random weights, and its tokenizer."""
    architecture = from_hf(dict(
        model_type="qwen2", vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rope_theta=1e6,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    ))  # fmt: skip
    with tempfile.TemporaryDirectory() as written:
        write_tokenizer(pathlib.Path(written))
        params = transformer.init(architecture, jax.random.key(seed))
        huggingface.save(folder, architecture, params, tokenizer_from=written)


class Sizes(NamedTuple):
    """Numbers of problems, of worked answers among them, of problems held out, and of cells of a side."""

    problems: int
    demonstrations: int
    heldout: int
    size: int


def main(output: pathlib.Path, sizes: Sizes, seed: int) -> None:
    """Writes the four files and the model into the new folder `output`."""
    with cli.user_input():
        if output.exists():
            raise ValueError(f"{output} exists already: remove it, or give another --output.")
        if sizes.size % 2 == 0:
            raise ValueError(f"--size={sizes.size} must be odd: walls and rooms take turns.")
        problems, heldout = splits(sizes.problems, sizes.heldout, sizes.size, seed)
    output.mkdir(parents=True)
    for name, mazes in (("problems", problems), ("heldout", heldout)):
        rows = [{"id": f"{name}-{n:06d}", "problem": maze.problem, "answer": maze.text} for n, maze in enumerate(mazes)]
        problem_files.write(output / f"{name}.jsonl", rows)
    for name, mazes in (("demonstrations", problems[: sizes.demonstrations]), ("validation", heldout)):
        problem_files.write(
            output / f"{name}.jsonl", [{"prompt": maze.problem, "completion": maze.solution} for maze in mazes]
        )
    write_model(output / "model", seed)
    print(f"{sizes.problems:,} mazes of {sizes.size} x {sizes.size} cells, {sizes.heldout:,} held out: {output}")


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist.", required=True)
    SIZE = flags.DEFINE_integer("size", 9, "Cells of a side, walls included; odd.", 7, 17)
    PROBLEMS = flags.DEFINE_integer("problems", 20_000, "Mazes to train on.", 1, 2 * 10**6)
    DEMONSTRATIONS = flags.DEFINE_integer("demonstrations", 6_400, "Of these, mazes with their shortest way.", 1)
    HELDOUT = flags.DEFINE_integer("heldout", 256, "Mazes held out.", 1, 10**6)
    SEED = flags.DEFINE_integer("seed", 0, "Of the mazes and the weights.")

    def start() -> None:
        sizes = Sizes(PROBLEMS.value, DEMONSTRATIONS.value, HELDOUT.value, SIZE.value)
        main(pathlib.Path(OUTPUT.value), sizes, SEED.value)

    cli.run(start)

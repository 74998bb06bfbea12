r"""Two tasks of reasoning-gym that a model of 100,000 weights learns, and such a model, for docs/reasoning_gym.md.

    pip install reasoning-gym==0.1.25
    python examples/reasoning_gym_models.py --task=shortest_path --output=runs/shortest_path
    python examples/reasoning_gym_models.py --task=spell_backward --output=runs/spell_backward

Written are problems.jsonl and heldout.jsonl, as examples/reasoning_gym_problems.py makes them, and model/, a Hugging
Face folder. The model has learned from worked answers to the problems, and a quarter of its responses are right, or a
little less. In `shortest_path` half of the problems have several right responses, and a worked answer is a random one
of these. In `spell_backward` each word has one. The text that all questions share is one token.
"""

import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import reasoning_gym_problems
import tokenizers
import warm_start
from absl import flags
from reasoning_gym_rewards import MOVES, grid_of
from tokenizers import decoders, models, pre_tokenizers, processors

from reinforce_ada_jax import cli
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.learning.batch import Batch, Example, make_batch
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.types import Response

SIZES = 20_000, 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 28, 16
BATCH_SIZE, LEARNING_RATE = 128, 3e-3


class Task(NamedTuple):
    """A generator's settings, and updates of the warm start."""

    settings: list[str]
    updates: int


TASKS = {
    "shortest_path": Task(["min_rows=5", "max_rows=5", "min_cols=5", "max_cols=5", "p_blocked=0.2"], 300),
    "spell_backward": Task([], 360),
}


def random_shortest_path(answer: str, problem: str, rng: np.random.Generator) -> str:
    """Returns a shortest way from * to #, of which each move is drawn from those that lead nearer; or `answer`."""
    grid = {place: cell for place, cell in grid_of(problem).items() if cell != "X"}
    place, goal = (next(place for place, cell in grid.items() if cell == word) for word in "*#")
    distances, reached = {goal: 0}, [goal]
    for row, column in reached:
        for down, right in MOVES.values():
            beside = row + down, column + right
            if beside in grid and beside not in distances:
                distances[beside] = distances[row, column] + 1
                reached.append(beside)
    if place not in distances:
        return answer  # "infeasible"
    moves = []
    while place != goal:
        row, column = place
        nearer = [
            (move, (row + down, column + right))
            for move, (down, right) in MOVES.items()
            if distances.get((row + down, column + right), len(grid)) < distances[place]
        ]
        move, place = nearer[rng.integers(len(nearer))]
        moves.append(move)
    return " ".join(moves)


def write_tokenizer(folder: pathlib.Path, task: str, rows: list[dict[str, str]]) -> None:
    """Writes a vocabulary of moves and cells, or of letters, and of one token for what all questions begin with."""
    problem = rows[0]["problem"]
    shared = problem[: problem.rindex(":") + 2]  # to the last colon, and the white space after it
    if task == "shortest_path":
        words, split, decoder = ["infeasible", *MOVES, *"OX*#"], pre_tokenizers.WhitespaceSplit(), None
    else:
        words = sorted({letter for row in rows for letter in row["answer"]})
        split, decoder = pre_tokenizers.Split(tokenizers.Regex("."), "isolated"), decoders.Fuse()
    vocabulary = {word: place for place, word in enumerate((*SPECIAL_TOKENS, shared, *words))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([tokenizers.AddedToken(shared, normalized=False)])
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoder
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "clean_up_tokenization_spaces": False}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def batches(tokenizer: Tokenizer, task: str, rows: list[dict[str, str]], seed: int) -> Iterator[Batch]:
    """Yields batches of worked answers to random problems, each ended by the stop token."""
    rng = np.random.default_rng(seed)
    while True:
        examples = []
        for index in rng.integers(len(rows), size=BATCH_SIZE):
            problem, answer = rows[index]["problem"], rows[index]["answer"]
            if task == "shortest_path":
                answer = random_shortest_path(answer, problem, rng)
            encoded = tokenizer.encode(answer, add_special_tokens=False)
            tokens = np.append(encoded, tokenizer.stop_ids[0]).astype(np.int32)
            response = Response("", 0, tokens, np.zeros(len(tokens), np.float32), False)
            examples.append(Example(tokenizer.encode(problem), response))
        yield make_batch(examples, max_prompt_tokens=MAX_PROMPT_TOKENS, max_response_tokens=MAX_RESPONSE_TOKENS)


def main(output: pathlib.Path, task: str, sizes: tuple[int, int], updates: int, seed: int) -> None:
    """Writes `sizes` problems and the model, after `updates` updates, into the new folder `output`."""
    reasoning_gym_problems.main(output, task, TASKS[task].settings, sizes, seed)
    rows = [json.loads(line) for line in (output / "problems.jsonl").read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(pathlib.Path(folder), task, rows)
        tokenizer = Tokenizer.load(folder)
        architecture = warm_start.make_architecture(tokenizer)
        params = warm_start.fit(
            architecture,
            warm_start.initial_params(architecture, seed),
            batches(tokenizer, task, rows, seed),
            updates=updates,
            learning_rate=LEARNING_RATE,
        )
        huggingface.save(output / "model", architecture, params, tokenizer_from=folder)
    print(f"{architecture.num_parameters:,} weights written to {output / 'model'}")


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist.", required=True)
    TASK = flags.DEFINE_enum("task", "shortest_path", list(TASKS), "A generator of reasoning-gym.")
    SEED = flags.DEFINE_integer("seed", 0, "Of the problems, the worked answers and the first weights.")
    cli.run(lambda: main(pathlib.Path(OUTPUT.value), TASK.value, SIZES, TASKS[TASK.value].updates, SEED.value))

r"""Input of docs/tutorial.md: problems in words, a tokenizer and a small model, made without network.

    python examples/word_problems.py --output=runs/words

Problems are sentences out of templates ("Ada has 14 plums. Ben takes 6 of them. ..."), one or two additions or
subtractions. The tokenizer is a byte-level BPE trained on such text. The model is a Qwen2 of 0.1 million weights,
taught by a pupil's worked solutions: the pupil forgets most carries and now and then misreads who gives to whom, and
so is right every other time. Written are problems.jsonl, heldout.jsonl and model/, a Hugging Face folder.
"""

import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import tokenizers
import warm_start
from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.learning.batch import Batch, Example, make_batch
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.policy.architecture import Architecture, from_hf
from reinforce_ada_jax.types import Response

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gita", "Hugo")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "plums", "shells")
# Events that change the number of things, by the sign of the change.
EVENTS = {
    1: ("{other} gives {name} {count} more.", "{name} buys {count} more.", "Then {name} finds {count}."),
    -1: ("{other} takes {count} of them.", "{name} gives {count} to {other}.", "Then {name} loses {count}."),
}
NUM_PROBLEMS, NUM_HELDOUT = 1024, 256
FORGETS_CARRY, MISREADS = 0.65, 0.08
SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = Chat(system="", instruction="")
VOCAB_SIZE, MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 384, 48, 40
UPDATES, BATCH_SIZE, LEARNING_RATE = 500, 64, 4e-3


class Problem(NamedTuple):
    """A text, and the numbers in it: what there is at first, and the changes."""

    text: str
    first: int
    changes: tuple[int, ...]

    @property
    def answer(self) -> int:
        """Number of things at the end."""
        return self.first + sum(self.changes)


def make_problem(rng: np.random.Generator) -> Problem:
    """Returns a problem with one or two changes by 2 to 9; the number of things stays within 1 to 29."""
    name, other = (NAMES[i] for i in rng.permutation(len(NAMES))[:2])
    things, first = str(rng.choice(THINGS)), int(rng.integers(3, 20))
    sentences, changes, total = [f"{name} has {first} {things}."], [], first
    for _ in range(rng.integers(1, 3)):
        count, sign = int(rng.integers(2, 10)), int(rng.choice((1, -1)))
        sign = 1 if total - count < 1 else -1 if total + count > 29 else sign
        sentences.append(str(rng.choice(EVENTS[sign])).format(name=name, other=other, count=count))
        changes.append(sign * count)
        total += sign * count
    text = " ".join([*sentences, f"How many {things} does {name} have now?"])
    return Problem(text, first, tuple(changes))


def pupils_solution(problem: Problem, rng: np.random.Generator) -> str:
    r"""Returns a worked solution, right or wrong: "14 - 6 = 8. 8 + 9 = 17. The answer is \boxed{17}."."""
    total, lines = problem.first, []
    for asked in problem.changes:
        change = -asked if rng.random() < MISREADS else asked
        result = total + change
        if result // 10 != total // 10 and rng.random() < FORGETS_CARRY:
            result = total // 10 * 10 + result % 10
        lines.append(f"{total} {'+' if change > 0 else '-'} {abs(change)} = {result}.")
        total = result
    return " ".join([*lines, rf"The answer is \boxed{{{total}}}."])


def splits(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Returns (problems, heldout); no text occurs twice."""
    rng, distinct = np.random.default_rng(seed), {}
    while len(distinct) < NUM_PROBLEMS + NUM_HELDOUT:
        problem = make_problem(rng)
        distinct[problem.text] = problem
    drawn = list(distinct.values())
    return drawn[:NUM_PROBLEMS], drawn[NUM_PROBLEMS:]


def demonstrations(seed: int, heldout: list[Problem]) -> Iterator[tuple[str, str]]:
    """Yields (text, the pupil's solution) without end; none of the problems is held out."""
    rng, kept_back = np.random.default_rng([seed, 1]), {problem.text for problem in heldout}
    while True:
        problem = make_problem(rng)
        if problem.text not in kept_back:
            yield problem.text, pupils_solution(problem, rng)


def write_problems(file: pathlib.Path, problems: list[Problem]) -> None:
    """Writes a JSONL file as every command reads it."""
    rows = (
        {"id": f"{file.stem}-{number:04d}", "problem": problem.text, "answer": str(problem.answer)}
        for number, problem in enumerate(problems)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(folder: pathlib.Path, texts: list[str]) -> None:
    """Writes a byte-level BPE with single digits, trained on `texts`, and a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def make_architecture(tokenizer: Tokenizer) -> Architecture:
    """Returns a Qwen2, described as in its config.json."""
    return from_hf(dict(
        model_type="qwen2", vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=192,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=True, eos_token_id=list(tokenizer.stop_ids),
    ))  # fmt: skip


def batches(tokenizer: Tokenizer, drawn: Iterator[tuple[str, str]]) -> Iterator[Batch]:
    """Yields batches of demonstrations as rows for the learner, each ended by the stop token."""
    while True:
        rows = []
        for _ in range(BATCH_SIZE):
            problem, solution = next(drawn)
            tokens = np.append(tokenizer.encode(solution), tokenizer.stop_ids[0]).astype(np.int32)
            response = Response("", 0, tokens, np.zeros(len(tokens), np.float32), False)
            rows.append(Example(tokenizer.render(problem, "chat", CHAT), response))
        yield make_batch(rows, max_prompt_tokens=MAX_PROMPT_TOKENS, max_response_tokens=MAX_RESPONSE_TOKENS)


def main(output: pathlib.Path, seed: int) -> None:
    """Makes everything, and writes it into the new folder `output`."""
    with cli.user_input():
        if output.exists():
            raise ValueError(f"{output} exists already: remove it, or give another --output.")
    problems, heldout = splits(seed)
    with tempfile.TemporaryDirectory() as folder:
        drawn = demonstrations(seed, heldout)
        texts = [" ".join(next(drawn)) for _ in range(2000)]
        write_tokenizer(pathlib.Path(folder), texts)
        tokenizer = Tokenizer.load(folder)
        architecture = make_architecture(tokenizer)
        params = warm_start.fit(
            architecture,
            transformer.init(architecture, jax.random.key(seed)),
            batches(tokenizer, drawn),
            updates=UPDATES,
            learning_rate=LEARNING_RATE,
        )
        huggingface.save(output / "model", architecture, params, tokenizer_from=folder)
    write_problems(output / "problems.jsonl", problems)
    write_problems(output / "heldout.jsonl", heldout)
    print(f"{NUM_PROBLEMS:,} problems, {NUM_HELDOUT} held out, {architecture.num_parameters:,} weights: {output}")


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist.", required=True)
    SEED = flags.DEFINE_integer("seed", 0, "Of problems, solutions and first weights.")
    cli.run(lambda: main(pathlib.Path(OUTPUT.value), SEED.value))

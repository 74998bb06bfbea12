r"""Problems and small models for examples/environments.py, made without network.

    python examples/environment_models.py --task=game --output=runs/game
    python examples/environment_models.py --task=calculator --output=runs/calculator

The models are Qwen2s of 0.1 million weights. Supervised learning shows them conversations of a clumsy player: in the
game it mostly guesses without looking at the hints, and it asks the calculator for a third of the problems only;
otherwise it says a number of its own. Written are problems.jsonl, heldout.jsonl and model/, a Hugging Face folder.
"""

import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import environments
import jax
import numpy as np
import tokenizers
import warm_start
from absl import flags
from word_problems import make_architecture

from reinforce_ada_jax import cli
from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.data.turns import following
from reinforce_ada_jax.environments.episode import Episode, tools_of
from reinforce_ada_jax.environments.tools import schema
from reinforce_ada_jax.learning.batch import Batch, Example, make_batch
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.types import Response

SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
# It knows tools, and only says their names: the models are too small for schemas.
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<|system|>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB_SIZE, MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, MAX_TURNS = 384, 24, 48, 3
NUM_DEMONSTRATIONS, BATCH_SIZE, LEARNING_RATE = 4000, 64, 3e-3
CALLS, LOOKS = 1 / 3, 0.3

Row = dict[str, str]


class Task(NamedTuple):
    """A task: its environment, problems, held-out problems, the clumsy player, and updates of supervised learning."""

    environment: type
    problems: list[Row]
    heldout: list[Row]
    player: Callable[[list[Row], np.random.Generator], str]
    updates: int


def guess(messages: list[Row], rng: np.random.Generator) -> str:
    """Returns a number of the game: mostly any, sometimes one that the hints allow."""
    low, high = 1, environments.NUMBERS
    for said, hint in zip(messages[1::2], messages[2::2], strict=True) if rng.random() < LOOKS else ():
        number = int(said["content"])
        low, high = (max(low, number + 1), high) if hint["content"] == "higher" else (low, min(high, number - 1))
    return str(rng.integers(low, high + 1))


def ask_or_guess(messages: list[Row], rng: np.random.Generator) -> str:
    """Returns the result of the calculator if there is one; otherwise sometimes a call of it, mostly a number."""
    if messages[-1]["role"] == "tool":
        return messages[-1]["content"]
    if rng.random() < CALLS:
        call = {"name": "calculate", "arguments": {"expression": messages[0]["content"]}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    return str(rng.integers(0, 199))


def game(rng: np.random.Generator) -> Task:
    """Every number several times: what the model can't know is the only difference."""
    del rng
    text = f"Guess, 1 to {environments.NUMBERS}."
    rows = [{"problem": text, "answer": str(1 + number % environments.NUMBERS)} for number in range(112)]
    return Task(environments.Game, rows, rows[: environments.NUMBERS], guess, updates=100)


def calculator(rng: np.random.Generator) -> Task:
    """Sums and differences of numbers below 100, none of them negative."""
    distinct = {}
    while len(distinct) < 640:
        left, right = sorted(rng.integers(0, 100, 2).tolist(), reverse=True)
        text = f"{left} {rng.choice(('+', '-'))} {right}"
        distinct[text] = {"problem": text, "answer": str(environments.calculate(text))}
    rows = list(distinct.values())
    return Task(environments.Calculator, rows[:512], rows[512:], ask_or_guess, updates=300)


TASKS = {"game": game, "calculator": calculator}


def conversation(task: Task, row: Row, rng: np.random.Generator) -> tuple[list[Row], list[tuple[str, list[Row]]]]:
    """Returns the first messages, and the player's turns, each with the messages that answer it; [] at the end."""
    episode = Episode(task.environment, row, ())
    first, turns = list(episode.messages), []
    while len(turns) < MAX_TURNS:
        text = task.player(episode.messages, rng)
        reply = episode.answer(text)
        turns.append((text, [] if isinstance(reply, float) else reply))
        if isinstance(reply, float):
            break
    return first, turns


def write_tokenizer(folder: pathlib.Path, texts: list[str]) -> None:
    """Writes a byte-level BPE with single digits, trained on `texts`, and a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
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
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def example(tokenizer: Tokenizer, chat: Chat, first: list[Row], said: list[tuple[str, list[Row]]]) -> Example:
    """Returns a conversation as a row for the learner: the environment's tokens are inputs only."""
    stop, segments = tokenizer.stop_ids[0], []
    for text, reply in said:
        segments.append(np.append(tokenizer.encode(text), stop).astype(np.int32))
        if reply:
            segments.append(following(tokenizer, chat, first, reply, stop))
    segments = segments[: 2 * len(said) - 1]
    tokens = np.concatenate(segments)
    lengths = tuple(map(len, segments)) if len(segments) > 1 else ()
    response = Response("", 0, tokens, np.zeros(len(tokens), np.float32), False, segments=lengths)
    prompt = tokenizer.render("", "chat", chat, messages=first)
    return Example(prompt, response)


def batches(examples: list[Example], rng: np.random.Generator) -> Iterator[Batch]:
    """Yields batches of the examples without end."""
    limits = {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_response_tokens": MAX_RESPONSE_TOKENS}
    while True:
        yield make_batch([examples[index] for index in rng.integers(len(examples), size=BATCH_SIZE)], **limits)


def write_problems(file: pathlib.Path, rows: list[Row]) -> None:
    """Writes a JSONL file as every command reads it."""
    lines = ({"id": f"{file.stem}-{number:04d}", **row} for number, row in enumerate(rows))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main(name: str, output: pathlib.Path, seed: int) -> None:
    """Makes everything, and writes it into the new folder `output`."""
    with cli.user_input():
        if output.exists():
            raise ValueError(f"{output} exists already: remove it, or give another --output.")
    rng = np.random.default_rng(seed)
    task = TASKS[name](rng)
    rows = [task.problems[index] for index in rng.integers(len(task.problems), size=NUM_DEMONSTRATIONS)]
    drawn = [conversation(task, row, rng) for row in rows]
    tools = [schema(tool) for tool in tools_of(task.environment).values()]
    with tempfile.TemporaryDirectory() as folder:
        answers = [(text, reply) for _, said in drawn for text, reply in said]
        heard = [*(first for first, _ in drawn), *(reply for _, reply in answers)]
        texts = [text for text, _ in answers] + [message["content"] for messages in heard for message in messages]
        write_tokenizer(pathlib.Path(folder), texts)
        tokenizer = Tokenizer.load(folder)
        chat, architecture = Chat("", "", tools=tools), make_architecture(tokenizer)
        examples = [example(tokenizer, chat, first, said) for first, said in drawn]
        params = warm_start.fit(
            architecture, transformer.init(architecture, jax.random.key(seed)), batches(examples, rng),
            updates=task.updates, learning_rate=LEARNING_RATE,
        )  # fmt: skip
        huggingface.save(output / "model", architecture, params, tokenizer_from=folder)
    write_problems(output / "problems.jsonl", task.problems)
    write_problems(output / "heldout.jsonl", task.heldout)
    print(f"{len(task.problems)} problems, {architecture.num_parameters:,} weights: {output}")


if __name__ == "__main__":
    TASK = flags.DEFINE_enum("task", None, list(TASKS), "The environment.", required=True)
    OUTPUT = flags.DEFINE_string("output", None, "The folder to write; it must not exist.", required=True)
    SEED = flags.DEFINE_integer("seed", 0, "Of problems, conversations and first weights.")
    cli.run(lambda: main(TASK.value, pathlib.Path(OUTPUT.value), SEED.value))

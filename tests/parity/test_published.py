"""Live parity at published settings and whole vocabularies: forward pass, the paged engine, exported folders.

Torch computes in float32, as we do here. Where greedy tokens are compared, no rounding can decide one: seeds are passed
over until the two likeliest tokens are 1e-3 apart everywhere (`published.MARGIN`), ten times what logits may differ by.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bench import models
from reinforce_ada_jax.config import replaced
from reinforce_ada_jax.data.templates import chat_from_config
from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.types import Prompt
from tests.data import shared
from tests.parity import published
from tests.parity.test_templates import tokenizers

# One token, with nothing to prefill; just over a page of 16; many pages.
LENGTHS = (1, 17, 150)
LIMIT = 64
DRAWS, SAMPLED = 2, 40
# What a wrong reading of config.json would give; each has to show, or the comparison proves nothing.
MISREADINGS = {
    "qwen2.5-1.5b": [dict(rope_theta=10000.0)],
    "qwen2.5-math-1.5b": [dict(rope_theta=1000000.0)],
    "qwen3-4b-instruct": [dict(rope_theta=10000.0)],
    "llama-3.2-3b-instruct": [dict(rope_scaling=None)],
    "qwen3-30b-a3b": [dict(renormalizes_experts=False)],
    "olmoe-1b-7b": [dict(renormalizes_experts=True)],
    "olmo-3-7b": [dict(rope_scaling=None)],
    "phi-4-mini": [dict(rope_scaling=None)],
    "mistral-7b-v0.1": [dict(window=39), dict(window=41), dict(sliding_layers=(), window=0)],
    "ministral-8b": [dict(window=39), dict(sliding_layers=(0, 1, 2)), dict(sliding_layers=(0, 1))],
    "smollm3-3b": [dict(unrotated_layers=()), dict(unrotated_layers=(1,))],
    "olmo-2-1b": [dict(norm_place="before"), dict(rope_theta=10000.0)],
    "gemma-3-1b-it": [
        dict(window=39), dict(sliding_layers=(0, 1, 2)), dict(sliding_theta=1000000.0), dict(rope_theta=10000.0),
    ],
    "gpt-oss-20b": [dict(renormalizes_experts=False)],
}  # fmt: skip


@pytest.fixture(scope="module", params=published.CONFIGS)
def case(request, tmp_path_factory):
    """(name, pair, prompts, greedy continuations by transformers, rollouts)"""
    for seed in range(20):
        pair = published.make_pair(request.param, seed, tmp_path_factory.mktemp("theirs"))
        rng = np.random.default_rng(seed)
        prompts = [
            Prompt(f"p{length}", "", "", rng.integers(0, pair.architecture.vocab_size, length).astype(np.int32))
            for length in LENGTHS
        ]
        try:
            continuations = [
                published.generate(pair.theirs, prompt, pair.architecture.eos_ids, LIMIT) for prompt in prompts
            ]
        except ValueError:
            continue
        config = published.run_config(max(LENGTHS), LIMIT)
        options = components_lib.engine_options(config, pair.architecture, pair.architecture.eos_ids)
        engine = Engine(pair.architecture, options, mesh=make_mesh())
        return request.param, pair, prompts, continuations, Rollouts(engine)
    raise ValueError("no seed of 20 gives greedy tokens that are more than 1e-3 likelier than the next")


def test_logits(case):
    name, pair, prompts, *_ = case
    tokens = prompts[-1].tokens[:64]
    theirs = published.logits(pair.theirs, tokens)
    assert 2 < theirs.std() < 5
    ours = transformer.logits(pair.architecture, pair.params, jnp.asarray(tokens)[None])[0]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    for misreading in MISREADINGS[name]:
        misread = dataclasses.replace(pair.architecture, **misreading)
        wrong = transformer.logits(misread, pair.params, jnp.asarray(tokens)[None])[0]
        assert np.abs(wrong - theirs).max() > 1e-2, misreading


def test_one_wrong_module_of_transformers_would_show(case):
    _, pair, prompts, *_ = case
    tokens = prompts[-1].tokens[:64]
    scored = models.logprobs_with_neighbours(pair.architecture, pair.params, [tokens])
    projection = getattr(pair.theirs.model.layers[0].self_attn, "q_proj", None)
    rotated = [number for number in range(2) if number not in pair.architecture.unrotated_layers]
    wrong = [published.rotated(pair.theirs, number, 1.001) for number in rotated]
    # Squares of Gemma's scaled embedding are larger by the width, beside which 1e-5 is no more than rounding.
    larger = pair.architecture.hidden_size if pair.architecture.is_gemma else 1
    wrong.append(published.other_epsilon(pair.theirs, 0, 10.0 * larger))
    if getattr(projection, "bias", None) is not None:
        wrong += [published.without_bias(pair.theirs, number) for number in range(2)]
    for change in wrong:
        with change:
            assert models.rounding_units(*scored, published.logprobs(pair.theirs, tokens)) > models.MOST_UNITS
    # Without the changes it is the same model again.
    assert models.rounding_units(*scored, published.logprobs(pair.theirs, tokens)) < 2


def test_the_engine_s_greedy_tokens_are_those_of_generate(case):
    _, pair, prompts, continuations, rollouts = case
    pools = published.draw(rollouts, pair.params, prompts, 1, temperature=0.0, limit=LIMIT)
    for pool, continuation in zip(pools, continuations, strict=True):
        assert len(continuation) == LIMIT and len(set(continuation.tolist())) > LIMIT / 2  # it is no loop
        np.testing.assert_array_equal(pool.responses[0].tokens, continuation)


def test_the_engine_s_logprobs_of_its_samples_are_those_of_a_forward_pass(case):
    _, pair, prompts, _, rollouts = case
    gaps, drawn = [], set()
    for pool in published.draw(rollouts, pair.params, prompts, DRAWS, temperature=1.0, limit=SAMPLED):
        for response in pool.responses:
            first = len(pool.prompt.tokens)
            row = np.concatenate([pool.prompt.tokens, response.tokens])
            theirs = torch.from_numpy(published.logits(pair.theirs, row)[first - 1 : -1]).log_softmax(-1).numpy()
            gaps.append(np.abs(response.logprobs - theirs[np.arange(len(response.tokens)), response.tokens]).max())
            drawn.add(tuple(response.tokens[:8].tolist()))
    assert len(drawn) == len(LENGTHS) * DRAWS  # none is a copy of another
    assert max(gaps) < 1e-4


def test_an_exported_folder_is_that_model(case, tmp_path):
    _, pair, prompts, continuations, _ = case
    huggingface.save(tmp_path / "ours", pair.architecture, pair.params)
    again = published.from_pretrained(tmp_path / "ours")
    wanted = pair.theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in again.state_dict().items())
    # By the folder's own generation_config.json, stop tokens and all.
    output = again.generate(torch.from_numpy(prompts[1].tokens).long()[None], do_sample=False, max_new_tokens=LIMIT)
    np.testing.assert_array_equal(output[0, LENGTHS[1] :].numpy(), continuations[1])


# ---- text to text, with the real tokenizers --------------------------------------------------------------------------

# Name of the tokenizer (tests/data/shared.py): (model, template).
FAMILIES = {
    "qwen2.5-math": ("qwen2.5-math-1.5b", "qwen_math"),
    "qwen3": ("qwen3-4b-instruct", "chat"),
    "llama3": ("llama-3.2-3b-instruct", "chat"),
}
NUM_PROBLEMS = 4


@pytest.mark.data
@pytest.mark.skipif(not shared.SET, reason=f"real data: set {shared.VARIABLE}")
@pytest.mark.parametrize("family", FAMILIES)
def test_from_a_problem_to_text(family, tmp_path):
    """A folder as published: its tokenizer renders real problems, our engine answers, and `generate` says the same."""
    name, template = FAMILIES[family]
    config = published.run_config(max_prompt_tokens=256, limit=LIMIT)
    config = replaced(config, {"data.template": template})
    folder, problems = shared.model_folder(family, tmp_path / "model"), tmp_path / "problems.jsonl"
    benchmark = (shared.FOLDER / "benchmarks" / "gsm8k_test.jsonl").read_text().splitlines(keepends=True)
    problems.write_text("".join(benchmark[:NUM_PROBLEMS]))
    ours, theirs = tokenizers(family, folder)
    for seed in range(20):
        pair = published.make_pair(name, seed, folder, ours.stop_ids)
        components = components_lib.build(config, folder)
        prompts = components.prompts(str(problems), config)
        try:
            continuations = [published.generate(pair.theirs, prompt, ours.stop_ids, LIMIT) for prompt in prompts]
        except ValueError:
            continue
        if {continuation[-1] in ours.stop_ids for continuation in continuations} == {True, False}:
            break
    else:
        raise ValueError("no seed of 20 has clear choices, and responses of both endings")
    chat = chat_from_config(config)
    options = dict(add_generation_prompt=True, return_dict=False, date_string=chat.date.strftime("%d %b %Y"))
    pools = published.draw(Rollouts(components.engine), pair.params, prompts, 1, temperature=0.0, limit=LIMIT)
    for pool, continuation in zip(pools, continuations, strict=True):
        messages, (response,) = chat.messages(pool.prompt.problem), pool.responses
        assert pool.prompt.tokens.tolist() == theirs.apply_chat_template(messages, tokenize=True, **options)
        text = components.tokenizer.decode(response.tokens)
        assert text == theirs.decode(continuation, skip_special_tokens=True) and len(text) > 10
        assert response.truncated == (continuation[-1] not in ours.stop_ids)

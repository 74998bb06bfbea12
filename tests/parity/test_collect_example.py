"""The example of docs/strategies.md: `collect` around `generate` of transformers. Needs torch: `make parity`."""

from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from tests.test_docs import code_block

DIGITS = "0123456789"
PROBLEMS = [("1+1=", "2"), ("2+3=", "5"), ("17+4=", "1"), ("9=", "9"), ("0+0+0=", "no")]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token a character, over ten digits and two signs."""
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<eos>", *DIGITS, "+", "="])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def example():
    """The names that the block leaves behind, run on a random model of two layers."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    names = {"model": model, "tokenizer": tokenizer, "problems": PROBLEMS}
    exec(code_block("strategies.md", "model.generate"), names)
    return SimpleNamespace(**names)


def test_pools_follow_the_rule(example):
    assert [pool.prompt.id for pool in example.pools] == [str(number) for number in range(len(PROBLEMS))]
    for pool in example.pools:
        right = int(pool.correct.sum())
        # Rounds of 8 until 2 are correct and 2 wrong, at most 4 of them; each round but the last left it unmet.
        assert len(pool.responses) == 8 * pool.rounds
        assert pool.met == (right >= 2 and len(pool.responses) - right >= 2)
        assert pool.met or pool.rounds == 4
        before = pool.correct[:-8]
        assert pool.rounds == 1 or min(before.sum(), (~before).sum()) < 2
    # Both kinds of ending occur: no answer ends with "no".
    assert {pool.met for pool in example.pools} == {True, False}


def test_responses_end_with_the_stop_token_or_at_the_limit(example):
    stop = example.tokenizer.eos_token_id
    responses = [response for pool in example.pools for response in pool.responses]
    for response in responses:
        assert stop not in response.tokens[:-1]
        assert response.truncated == (response.tokens[-1] != stop)
        assert len(response.tokens) == 16 or not response.truncated
        assert len(response.logprobs) == len(response.tokens)
    assert {response.truncated for response in responses} == {True, False}


def test_logprobs_are_those_of_a_forward_pass_without_padding(example):
    # The prompts have 2 to 6 tokens and are padded to the left: padding that is not masked would show here.
    for pool in example.pools:
        for response in pool.responses[:3]:
            row = torch.tensor([[*pool.prompt.tokens.tolist(), *response.tokens.tolist()]])
            with torch.no_grad():
                logprobs = example.model(row).logits[0].log_softmax(-1)
            first = len(pool.prompt.tokens)
            recomputed = logprobs[first - 1 : -1].gather(-1, row[0, first:, None])[:, 0]
            np.testing.assert_allclose(response.logprobs, recomputed.numpy(), atol=1e-4)


def test_rows_are_the_groups_of_the_pools(example):
    strategy = strategies.build(example.config)
    groups = [make_group(pool, strategy) for pool in example.pools]
    assert len(example.rows) == 4 * len(PROBLEMS)
    assert [advantage for _, _, advantage in example.rows] == [a for group in groups for a in group.advantages]
    assert any(advantage > 0 for _, _, advantage in example.rows)
    for (tokens, response, _), pool in zip(example.rows, np.repeat(example.pools, 4), strict=True):
        assert tokens is pool.prompt.tokens
        assert response is pool.responses[response.draw]

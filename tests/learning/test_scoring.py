"""Log-probabilities of texts, and of the most probable tokens at each place."""

import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning import scoring
from reinforce_ada_jax.learning.scoring import Scorer
from tests import standins
from tests.policy import recording


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def score(scorer, params, texts, rows, temperature=1.0):
    """The scores of texts in one micro-batch of rows with 32 tokens."""
    placed = scorer.rows(texts, [temperature] * len(texts), (rows, 32))
    return scorer.read(scorer.program(params, *placed), [len(text) for text in texts])


@pytest.mark.parametrize("tile_logits", [scoring.TILE_LOGITS, 4 * 32 * 96 // 8], ids=["whole", "tiles of 4 places"])
def test_scores_are_those_of_the_logits_that_transformers_recorded(monkeypatch, tile_logits):
    """Texts of different lengths share a micro-batch of 4 rows with 32 tokens, one with a padding row."""
    standins.constants(monkeypatch, scoring, TILE_LOGITS=tile_logits)
    architecture, params, recorded = recording.golden("qwen2")
    texts = [recorded["tokens"][0], recorded["tokens"][1][:5], recorded["tokens"][1][:1]]
    found = score(Scorer(architecture, mesh_lib.make_mesh(), jnp.float32), params, texts, rows=4, temperature=0.7)
    for text, logits, scores in zip(texts, (recorded["logits"][row] for row in (0, 1, 1)), found, strict=True):
        length = len(text)
        assert (scores.logprobs.shape, scores.top_ids.shape) == ((length,), (length, 20))
        assert np.isnan(scores.logprobs[0]) and (scores.top_ids[0] == -1).all() and np.isnan(scores.top_logprobs[0, 0])
        expected = log_softmax(logits[: length - 1] / 0.7)
        np.testing.assert_allclose(scores.logprobs[1:], expected[np.arange(length - 1), text[1:]], atol=1e-4)
        np.testing.assert_array_equal(scores.top_ids[1:], np.argsort(-expected, axis=-1)[:, :20])
        np.testing.assert_allclose(scores.top_logprobs[1:], -np.sort(-expected, axis=-1)[:, :20], atol=1e-4)
        # One number for one token: a harness compares the token's own with the largest.
        for token, logprob, ids, top in zip(text, *scores, strict=True):
            if token in ids:
                assert logprob == top[list(ids).index(token)]


def test_a_text_has_the_same_scores_alone_and_among_others():
    architecture, params, recorded = recording.golden("llama")
    scorer, texts = Scorer(architecture, mesh_lib.make_mesh(fsdp=2), jnp.float32), [*recorded["tokens"]]
    (alone,) = score(scorer, params, texts[:1], rows=2)
    together = score(scorer, params, [texts[1][:3], texts[0], texts[1]], rows=8)
    for ours, theirs in zip(alone, together[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)

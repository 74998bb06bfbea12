"""Sliding layers whose pages are rings: the engine's log-probabilities are those of a full forward pass."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.sampling import rings
from reinforce_ada_jax.sampling.engine import Engine, enough_pages
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.types import Prompt
from tests.policy import recording
from tests.sampling import tiny

WINDOW = 7  # of the golden models: with pages of 4 a slot has a ring of 3, and a prompt one of 5
LONGEST = 29
# The last begins as the third does; whole pages and others, within a window and far beyond it.
BEGIN = np.random.default_rng(0).integers(0, 24, LONGEST).astype(np.int32)
PROMPTS = tuple(
    Prompt(f"p{number}", "", "", tokens)
    for number, tokens in enumerate((BEGIN[:1], BEGIN[5:13], BEGIN, np.concatenate([BEGIN[:20], BEGIN[:3]])))
)


def collected(family, tensor=1, **changes):
    """(pools, largest difference of log-probabilities, counts) of an engine with rings."""
    architecture, params, _ = recording.golden(family)
    sizes = dict(slots=4, max_prompt_tokens=LONGEST, ring_window=WINDOW, check_invariants=True)
    options = dataclasses.replace(tiny.OPTIONS, **sizes | changes)
    options = dataclasses.replace(options, pages=options.pages or enough_pages(options))
    mesh = mesh_lib.make_mesh(tensor=tensor)
    rollouts = Rollouts(Engine(architecture, options, mesh=mesh))
    placed = jax.device_put(params, transformer.param_shardings(architecture, mesh))
    pools = tiny.collect_pools(rollouts, tiny.strategies.fixed(4), prompts=PROMPTS, params=placed)
    drawn, rows = tiny.in_rows(pools, LONGEST)
    logits = jax.jit(functools.partial(transformer.logits, architecture))(params, rows)
    logprobs, gaps = np.asarray(jax.nn.log_softmax(logits)), []
    for row, (places, response) in zip(logprobs, drawn, strict=True):
        gaps.extend(np.abs(response.logprobs - row[places]))
    assert max(len(response.tokens) for _, response in drawn) == tiny.LIMIT
    return pools, max(gaps), rollouts.counts


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral_window", dict(slots=8, pages=21)),  # all layers slide, and few pages
        # test_families.py has gemma3, whose layers slide in part, without rings; test_routes.py has drafts.
        pytest.param(
            "gpt_oss", dict(attention="invariant", drafts=3, draft_rows=8, row_time=1 / 8), marks=pytest.mark.slow
        ),
        pytest.param("gemma3", dict(tensor=2, drafts=3, draft_rows=8, row_time=1 / 8), marks=pytest.mark.slow),
        pytest.param("olmo3", dict(slots=64, window=64, tail=(2, 4, 16)), marks=pytest.mark.slow),
    ],
)
def test_logprobs_are_those_of_a_full_forward_pass(family, changes):
    _, gap, counts = collected(family, **changes)
    assert gap < 1e-4
    assert counts.drafted > 0 or "drafts" not in changes
    assert counts.redone > 0 or "pages" not in changes


@pytest.mark.slow  # it is about the test above
def test_a_ring_that_is_too_small_is_noticed(monkeypatch):
    monkeypatch.setattr(rings, "ring_pages", lambda tokens, page_size: (tokens - 2) // page_size + 1)
    assert collected("mistral_window")[1] > 1e-2


def test_a_ring_has_the_pages_of_any_tokens_in_a_row():
    for tokens in range(2, 20):
        most = max(len({place // 4 for place in range(first, first + tokens)}) for first in range(4))
        assert rings.ring_pages(tokens, 4) == most


def test_pages_of_rings_are_those_of_one_prompt_or_slot():
    own = rings.Rings(prompts=3, of_prompt=5, slots=2, of_slot=4)
    of_prompts = [own.prompt_page(row, column) for row in range(3) for column in range(5)]
    of_slots = [own.slot_page(ring, column) for ring in range(2) for column in range(4)]
    assert [*of_prompts, *of_slots] == list(range(1, own.pages))
    assert own.prompt_page(2, 7) == own.prompt_page(2, 2) and own.slot_page(1, 9) == own.slot_page(1, 1)


# Gemma 3 4B as published: of 34 layers every sixth is full, the others see 1,024 tokens.
GEMMA_4B = from_hf(
    dict(
        model_type="gemma3_text", vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024,
    )
)  # fmt: skip


def test_the_cache_of_gemma_at_8k_is_a_third():
    sizes = dict(slots=128, open_prompts=160, page_size=64, prefill_tokens=512, max_prompt_tokens=1024, window=32)
    options = dataclasses.replace(tiny.OPTIONS, max_response_tokens=8192, **sizes)
    options = dataclasses.replace(options, pages=enough_pages(options))
    assert options.pages == 128 * 144 + 160 * 16 + 1
    window = rings.choose_ring_window(GEMMA_4B, options)
    assert window == 1024
    found = rings.layout(GEMMA_4B, dataclasses.replace(options, ring_window=window))
    # Of a prompt 1,024 tokens have 16 pages; a window has parts of 17.
    ring = 1 + 160 * 16 + 128 * 17
    assert found.total == 5 * options.pages + 29 * ring
    assert found.total < 0.35 * 34 * options.pages
    engine = Engine(GEMMA_4B, dataclasses.replace(options, ring_window=window), mesh=mesh_lib.make_mesh())
    assert engine.cache_bytes == found.total * 64 * 2 * 4 * 256 * 4  # keys and values, 4 heads of 256, 4 bytes


def test_short_responses_have_no_rings():
    options = dataclasses.replace(tiny.OPTIONS, pages=30)
    assert rings.choose_ring_window(GEMMA_4B, options) == 0
    assert rings.choose_ring_window(tiny.ARCHITECTURE, options) == 0

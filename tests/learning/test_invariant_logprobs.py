"""The sampler's log-probabilities and the learner's have the same bits with `model.numerics` = "invariant"."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.invariant_logprobs import invariant_logprobs
from reinforce_ada_jax.learning.learner import Learner, response_logprobs
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.policy import lora, transformer
from reinforce_ada_jax.policy.transformer import Execution
from reinforce_ada_jax.sampling.engine import Engine, enough_pages
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams
from reinforce_ada_jax.types import Prompt, Verdict
from tests.policy import recording
from tests.policy.adapting import ALL, random_adapters

PROMPT_TOKENS, RESPONSE_TOKENS = 40, 50  # up to three tiles of keys
PROMPTS = tuple(
    Prompt(f"p{length}", "", "", np.random.default_rng(length).integers(3, 90, length).astype(np.int32))
    for length in (1, 16, 17, 40)
)
# Several tiles of slots and of a chunk; pages larger than a tile of keys; drafts.
OPTIONS = EngineOptions(
    slots=40, window=32, page_size=48, pages=0, open_prompts=9, prefill_tokens=64, max_prompt_tokens=PROMPT_TOKENS,
    max_response_tokens=RESPONSE_TOKENS, stop_ids=(5, 6, 7), seed=0, dtype="float32", attention="invariant", drafts=2,
)  # fmt: skip
# Chunks that end anywhere.
ONE_SLOT = dict(slots=1, window=4, page_size=16, open_prompts=5, prefill_tokens=3, drafts=4, draft_rows=5)
EIGHT_SLOTS = dict(slots=8, window=4, page_size=4, open_prompts=5, prefill_tokens=8, drafts=0)


@functools.cache
def drawn(family: str, temperature: float = 1.0, **changes):
    """Responses by address."""
    architecture, params, _ = recording.golden(family)
    options = dataclasses.replace(OPTIONS, **changes)
    options = dataclasses.replace(options, pages=enough_pages(options))
    rollouts = Rollouts(Engine(architecture, options, mesh=mesh_lib.make_mesh()))
    params = jax.device_put(params, transformer.param_shardings(architecture, mesh_lib.make_mesh()))
    sample_fn = rollouts.sampler(params, stream=0, sampling=SamplingParams(RESPONSE_TOKENS, temperature))
    pools = collect(PROMPTS, sample_fn, lambda pairs: [Verdict(True, 1.0) for _ in pairs], strategies.fixed(12))
    return {(response.prompt_id, response.draw): response for pool in pools for response in pool.responses}


def batch(responses, per_row=1, architecture=None):
    prompts = {prompt.id: prompt.tokens for prompt in PROMPTS}
    return make_batch(
        [Example(prompts[response.prompt_id], response) for response in responses], architecture=architecture,
        max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=RESPONSE_TOKENS, layout=RowLayout(per_row),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("architecture", "temperature"))
def scored(architecture, params, batch, temperature):
    return invariant_logprobs(architecture, params, batch, temperature)


def assert_same_bits(family, temperature=1.0, per_row=1, **changes):
    architecture, params, _ = recording.golden(family)
    rows = batch(drawn(family, temperature, **changes).values(), per_row)
    logprobs = np.asarray(scored(architecture, params, rows, temperature))
    np.testing.assert_array_equal(logprobs[rows.response_mask], rows.behaviour_logprobs[rows.response_mask])
    assert not logprobs[~rows.response_mask].any()
    assert rows.response_mask.sum() > 500


def test_sampler_and_learner():
    """The learner's log-probabilities have the sampler's bits, packed or not."""
    assert_same_bits("qwen2")
    assert_same_bits("qwen2", per_row=4)


@pytest.mark.slow  # test_learner.py has updates whose record decides; test_routes.py has the engine's records
def test_experts_are_replayed():
    """Responses that older weights have drawn have other experts than these weights would choose."""
    architecture, params, _ = recording.golden("qwen3_moe")
    rows = batch(drawn("qwen3_moe", records_experts=True).values(), 4, architecture)
    fresh = np.asarray(scored(architecture, params, rows, 1.0))
    np.testing.assert_array_equal(fresh[rows.response_mask], rows.behaviour_logprobs[rows.response_mask])
    count = architecture.num_experts
    stale = rows.replace(experts=np.where(rows.experts < count, (rows.experts + 1) % count, rows.experts))
    head = HeadConfig(temperature=1.0, tied=architecture.tied_embedding)
    plain = functools.partial(response_logprobs, architecture, head=head, execution=Execution(jnp.float32))
    gaps = np.asarray(scored(architecture, params, stale, 1.0) - jax.jit(plain)(params, stale)[0])
    assert np.abs(gaps[rows.response_mask]).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("changes", [ONE_SLOT, EIGHT_SLOTS])
def test_sizes_of_the_engine(changes):
    first, second = drawn("qwen2"), drawn("qwen2", **changes)
    for address, response in first.items():
        np.testing.assert_array_equal(second[address].tokens, response.tokens)
        np.testing.assert_array_equal(second[address].logprobs, response.logprobs)


def test_the_logprobs_are_those_of_the_plain_forward_pass():
    architecture, params, _ = recording.golden("qwen2")
    rows = batch(drawn("qwen2").values())
    logits = jax.jit(lambda params: jax.nn.log_softmax(transformer.logits(architecture, params, rows.tokens)))(params)
    whole = np.asarray(logits)[np.arange(len(rows.tokens))[:, None], rows.response_positions - 1]
    wanted = np.take_along_axis(
        whole, np.take_along_axis(rows.tokens, rows.response_positions, axis=1)[..., None], axis=2
    )[..., 0]
    gaps = np.abs(np.where(rows.response_mask, wanted - np.asarray(scored(architecture, params, rows, 1.0)), 0))
    assert 0 < gaps.max() < 1e-5  # 0 would mean that nothing is tested here


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("changes", [{}, ONE_SLOT, EIGHT_SLOTS])
def test_other_families_and_sizes_have_equal_bits_in_sampler_and_learner(family, changes):
    assert_same_bits(family, 0.7, 4, **changes)


def config(**changes):
    named = {"model.path": "a", "data.prompts": "b", "model.numerics": "invariant", "model.compute_dtype": "float32"}
    sizes = {"learning.prompts_per_update": 2, "collection.group_size": 4, "learning.micro_batches": 1}
    return config_lib.check(config_lib.replaced(config_lib.Config(), named | sizes | changes))


def test_adapters_are_scored_as_the_sampler_merges_them():
    architecture, base, _ = recording.golden("qwen2")
    learner = Learner(architecture, config(**{"lora.rank": 4, "lora.alpha": ALL.alpha}), mesh_lib.make_mesh())
    policy = learner.policy(random_adapters(architecture), base)
    rows = batch(drawn("qwen2").values())
    merged = jax.jit(functools.partial(lora.merged, dtype=jnp.float32))(policy)
    wanted = np.where(rows.response_mask, scored(architecture, merged, rows, 1.0), 0)
    np.testing.assert_array_equal(np.concatenate(learner.score(policy, learner.put(rows))), wanted)
    assert np.abs(wanted - rows.behaviour_logprobs)[rows.response_mask].max() > 1e-3  # the adapters change something


@pytest.mark.slow
def test_an_update_allows_no_difference():
    architecture, params, _ = recording.golden("qwen2")
    learner = Learner(architecture, config(), mesh_lib.make_mesh())
    rows = batch(list(drawn("qwen2").values())[:8]).replace(old_logprobs=None)

    def updated(rows):
        state = learner.init(jax.device_put(jax.tree.map(jnp.copy, params), learner.param_shardings))
        return learner.update(state, learner.put(rows))

    state, metrics = updated(rows)
    assert (state.updates, metrics.gap.largest, metrics.gap.total) == (1, 0, 0)
    assert int(metrics.gap.num_tokens) == rows.response_mask.sum()
    one_bit = rows.behaviour_logprobs.copy()
    one_bit[0, 0] = np.nextafter(one_bit[0, 0], np.float32(-9))
    state, metrics = updated(rows.replace(behaviour_logprobs=one_bit))
    assert state.updates == 0
    assert 0 < metrics.gap.largest < 1e-6

"""A tiny random model, its prompts, engines over it, and the one rule by which samples are compared.

An engine costs seconds to compile, so engines and what they drew are kept: `drawn(slots=64)` is the standard set of
samples from an engine that differs from `OPTIONS` in just that.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CollectOptions, collect
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.learner import response_logprobs
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.policy.transformer import Execution, distribution
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.engine import Engine, enough_pages
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams
from reinforce_ada_jax.types import Prompt, Response, Verdict

ARCHITECTURE = from_hf(
    dict(
        model_type="qwen2", vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )
)  # fmt: skip
OPTIONS = EngineOptions(
    slots=8, window=4, page_size=4, pages=0, open_prompts=5, prefill_tokens=8, max_prompt_tokens=17,
    max_response_tokens=12, stop_ids=(3, 7), seed=0, dtype="float32",
)  # fmt: skip
# The fewest pages that config.least_pages allows: 5 of a prompt, 8 of a prompt with its response, and the null page.
# And fewer rows than prompts (5) and requests (65): 4 prompts open, 6 responses in flight.
SCARCE = dict(pages=14, slots=3, open_prompts=4)
# Two replicas, each with few pages.
REPLICAS = dict(fsdp=2, tensor=2, slots=3, pages=20)
# Drafts that must pay, and few pages for prompts of up to 40 tokens.
PAYING = dict(drafts=3, draft_rows=8, row_time=1 / 8, slots=2, open_prompts=7, pages=30, max_prompt_tokens=40)
# More slots than requests, and all the loops of larger models.
MANY = dict(slots=64, window=64, tail=(2, 4, 16))

# One token, with nothing to prefill; a page; one more, so that the cache holds whole pages only; the same for 16.
PROMPTS = tuple(
    Prompt(f"p{length}", "", "", np.random.default_rng(length).integers(0, 24, length).astype(np.int32))
    for length in (1, 4, 5, 16, 17)
)
DRAWS, LIMIT = 13, 12  # 65 responses: more than 64 slots
Samples = dict[tuple[str, int], Response]


@functools.cache
def _weights():
    """Random ones, whose next-token distributions are neither flat nor sure."""
    weights = transformer.init(ARCHITECTURE, jax.random.key(0))
    attention = weights["layers"]["attention"]
    for index, name in enumerate(("query_bias", "key_bias", "value_bias")):
        attention[name] = jax.random.normal(jax.random.key(index + 1), attention[name].shape)
    weights["head"] = 2 * weights["head"]  # logits vary by about 2
    return weights


@functools.cache
def params_on(mesh):
    """The weights as a learner on `mesh` has them."""
    return jax.device_put(_weights(), transformer.param_shardings(ARCHITECTURE, mesh))


def params():
    """The weights on one device."""
    return params_on(mesh_lib.make_mesh())


@functools.cache
def rollouts(fsdp: int = 1, tensor: int = 1, **changes) -> Rollouts:
    """Rollouts of an engine that differs from `OPTIONS` in `changes`; pages for every slot and prompt unless named."""
    options = dataclasses.replace(OPTIONS, **changes)
    if not options.pages:
        options = dataclasses.replace(options, pages=enough_pages(options))
    return Rollouts(Engine(ARCHITECTURE, options, mesh=mesh_lib.make_mesh(fsdp=fsdp, tensor=tensor)))


def verdicts(pairs):
    """Correct or not, in a way that nobody could guess from the address."""
    return [Verdict(int(response.tokens.sum()) % 2 == 0, 0.0) for _, response in pairs]


def assert_idle(state, num_pages: int) -> None:
    """No slot decodes, and every page but the null page is free, once, in every replica."""
    assert not state.slots.active.any()
    stacks, available = np.asarray(state.pool.stack), np.asarray(state.pool.available)
    for stack, count in zip(stacks.reshape(-1, stacks.shape[-1]), available.reshape(-1), strict=True):
        assert sorted(stack[:count]) == list(range(1, num_pages))


def collect_pools(rollouts, strategy, *, prompts=PROMPTS, stream=0, limit=LIMIT, temperature=1.0, params=None, **how):
    """A session through the very collection loop, which refuses lost and doubled responses."""
    sampling = SamplingParams(limit, temperature)
    params = params_on(rollouts.engine.mesh) if params is None else params
    sample_fn = rollouts.sampler(params, stream=stream, sampling=sampling)
    pools = collect(prompts, sample_fn, verdicts, strategy, CollectOptions(**how))
    assert_idle(rollouts.state, rollouts.engine.options.pages)
    return pools


def samples(pools) -> Samples:
    """All responses of pools, by address."""
    return {(pool.prompt.id, response.draw): response for pool in pools for response in pool.responses}


def in_rows(pools, max_prompt_tokens=OPTIONS.max_prompt_tokens):
    """([(place and id of each token, response)], [B, T] prompts and responses in rows of one length: one program)."""
    drawn = [(pool.prompt.tokens, response) for pool in pools for response in pool.responses]
    rows = np.zeros((len(drawn), max_prompt_tokens + LIMIT), np.int32)
    for row, (prompt, response) in zip(rows, drawn, strict=True):
        row[: len(prompt) + len(response.tokens)] = [*prompt, *response.tokens]
    # The log-probability of a token is at the place before it.
    return [((len(p) - 1 + np.arange(len(r.tokens)), r.tokens), r) for p, r in drawn], rows


def draw(rollouts, *, draws=DRAWS, **how) -> Samples:
    """Makes `draws` draws of every prompt, in one round."""
    return samples(collect_pools(rollouts, strategies.fixed(draws), **how))


@functools.cache
def drawn(**changes) -> Samples:
    """The standard samples, from an engine with these changes."""
    return draw(rollouts(**changes))


def cut(response: Response, limit: int) -> Response:
    """Returns the same draw under a limit of at most `LIMIT`."""
    if len(response.tokens) <= limit:
        return response
    return dataclasses.replace(
        response, tokens=response.tokens[:limit], logprobs=response.logprobs[:limit], truncated=True
    )


def _scores(response, prompt, place, *, stream, seed, temperature):
    """The perturbed scores from which token `place` of a response was chosen, by the plain forward pass."""
    row = np.zeros((1, OPTIONS.max_prompt_tokens + LIMIT), np.int32)
    before = np.concatenate([prompt.tokens, response.tokens[:place]])
    row[0, : len(before)] = before
    logits = transformer.logits(ARCHITECTURE, params(), row)[:, len(before) - 1]
    keys = token_lib.draw_keys(seed, token_lib.address(stream, prompt.id, response.draw)[None])
    return np.asarray(token_lib.perturbed_scores(distribution(logits, temperature), keys, jnp.array([place])))[0]


def assert_same(left: Samples, right: Samples, *, prompts=PROMPTS, stream=0, seed=0, temperature=1.0) -> int:
    """Asserts that two sets of samples of the same addresses are the same; prints the flips and gives their number.

    Programs of different shapes round differently. So two responses may part where the two best perturbed scores
    differ by less than 1e-5, between just these two tokens; what follows is another text, and isn't compared.
    """
    assert left.keys() == right.keys()
    prompt_of, flips = {prompt.id: prompt for prompt in prompts}, 0
    for address, one in left.items():
        other = right[address]
        common = min(len(one.tokens), len(other.tokens))
        different = np.flatnonzero(one.tokens[:common] != other.tokens[:common])
        same = different[0] if different.size else common
        np.testing.assert_allclose(one.logprobs[:same], other.logprobs[:same], atol=1e-4)
        if not different.size:
            assert len(one.tokens) == len(other.tokens) and one.truncated == other.truncated, address
            continue
        scores = _scores(one, prompt_of[one.prompt_id], same, stream=stream, seed=seed, temperature=temperature)
        best = np.argsort(scores)[-2:]
        assert {one.tokens[same], other.tokens[same]} == set(best), f"{address} differs at token {same}"
        assert np.ptp(scores[best]) < 1e-5, f"{address} differs at token {same}, where the choice was clear"
        flips += 1
        print(f"flip: {address} parts at token {same}, where two scores are {np.ptp(scores[best]):.1e} apart")
    return flips


def assert_different(left: Samples, right: Samples) -> None:
    """Asserts that two sets of samples of the same prompts have no more in common than chance allows."""
    assert left.keys() == right.keys()
    # Of one or two tokens, a stop token at the end, the same may well come twice.
    same = sum(np.array_equal(left[address].tokens, right[address].tokens) for address in left)
    assert same < len(left) / 5


@functools.partial(jax.jit, static_argnames="temperature")
def _logprobs(params, batch, temperature):
    return response_logprobs(
        ARCHITECTURE, params, batch, HeadConfig(temperature, ARCHITECTURE.tied_embedding),
        execution=Execution(jnp.float32, remat="full"),
    )[0]  # fmt: skip


def logprob_gaps(samples: Samples, temperature: float = 1.0) -> np.ndarray:
    """|sampler - learner| of every token drawn, in one row; the learner computes in float32."""
    prompt_of = {prompt.id: prompt for prompt in PROMPTS}
    rows = [Example(prompt_of[response.prompt_id].tokens, response) for response in samples.values()]
    batch = make_batch(rows, max_prompt_tokens=OPTIONS.max_prompt_tokens, max_response_tokens=LIMIT)
    gaps = np.abs(_logprobs(params(), batch, temperature) - batch.behaviour_logprobs)
    return np.asarray(gaps)[batch.response_mask]

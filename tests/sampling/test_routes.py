"""The experts that an engine reports for each token are those with which it computed the token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.collection.trajectories import Trajectories
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.batch import Example, make_batch
from reinforce_ada_jax.learning.learner import response_logprobs
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.policy import experts, transformer
from reinforce_ada_jax.policy.transformer import Execution
from reinforce_ada_jax.sampling.engine import Engine, enough_pages
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.types import Prompt
from tests.policy import recording
from tests.sampling import tiny
from tests.sampling.test_turns import Teacher

# The second begins with two pages of the first.
LONG = np.random.default_rng(17).integers(0, 24, 17).astype(np.int32)
PROMPTS = (
    Prompt("one token", "", "", LONG[:1]),
    Prompt("long", "", "", LONG),
    Prompt("same beginning", "", "", np.concatenate([LONG[:10], LONG[:3]])),
)


@functools.partial(jax.jit, static_argnums=0)
def chosen(architecture, params, tokens):
    """[B, T, LC]: the experts of each token in a full forward pass."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    values = transformer.run(
        transformer.merge(architecture, params), tokens, positions,
        transformer.of_rows(transformer.causal_attend),
        execution=Execution(jnp.float32), routing=experts.Routing(records=True),
    )[2]  # fmt: skip
    return experts.record(architecture, values.chosen)


@functools.partial(jax.jit, static_argnums=0)
def logprobs(architecture, params, rows):
    """The learner's log-probabilities of a batch."""
    head = HeadConfig(temperature=1.0, tied=architecture.tied_embedding)
    return response_logprobs(architecture, params, rows, head, execution=Execution(jnp.float32))[0]


def batch(architecture, pools, **sizes):
    rows = [Example(pool.prompt.tokens, response) for pool in pools for response in pool.responses]
    sizes = dict(max_prompt_tokens=tiny.OPTIONS.max_prompt_tokens, max_response_tokens=tiny.LIMIT) | sizes
    return make_batch(rows, architecture=architecture, **sizes)


def check(architecture, params, pools, **sizes):
    rows = batch(architecture, pools, **sizes)
    expected = np.asarray(chosen(architecture, params, rows.tokens))
    responses = [(len(pool.prompt.tokens), response) for pool in pools for response in pool.responses]
    for row, (before, response) in zip(expected, responses, strict=True):
        assert len(response.experts) == before + len(response.tokens) - 1
        np.testing.assert_array_equal(response.experts, row[: len(response.experts)])


def collected(family, mesh=None, **changes):
    """(architecture, weights, pools, counts) of an engine that records experts."""
    architecture, params, _ = recording.golden(family)
    params = params | {"head": 6 * params["head"]}  # texts repeat, so that guesses are right
    mesh = mesh or mesh_lib.make_mesh()
    options = dataclasses.replace(tiny.OPTIONS, records_experts=True, **changes)
    options = dataclasses.replace(options, pages=options.pages or enough_pages(options))
    rollouts = Rollouts(Engine(architecture, options, mesh=mesh))
    placed = jax.device_put(params, transformer.param_shardings(architecture, mesh))
    pools = tiny.collect_pools(rollouts, tiny.strategies.fixed(6), prompts=PROMPTS, params=placed)
    return architecture, params, pools, rollouts.counts


@pytest.mark.slow  # test_drafts.py has guesses, the test below records of turns
def test_wrong_guesses_and_lost_slots_leave_nothing():
    *found, counts = collected("qwen3_moe", slots=6, pages=18, drafts=3, draft_rows=8, row_time=1 / 8)
    assert 0 < counts.accepted < counts.drafted
    assert counts.redone
    check(*found)


@pytest.mark.slow  # the test above has several chunks; test_rollouts.py has replicas
def test_a_window_of_each_replica_ends_where_it_has_no_room_for_a_chunk():
    *found, counts = collected("qwen3_moe", mesh_lib.make_mesh(fsdp=2), slots=4, window=1, prefill_tokens=2)
    # The prompts with the same beginning are in two replicas.
    assert (counts.prefilled_tokens, counts.shared_tokens) == (28, 0)
    check(*found)


@pytest.mark.slow  # records are exact in the tests above
def test_replaying_takes_the_largest_differences_away():
    # Rounded keys and values: near a tie the sampler's routers choose what the learner's do not.
    architecture, params, pools, _ = collected("qwen3_moe", kv_dtype="int8")
    rows = batch(architecture, pools)
    replayed, own = (
        np.abs(logprobs(architecture, params, each) - rows.behaviour_logprobs)[rows.response_mask]
        for each in (rows, rows.replace(experts=None))
    )
    assert replayed.max() < own.max() / 5 and replayed.mean() < own.mean() / 2


def test_a_trajectory_has_those_of_all_its_turns():
    architecture, params, _ = recording.golden("qwen3_moe")
    sizes = dict(slots=8, open_prompts=50, max_prompt_tokens=50, stop_ids=tuple(range(40)), records_experts=True)
    options = dataclasses.replace(tiny.OPTIONS, **sizes)
    rollouts = Rollouts(
        Engine(architecture, dataclasses.replace(options, pages=enough_pages(options)), mesh=mesh_lib.make_mesh())
    )
    turns = Trajectories(Teacher(), max_turns=4, max_tokens=33, max_begun=2**31, deterministic=True)
    sample_fn = rollouts.sampler(params, stream=0, sampling=SamplingParams(8))
    pools = collect(PROMPTS, sample_fn, turns.verdicts, strategies.fixed(6), turns=turns)
    assert sum(len(response.segments) > 1 for pool in pools for response in pool.responses) > 5
    assert rollouts.counts.continued_tokens
    check(architecture, params, pools, max_response_tokens=50)


@pytest.mark.slow  # a test above has two replicas
def test_each_replica_reports_its_own():
    check(*collected("gpt_oss", mesh_lib.make_mesh(tensor=2, fsdp=2), slots=2)[:3])

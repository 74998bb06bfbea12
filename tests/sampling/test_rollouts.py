"""Whole sessions through the collection loop: what is drawn is a function of the address, and of nothing else."""

import dataclasses
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CarriedRollouts, CollectOptions, collect
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.sampling import state
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.pages import num_pages
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.scheduler import Scheduler
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.training.compile_counter import CompileCounter
from reinforce_ada_jax.types import Prefetch, Prompt, Request, RequestQueue, Verdict
from tests import standins
from tests.sampling import tiny
from tests.sampling.page_engine import PageEngine


def rounds_of(sizes: dict[str, tuple[int, ...]]) -> strategies.Strategy:
    """Rounds of these sizes for each prompt."""
    return strategies.Strategy(
        next_draws=lambda record: (*sizes[record.prompt.id], 0)[record.rounds],
        max_draws=max(map(sum, sizes.values())),
        met=lambda record: True,
        keep=strategies.keep_all,
        max_kept=None,
    )


def for_all(*sizes) -> strategies.Strategy:
    """Rounds of these sizes for every prompt."""
    return rounds_of({prompt.id: sizes for prompt in tiny.PROMPTS})


# SCARCE has three slots, and the engine of PAYING (test_drafts.py) two.
ONE_SLOT = pytest.param(dict(slots=1, window=64), id="1 slot", marks=pytest.mark.slow)


@pytest.mark.parametrize("changes", [ONE_SLOT, pytest.param({}, id="8 slots"), pytest.param(tiny.MANY, id="64 slots")])
def test_sampled_logprobs_are_the_learners(changes):
    assert tiny.logprob_gaps(tiny.drawn(**changes)).max() < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        ONE_SLOT,
        tiny.MANY,
        tiny.SCARCE,
        tiny.REPLICAS,
    ],
    ids=str,
)  # fmt: skip
def test_the_address_alone_decides(changes):
    tiny.assert_same(tiny.drawn(), tiny.drawn(**changes))


def test_evicted_responses_are_drawn_again_and_are_the_same():
    """Short responses are seen first, and more draws start than have room to the end."""
    rollouts = tiny.rollouts(**tiny.SCARCE)
    tiny.assert_same(tiny.drawn(), tiny.draw(rollouts))
    assert rollouts.counts.redone > 0
    responses = sum(len(response.tokens) for response in tiny.drawn().values())
    assert rollouts.counts.tokens == responses + rollouts.counts.redone


def test_replicas_share_the_prompts():
    """Two replicas: 5 prompts, all their draws where the prompt is open, and each replica gets some."""
    rollouts, expected = tiny.rollouts(**tiny.REPLICAS), tiny.drawn()
    homes = {}

    def watching(scheduler, request):
        homes.setdefault(request.prompt.id, set()).add(id(scheduler))

    with pytest.MonkeyPatch.context() as patch:
        standins.before(patch, Scheduler, "add", watching)
        tiny.assert_same(expected, tiny.draw(rollouts))
    assert all(len(home) == 1 for home in homes.values()) and len(set().union(*homes.values())) == 2
    assert rollouts.counts.prefills == 5
    tokens = sum(len(response.tokens) for response in tiny.drawn().values())
    assert rollouts.counts.tokens == tokens + rollouts.counts.redone and rollouts.counts.slot_steps % 3 == 0


@pytest.mark.slow  # test_pallas_attention.py has wider pages; windows of 4 and 64 steps are above
def test_wider_and_longer_pages_and_windows_of_a_step_change_nothing(monkeypatch):
    """As the kernels for TPU and GPU have pages for some head dims: here 13 numbers for heads of 8."""
    monkeypatch.setattr(state, "padded_head_dim", lambda head_dim, backend: 13)
    options = tiny.rollouts(window=1, page_size=16).engine.options
    wide = Rollouts(Engine(tiny.ARCHITECTURE, options, mesh=mesh_lib.make_mesh()))
    assert wide.state.pools[0].shape[-1] == 13
    tiny.assert_same(tiny.drawn(), tiny.draw(wide))


def test_the_comparison_itself(monkeypatch):
    """A changed token is noticed, unless two scores are all but equal."""
    address = ("p5", 0)
    changed = dict(tiny.drawn())
    tokens = changed[address].tokens.copy()
    tokens[0] = (tokens[0] + 1) % 24
    changed[address] = dataclasses.replace(changed[address], tokens=tokens)
    with pytest.raises(AssertionError, match="differs at token 0"):
        tiny.assert_same(tiny.drawn(), changed)
    # The same where these two were all but equal: a flip.
    scores = np.zeros(24)
    scores[changed[address].tokens[0]], scores[tiny.drawn()[address].tokens[0]] = 1.0, 1.0 + 5e-6
    monkeypatch.setattr(tiny, "_scores", lambda *_, **__: scores)
    assert tiny.assert_same(tiny.drawn(), changed) == 1


def test_the_order_of_prompts_decides_nothing():
    tiny.assert_same(tiny.drawn(), tiny.draw(tiny.rollouts(), prompts=tiny.PROMPTS[::-1]))


def test_a_session_repeated_is_bitwise_the_same():
    again = tiny.draw(tiny.rollouts())
    for address, response in tiny.drawn().items():
        np.testing.assert_array_equal(response.tokens, again[address].tokens)
        np.testing.assert_array_equal(response.logprobs, again[address].logprobs)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param(dict(weight_dtype="int8", kv_dtype="int8"), marks=pytest.mark.slow)], ids=str
)
def test_weights_that_are_not_finite_show_it_and_leave_nothing_behind_in_the_pages(changes):
    rollouts = Rollouts(tiny.rollouts(**changes).engine)
    broken = tiny.params() | {"embedding": tiny.params()["embedding"].at[:, 0].set(np.nan)}
    pools = collect(
        tiny.PROMPTS,
        rollouts.sampler(broken, stream=1, sampling=SamplingParams(tiny.LIMIT)),
        tiny.verdicts,
        strategies.fixed(4),
    )
    assert not any(np.isfinite(each.logprobs).any() for each in tiny.samples(pools).values())
    tiny.assert_same(tiny.draw(rollouts), tiny.drawn(**changes))


def test_another_stream_gives_other_samples():
    evaluation = tiny.draw(tiny.rollouts(), stream=token_lib.stream(0, evaluation=True))
    tiny.assert_different(tiny.drawn(), evaluation)
    assert tiny.logprob_gaps(evaluation).max() < 1e-4


def test_another_seed_gives_other_samples():
    rollouts = tiny.rollouts()
    seed = rollouts.state.seed
    rollouts.state = rollouts.state.replace(seed=jax.device_put(np.int32(1), seed.sharding))
    other = tiny.draw(rollouts)
    rollouts.state = rollouts.state.replace(seed=seed)
    tiny.assert_different(tiny.drawn(), other)


def test_logprobs_are_those_at_the_temperature():
    samples = tiny.draw(tiny.rollouts(), temperature=0.7)
    assert tiny.logprob_gaps(samples, temperature=0.7).max() < 1e-4
    assert tiny.logprob_gaps(samples).max() > 0.1  # the same tokens at temperature 1
    assert tiny.logprob_gaps(tiny.drawn(), temperature=0.7).max() > 0.1


@pytest.mark.slow  # test_rounded.py has a model of stored bits, nearer to a learner that rounds as it does
def test_bfloat16_stays_near_the_float32_learner():
    # 8 bits of mantissa: a logit of 4 to 8 is off by up to 1/64, and so is every activation before it.
    gaps = tiny.logprob_gaps(tiny.drawn(dtype="bfloat16"))
    assert gaps.mean() < 0.05 and gaps.max() < 0.5


@pytest.mark.slow  # test_engine.py has weights in int8, test_chunks.py and test_routes.py keys and values
def test_int8_stays_near_the_float32_learner():
    # 1/254 of an output's largest weight is the largest error of a weight, of which 16 to 64 are summed.
    # The same share of a head's largest number is that of a key or value.
    gaps = tiny.logprob_gaps(tiny.drawn(weight_dtype="int8", kv_dtype="int8"))
    assert 1e-3 < gaps.mean() < 0.05 and gaps.max() < 0.5


def test_stop_tokens_end_a_response_and_stay_in_it():
    ended = set()
    for response in tiny.drawn().values():
        before, last = response.tokens[:-1], int(response.tokens[-1])
        assert not np.isin(before, tiny.OPTIONS.stop_ids).any()
        assert response.truncated == (last not in tiny.OPTIONS.stop_ids)
        assert len(response.tokens) == len(response.logprobs) == 12 or not response.truncated
        ended |= {last} & {3, 7}
    assert ended == {3, 7}
    truncated = sum(response.truncated for response in tiny.drawn().values())
    assert 10 < truncated < 55


@pytest.mark.parametrize("limit", [1, 5])
def test_the_limit_of_a_session(limit):
    samples = tiny.draw(tiny.rollouts(), limit=limit)
    expected = {address: tiny.cut(response, limit) for address, response in tiny.drawn().items()}
    tiny.assert_same(expected, samples)


def test_a_limit_beyond_the_engine_is_refused():
    message = "max_tokens is 13; the engine was built for 1 to 12"
    with pytest.raises(ValueError, match=message):
        tiny.rollouts().sampler(tiny.params(), stream=0, sampling=SamplingParams(13))
    with pytest.raises(ValueError, match=message):
        list(
            tiny.rollouts().sampler(tiny.params(), stream=0, sampling=lambda _: SamplingParams(13))(
                OpenQueue(tiny.PROMPTS)
            )
        )


def test_a_prompt_is_prefilled_once_for_all_its_rounds():
    rollouts = tiny.rollouts()
    pools = tiny.collect_pools(rollouts, for_all(1, 4, 2, 6))
    assert {pool.rounds for pool in pools} == {4}
    assert rollouts.counts.prefills == 5
    tiny.assert_same(tiny.drawn(), tiny.samples(pools))


def test_counts():
    """Tokens, steps and windows of a session are counted."""
    rollouts = tiny.rollouts()
    samples = tiny.draw(rollouts)
    counts = rollouts.counts
    assert counts.tokens == sum(len(response.tokens) for response in samples.values())
    assert counts.slot_steps % 8 == 0 and counts.slot_utilisation == counts.tokens / counts.slot_steps
    assert counts.windows >= counts.slot_steps / 8 / 4
    assert 0.7 < counts.slot_utilisation <= 1


def test_balance_collects_the_same_pools_from_8_and_64_slots():
    config = types.SimpleNamespace(strategy="balance", group_size=4, samples_per_round=5, max_rounds=4)
    strategy = strategies.build(config)
    few, many = (tiny.collect_pools(tiny.rollouts(**changes), strategy) for changes in ({}, tiny.MANY))
    assert len({pool.rounds for pool in few}) > 1
    assert [pool.rounds for pool in few] == [pool.rounds for pool in many]
    tiny.assert_same(tiny.samples(few), tiny.samples(many))


@pytest.mark.parametrize("changes", [{}, tiny.REPLICAS], ids=["one device", "four devices"])
def test_nothing_compiles_after_the_first_session(changes):
    """All prompts active, some, one, none; one round and many; another stream, limit and order."""
    rollouts = tiny.rollouts(**changes)
    tiny.drawn(**changes)
    compiled = CompileCounter()
    tiny.draw(rollouts, stream=7, limit=3, draws=2)
    tiny.draw(rollouts, prompts=tiny.PROMPTS[4:], draws=1)
    tiny.draw(rollouts, prompts=tiny.PROMPTS[:1], draws=20)
    tiny.collect_pools(rollouts, for_all(4, 1, 1), prompts=tiny.PROMPTS[::-1])
    assert tiny.draw(rollouts, prompts=()) == {}
    assert compiled.since_last() == 0
    jax.jit(lambda x: x * 3 + 5)(1.0)
    assert compiled.since_last() == 1  # the counter counts


def test_pages_released_between_sessions_change_nothing():
    rollouts, compiled = tiny.rollouts(), CompileCounter()
    tiny.drawn()
    compiled.since_last()
    rollouts.release()
    assert rollouts.state is None
    tiny.assert_same(tiny.draw(rollouts), tiny.drawn())
    assert compiled.since_last() == 0


def test_a_barrier_costs_time_and_nothing_else():
    config = types.SimpleNamespace(strategy="balance", group_size=4, samples_per_round=5, max_rounds=4)
    strategy, rollouts, decode_steps, pools = strategies.build(config), tiny.rollouts(), {}, {}
    for barrier in (False, True):
        pools[barrier] = tiny.collect_pools(rollouts, strategy, barrier=barrier)
        decode_steps[barrier] = rollouts.counts.slot_steps
    assert [pool.rounds for pool in pools[False]] == [pool.rounds for pool in pools[True]]
    assert len({pool.rounds for pool in pools[True]}) > 1
    tiny.assert_same(tiny.samples(pools[False]), tiny.samples(pools[True]))
    assert decode_steps[False] < decode_steps[True]


def test_idle_slots_begin_the_next_iteration_under_its_own_addresses():
    """P16 and P17 belong to stream 1; what is drawn of them while P1, P4 and P5 are collected is not drawn again."""
    rollouts, strategy, weights = tiny.rollouts(), strategies.fixed(tiny.DRAWS), tiny.params()
    now, then, prefetch = tiny.PROMPTS[:3], tiny.PROMPTS[3:], Prefetch(tiny.PROMPTS[3:])
    sampling = SamplingParams(tiny.LIMIT)
    first = rollouts.sampler(weights, stream=0, prefetch_stream=1, policy_version=6, sampling=sampling)
    pools = collect(now, first, tiny.verdicts, strategy, carried=CarriedRollouts(prefetch=prefetch))
    tiny.assert_idle(rollouts.state, rollouts.engine.options.pages)
    second = rollouts.sampler(weights, stream=1, policy_version=7, sampling=sampling)
    pools += collect(then, second, tiny.verdicts, strategy, carried=CarriedRollouts(partial=prefetch.partial))
    drawn = tiny.samples(pools)
    versions = {address: response.policy_version for address, response in drawn.items()}
    assert {policy_version for (id, _), policy_version in versions.items() if id in ("p1", "p4", "p5")} == {6}
    assert {policy_version for (id, _), policy_version in versions.items() if id in ("p16", "p17")} == {6, 7}
    of_now = {address: response for address, response in drawn.items() if address[0] in ("p1", "p4", "p5")}
    tiny.assert_same({address: tiny.drawn()[address] for address in of_now}, of_now)
    expected = tiny.draw(tiny.rollouts(), prompts=then, stream=1)
    tiny.assert_same(expected, {address: drawn[address] for address in expected}, prompts=then, stream=1)


def test_dispatches_are_counted():
    rollouts = tiny.rollouts(**tiny.MANY)
    samples = tiny.draw(rollouts)
    counts, tokens = rollouts.counts, sum(len(response.tokens) for response in samples.values())
    # 65 draws of at most 12 tokens in 64 slots: a window, one behind it, and one or two for what is left.
    assert counts.dispatches == counts.windows + 1  # the last one only gives pages back
    assert (counts.prefills, counts.prefilled_tokens) == (5, 0 + 3 + 4 + 15 + 16)
    assert counts.windows <= 5 and counts.tokens == tokens


class OpenQueue(RequestQueue):
    """Requests in a list, and no word about prompts that are done."""

    def __init__(self, prompts, draws=2):
        self.waiting = [Request(prompt, draw) for prompt in prompts for draw in range(draws)]

    def take(self, limit, *, wait=True):
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return taken


def test_prompts_that_the_queue_never_closed_are_closed_with_the_session():
    rollouts = tiny.rollouts()
    sample_fn = rollouts.sampler(tiny.params(), stream=0, sampling=SamplingParams(12))
    responses = [response for finished in sample_fn(OpenQueue(tiny.PROMPTS)) for response in finished]
    assert len(responses) == 10
    tiny.assert_idle(rollouts.state, rollouts.engine.options.pages)


def test_requests_that_can_never_start_are_an_error():
    # P1, P4 and P5 hold 0 + 1 + 1 pages and are never closed; 8 of 13 are kept for a response. P16 needs 4.
    rollouts = tiny.rollouts(**tiny.SCARCE)
    sample_fn = rollouts.sampler(tiny.params(), stream=0, sampling=SamplingParams(12))
    with pytest.raises(RuntimeError, match="1 prompts wait and none can be opened"):
        list(sample_fn(OpenQueue(tiny.PROMPTS[:4])))
    tiny.assert_same(tiny.drawn(), tiny.draw(rollouts))


@pytest.mark.parametrize("verdicts_s", [0.0, 0.05])
def test_a_prompt_that_waits_for_room_waits_for_verdicts(verdicts_s):
    """One row for prompts: the second opens when the first closes, and that takes a verdict which is late.

    By then nothing is in flight. A session that ended there would say that no prompt can be opened.
    """
    options = dataclasses.replace(tiny.OPTIONS, pages=30, open_prompts=1, check_invariants=True)
    rollouts = Rollouts(PageEngine(options))

    def late(pairs):
        time.sleep(verdicts_s)
        return [Verdict(False, 0.0) for _ in pairs]

    with ThreadPoolExecutor(1) as verifier:
        pools = collect(
            tiny.PROMPTS,
            rollouts.sampler(None, stream=0, sampling=SamplingParams(12)),
            lambda pairs: verifier.submit(late, pairs),
            for_all(2, 1),
            CollectOptions(deterministic=False),
        )
    assert [len(pool.responses) for pool in pools] == [3] * 5
    assert rollouts.counts.prefills == 5


def test_prompts_begun_ahead_make_room_for_each_other():
    """Two rows and four slots: p1, and three of the next iteration's, which are taken at once for the idle slots.

    None of those closes, for their second rounds come later: p4 and p5 hold both rows when p1 is done, and p16 waits.
    """
    options = dataclasses.replace(tiny.OPTIONS, slots=4, pages=40, open_prompts=2, check_invariants=True)
    rollouts, prefetch = Rollouts(PageEngine(options)), Prefetch(tiny.PROMPTS[1:])
    strategy = rounds_of({prompt.id: (1,) * 12 if prompt.id == "p1" else (1, 40) for prompt in tiny.PROMPTS})
    pools = collect(
        tiny.PROMPTS[:1],
        rollouts.sampler(None, stream=0, prefetch_stream=2, sampling=SamplingParams(12)),
        tiny.verdicts,
        strategy,
        carried=CarriedRollouts(prefetch=prefetch),
    )
    assert len(pools[0].responses) == 12
    assert [name for name, begun in prefetch.partial.items() if begun.rounds == 1] == ["p4", "p5", "p16"]


def test_a_next_round_is_found_behind_requests_that_have_to_wait():
    # P16 finds no pages beside P1, P4 and P5. Its 40 requests would fill every look into the queue, 6 at a time, and
    # the second rounds stand behind them.
    sizes = {"p1": (1, 1), "p4": (1, 1), "p5": (1, 1), "p16": (40,)}
    pools = tiny.collect_pools(tiny.rollouts(**tiny.SCARCE), rounds_of(sizes), prompts=tiny.PROMPTS[:4])
    assert [len(pool.responses) for pool in pools] == [2, 2, 2, 40]


def test_a_session_broken_off_leaves_nothing_behind():
    rollouts = tiny.rollouts()
    session = rollouts.sampler(tiny.params(), stream=9, sampling=SamplingParams(12))(OpenQueue(tiny.PROMPTS, draws=13))
    next(session)
    tiny.assert_same(tiny.drawn(), tiny.draw(rollouts))
    session.close()
    tiny.assert_same(tiny.drawn(), tiny.draw(rollouts))


@settings(max_examples=15)
@given(data=st.data(), limit=st.integers(1, 12), changes=st.sampled_from([{}, tiny.SCARCE]))
def test_any_stream_of_requests_is_answered(data, limit, changes):
    """Prompts in any order, rounds of any size: nothing is lost or doubled, and every answer is that of its address."""
    prompts = data.draw(st.lists(st.sampled_from(tiny.PROMPTS), min_size=1, unique_by=lambda prompt: prompt.id))
    rounds = st.lists(st.integers(1, 11), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) <= tiny.DRAWS)
    sizes = {prompt.id: data.draw(rounds) for prompt in prompts}
    rollouts = tiny.rollouts(**changes)
    samples = tiny.samples(tiny.collect_pools(rollouts, rounds_of(sizes), prompts=prompts, limit=limit))
    assert samples.keys() == {(id, draw) for id, rounds in sizes.items() for draw in range(sum(rounds))}
    assert rollouts.counts.prefills == len(prompts)
    tiny.assert_same({address: tiny.cut(tiny.drawn()[address], limit) for address in samples}, samples)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_engine_answers_any_stream_of_requests(seed):
    """Random sizes of everything, down to the fewest pages, and random prompts: as the standard engine answers."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 2, 3, 5, 7, 16, 32]))
    pages = num_pages(17, page_size) + num_pages(17 + 12, page_size) + 1 + int(rng.choice([0, 0, 1, 2, 5]))
    slots, open_prompts, prefill_tokens = (int(rng.integers(1, most + 1)) for most in (11, 6, 30))
    rollouts = tiny.rollouts(
        page_size=page_size, pages=pages, slots=slots, open_prompts=open_prompts, prefill_tokens=prefill_tokens,
        window=int(rng.choice([1, 2, 3, 7, 16])),
    )  # fmt: skip
    for stream in range(4):
        lengths = rng.integers(1, 18, size=rng.integers(1, 14))
        prompts = [
            Prompt(f"p{index}", "", "", rng.integers(0, 24, length).astype(np.int32))
            for index, length in enumerate(lengths)
        ]
        strategy = rounds_of({prompt.id: rng.integers(1, 9, rng.integers(1, 4)).tolist() for prompt in prompts})
        session = dict(prompts=prompts, stream=stream, limit=int(rng.integers(1, 13)))
        one, other = (
            tiny.samples(tiny.collect_pools(each, strategy, **session)) for each in (rollouts, tiny.rollouts())
        )
        tiny.assert_same(one, other, prompts=prompts, stream=stream)

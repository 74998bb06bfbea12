"""The simulated engine: schedules worked out by hand, and the real engine's very counts."""

import dataclasses

import numpy as np
import pytest

from bench.simulation import Cost, SimulatedEngine
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CollectOptions, collect
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.rewards import cipher
from reinforce_ada_jax.sampling import invariants
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.types import Prompt, Verdict
from tests import running
from tests.sampling import tiny

OPTIONS = dataclasses.replace(
    tiny.OPTIONS, slots=2, window=4, page_size=4, pages=20, open_prompts=2, prefill_tokens=8, max_response_tokens=20,
    stop_ids=(), check_invariants=True,
)  # fmt: skip
COUNTED = ("tokens", "slot_steps", "windows", "prefills", "dispatches")


def prompt(name: str, tokens: int = 1) -> Prompt:
    return Prompt(name, "", "", np.zeros(tokens, np.int32))


def simulated(lengths, cost=Cost(), strategy=None, tokens=1, limit=None, correct=lambda address: False, **changes):  # noqa: B008
    """One session; `lengths` by (prompt, draw). Responses are limited to their own length unless `limit` is given."""
    engine = SimulatedEngine(dataclasses.replace(OPTIONS, **changes), cost, lengths)
    rollouts = Rollouts(engine)
    prompts = [prompt(name, tokens) for name in dict.fromkeys(name for name, _ in lengths)]
    sample_fn = rollouts.sampler(
        None, stream=0,
        sampling=lambda request: SamplingParams(limit or lengths[request.prompt.id, request.draw]),
    )  # fmt: skip
    strategy = strategy or strategies.fixed(len(lengths) // len(prompts))

    def verify(pairs):
        return [Verdict(correct((prompt.id, response.draw)), 0.0) for prompt, response in pairs]

    pools = collect(prompts, sample_fn, verify, strategy)
    (state,) = engine.fetch(rollouts.state)
    invariants.check_idle(engine.options, state)
    return engine, rollouts.counts, pools


def test_three_responses_in_two_slots():
    # Window 0: a (3 tokens) and b (5) start; after step 3 c (2) takes the slot of a; step 4 ends the window.
    # Window 1: b and c have 1 token left: one step. Window 2 was dispatched before that was known: no step.
    # One more gives the prompt's pages back and isn't read: 4 programs.
    lengths = {("p", 0): 3, ("p", 1): 5, ("p", 2): 2}
    engine, counts, _ = simulated(lengths, Cost(decode_step=1.0))
    assert [getattr(counts, name) for name in COUNTED] == [10, 10, 3, 1, 4]
    assert counts.slot_utilisation == 1.0
    assert engine.seconds == 5.0
    # A prompt of one token: token t of a response, from 0, sees 1 + t. 1+2+3, 1+2+3+4+5, 1+2.
    assert simulated(lengths, Cost(cached_token=1.0))[0].seconds == 6 + 15 + 3
    assert simulated(lengths, Cost(window=1.0))[0].seconds == 4
    # A prompt of one token needs no prefill; of 18, of which 17 are prefilled 8 at a time, three chunks.
    assert simulated(lengths, Cost(prefill=1.0))[0].seconds == 0
    sizes = dict(tokens=18, max_prompt_tokens=18)
    assert simulated(lengths, Cost(prefill=1.0), **sizes)[0].seconds == 3


def test_a_slot_left_alone_is_idle():
    # 1 and 7 tokens: the second slot decodes alone for six decode_steps. 8 of 2 * 7 slot-steps.
    _, counts, _ = simulated({("p", 0): 1, ("p", 1): 7}, window=64)
    assert (counts.tokens, counts.slot_steps) == (8, 14)


def test_a_window_ends_early_for_the_host():
    # Four slots, window 64, two rounds of two for p; q has two long responses. After step 2 the queue is empty, two
    # slots of four (a quarter is enough) idle and one ended: the window ends. Were there no early end, the second
    # round would wait until q's 20 tokens are through.
    lengths = {("p", 0): 2, ("p", 1): 2, ("q", 0): 20, ("q", 1): 20, ("p", 2): 2, ("p", 3): 2, ("q", 2): 1, ("q", 3): 1}
    sizes = dict(p=(2, 2, 0), q=(2, 0))
    strategy = strategies.Strategy(
        next_draws=lambda record: sizes[record.prompt.id][record.rounds],
        met=lambda _: True, keep=strategies.keep_all, max_draws=4, max_kept=4,
    )  # fmt: skip
    engine, counts, pools = simulated(lengths, Cost(decode_step=1.0), strategy=strategy, slots=4, window=64)
    # The second window was under way when p's first round was read. It ends early only when some response ends, so
    # it decodes q's remaining 18 tokens, and p's second round begins after it: the price of one window of lag.
    assert [len(pool.responses) for pool in pools] == [4, 2]
    assert engine.seconds == 2 + 18 + 2
    assert counts.tokens == 48 and counts.slot_steps == 4 * 22


def test_the_head_of_the_queue_waits_for_pages_and_nobody_passes_it():
    # A prompt of 5 tokens: one page shared. Reserved for 12 tokens, a response has ceil(17 / 4) - 1 = 4 pages of its
    # own. 7 pages less the null page less the shared one leave room for one response at a time: 3 * 3 decode_steps.
    sizes = dict(tokens=5, limit=12, max_prompt_tokens=5, max_response_tokens=12)
    _, counts, _ = simulated({("p", draw): 3 for draw in range(3)}, pages=7, **sizes)
    assert (counts.tokens, counts.slot_steps) == (9, 18)
    # With 10 there is room for two: 3 decode_steps, then 3 decode_steps for the third alone.
    _, counts, _ = simulated({("p", draw): 3 for draw in range(3)}, pages=10, **sizes)
    assert (counts.tokens, counts.slot_steps) == (9, 12)


def test_the_host_works_while_a_window_is_under_way():
    # 12 tokens in windows of 4 steps: three windows, one more dispatched before the third was read, and the one that
    # gives the pages back. A host that takes 3 s is waited for at the first and at the last; one that takes 5 s is
    # slower than the device, and each of the five waits for it.
    lengths = {("p", 0): 12}
    assert simulated(lengths, Cost(decode_step=1.0, host=3.0))[0].seconds == 3 + 12 + 3
    assert simulated(lengths, Cost(decode_step=1.0, host=5.0))[0].seconds == 5 * 5


def test_a_limit_cuts_and_a_shorter_response_is_no_truncation():
    _, _, pools = simulated({("p", 0): 9, ("p", 1): 4}, limit=4)
    assert [response.truncated for response in pools[0].responses] == [True, True]
    _, _, pools = simulated({("p", 0): 9, ("p", 1): 3}, limit=4)
    assert [response.truncated for response in pools[0].responses] == [True, False]


def counts_of(rollouts, lengths, strategy, **how):
    """Counts of a session in which a draw's verdict follows from its place alone."""
    sample_fn = rollouts.sampler(
        tiny.params() if isinstance(rollouts.engine, Engine) else None, stream=0,
        sampling=lambda request: SamplingParams(lengths[request.prompt.id, request.draw]),
    )  # fmt: skip

    def verify(pairs):
        places = [lengths[prompt.id, response.draw] + response.draw for prompt, response in pairs]
        return [Verdict(place % 3 == 0, 0.0) for place in places]

    collect(tiny.PROMPTS, sample_fn, verify, strategy, CollectOptions(**how))
    return {name: getattr(rollouts.counts, name) for name in COUNTED}


@pytest.mark.slow  # test_invariants.py has the counts of the model of a window, too
def test_the_real_engine_counts_the_same():
    # 10 pages of prompts and the null page leave 7 for responses. The longest response takes 4.
    real = tiny.rollouts(stop_ids=(-1, -1), pages=18)
    random = np.random.default_rng(0)
    lengths = {(prompt.id, draw): int(random.integers(1, 13)) for prompt in tiny.PROMPTS for draw in range(32)}
    model = Rollouts(SimulatedEngine(real.engine.options, Cost(), lengths))
    in_rounds = strategies.Strategy(
        next_draws=lambda record: 0 if record.correct >= 5 or record.rounds == 4 else 8,
        max_draws=32, met=lambda _: True, keep=strategies.keep_all, max_kept=32,
    )  # fmt: skip
    for strategy, barrier in ((strategies.fixed(13), False), (in_rounds, False), (in_rounds, True)):
        expected = counts_of(real, lengths, strategy, barrier=barrier)
        assert expected["tokens"] < expected["slot_steps"]
        assert counts_of(model, lengths, strategy, barrier=barrier) == expected


def test_open_prompts_leave_pages_for_the_responses_of_all_slots():
    # Six rounds of two draws for 60 prompts of 8 pages, in 16 slots with 3 to 4 pages of their own. 8 prompts keep all
    # slots busy, with 128 pages. 20 prompts, all that may be open, would leave pages for four slots.
    lengths = {(f"p{index}", draw): 12 for index in range(60) for draw in range(12)}
    two_at_a_time = strategies.Strategy(
        next_draws=lambda record: 0 if record.rounds == 6 else 2,
        max_draws=12, met=lambda _: True, keep=strategies.keep_all, max_kept=12,
    )  # fmt: skip
    sizes = dict(tokens=33, max_prompt_tokens=33, slots=16, open_prompts=20, pages=175, prefill_tokens=64)
    _, counts, pools = simulated(lengths, strategy=two_at_a_time, **sizes)
    assert [len(pool.responses) for pool in pools] == [12] * 60
    assert counts.slot_utilisation > 0.9  # 0.55 if prompts take all pages but one response's


@pytest.mark.slow  # test_the_real_engine_counts_the_same compares the counts of a smaller engine
def test_utilisation_of_the_tiny_run():
    """The first iteration of configs/tiny.py, with its stop tokens, in the simulator."""
    config = running.tiny()
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    prompts = components.prompts(config.data.prompts, config)[: config.collection.prompts_per_iteration]
    strategy = strategies.build(config.collection)
    sampling = SamplingParams(config.sampling.max_response_tokens)
    params = components.engine.decode_weights(huggingface.load(components.folder, components.mesh)[1])

    def verify(pairs):
        return [cipher.grade(components.tokenizer.decode(response.tokens), prompt.answer) for prompt, response in pairs]

    real = Rollouts(components.engine)
    pools = collect(prompts, real.sampler(params, stream=0, sampling=sampling), verify, strategy)

    lengths = {(pool.prompt.id, r.draw): len(r.tokens) for pool in pools for r in pool.responses}
    verdicts = {pool.prompt.id: pool.verdicts for pool in pools}
    simulated = Rollouts(SimulatedEngine(components.engine.options, Cost(), lengths))
    collect(
        prompts, simulated.sampler(None, stream=0, sampling=sampling),
        lambda pairs: [verdicts[prompt.id][response.draw] for prompt, response in pairs], strategy,
    )  # fmt: skip
    print(real.counts, simulated.counts)
    assert simulated.counts.slot_utilisation == pytest.approx(real.counts.slot_utilisation, abs=0.05)
    assert {n: getattr(simulated.counts, n) for n in COUNTED} == {n: getattr(real.counts, n) for n in COUNTED}

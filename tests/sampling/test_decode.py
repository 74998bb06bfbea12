"""Decoding in single steps, by the programs of the standard engine: 8 slots, windows of 4 tokens, pages of 4."""

import jax
import numpy as np
import pytest

from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.admission import Lengths
from reinforce_ada_jax.sampling.state import RUNNING, STOPPED, TRUNCATED, Requests, SamplingParams
from reinforce_ada_jax.sampling.window_inputs import OpenedPrompt, window_inputs
from tests.sampling import tiny

P1, P4, P5, P16, P17 = tiny.PROMPTS


@pytest.fixture(scope="module")
def engine():
    return tiny.rollouts().engine


def opened(engine, prompts, rows=None, state=None):
    """A state with prompts open and prefilled, in rows 0, 1, ... unless named."""
    state = engine.init_decode_state() if state is None else state
    rows = list(range(len(prompts))) if rows is None else rows
    return window(engine, state, opened=[OpenedPrompt(row, p.tokens) for row, p in zip(rows, prompts, strict=True)])[0]


def inputs(engine, *entries, first_output=0, closing=(), opened=(), reserve=0, cancelled=()):
    """Requests (prompt, draw, limit, prompt row), to be answered in output rows from `first_output` on."""
    queued = [
        Requests(
            prompt_row=row, output_row=first_output + index, park_row=engine.options.open_prompts,
            sampling=SamplingParams(limit).as_arrays, key=token_lib.address(0, prompt.id, draw),
        )
        for index, (prompt, draw, limit, row) in enumerate(entries)
    ]  # fmt: skip
    survivors = Lengths(engine.options.table_width).survivors()
    closing = np.isin(np.arange(5), closing)
    return window_inputs(engine.options, queued, closing, opened, reserve, survivors, cancelled)


def window(engine, state, *entries, **how):
    """One window: the state after it, and its outputs, whose new tokens end the responses that the device has."""
    state, outputs = engine.decode_window(tiny.params(), state, [inputs(engine, *entries, **how)])
    new, whole = jax.device_get((outputs.rows, state.outputs))
    for row, (start, length) in enumerate(zip(new.start, new.length, strict=True)):
        assert 0 <= length - start <= engine.options.window
        for part, all_parts in ((new.tokens, whole.tokens), (new.logprobs, whole.logprobs)):
            assert part[row, : length - start].tolist() == all_parts[row, start:length].tolist()
    return state, outputs


def decode(engine, state, *entries, **how):
    """Windows until no slot is active; {output row: (tokens, logprobs, status)}."""
    finished, had = {}, jax.device_get(state.outputs)
    tokens, logprobs = had.tokens.copy(), had.logprobs.copy()
    while True:
        state, outputs = window(engine, state, *entries, **how)
        entries, how, new = (), {}, jax.device_get(outputs.rows)
        for row in np.flatnonzero(new.length > new.start):
            start, length = new.start[row], new.length[row]
            tokens[row, start:length] = new.tokens[row, : length - start]
            logprobs[row, start:length] = new.logprobs[row, : length - start]
        for row in np.flatnonzero(new.status != RUNNING):
            assert row not in finished
            finished[int(row)] = (*(x[row, : new.length[row]].copy() for x in (tokens, logprobs)), new.status[row])
        if not state.slots.active.any():
            return state, finished


def available(state):
    return int(state.pool.available)


def assert_response(finished, response):
    """The tokens, logprobs and status of an answer are those of `response`."""
    tokens, logprobs, status = finished
    np.testing.assert_array_equal(tokens, response.tokens)
    np.testing.assert_allclose(logprobs, response.logprobs, atol=1e-5)
    assert status == (TRUNCATED if response.truncated else STOPPED)


def test_every_request_has_its_own_limit(engine):
    entries = [(P5, draw, limit, 0) for draw, limit in enumerate(range(1, 13))]
    _, finished = decode(engine, opened(engine, [P5]), *entries)
    assert sorted(finished) == list(range(12))
    for row, (_, draw, limit, _) in enumerate(entries):
        assert_response(finished[row], tiny.cut(tiny.drawn()["p5", draw], limit))


def test_a_stop_token_in_the_last_allowed_place_is_no_truncation(engine):
    stopped = next(r for r in tiny.drawn().values() if r.prompt_id == "p5" and 2 < len(r.tokens) < 12)
    length = len(stopped.tokens)
    entries = [(P5, stopped.draw, limit, 0) for limit in (length - 1, length, length + 1)]
    _, finished = decode(engine, opened(engine, [P5]), *entries)
    assert [status for _, (_, _, status) in sorted(finished.items())] == [TRUNCATED, STOPPED, STOPPED]
    assert [len(tokens) for _, (tokens, _, _) in sorted(finished.items())] == [length - 1, length, length]


def test_prompts_hold_pages_for_all_but_their_last_token(engine):
    state = engine.init_decode_state()
    before = available(state)
    # 0, 3, 4, 15 and 16 tokens in pages of 4.
    for row, (prompt, pages) in enumerate(zip(tiny.PROMPTS, (0, 1, 1, 4, 4), strict=True)):
        state = opened(engine, [prompt], [row], state)
        before -= pages
        assert available(state) == before
    assert state.prompts.length.tolist() == [1, 4, 5, 16, 17]
    assert state.prompts.last_token.tolist() == [prompt.tokens[-1] for prompt in tiny.PROMPTS]
    state, outputs = window(engine, state, closing=range(5))
    tiny.assert_idle(state, engine.options.pages)
    assert int(outputs.free_pages) == engine.options.pages - 1


def test_a_slot_holds_the_pages_that_its_tokens_fill(engine):
    # After a window of 4 tokens P5 has filled positions 4 to 7, one page of its own; P16 15 to 18, two. Both run on.
    draws = [next(r.draw for r in tiny.drawn().values() if r.prompt_id == id and r.truncated) for id in ("p5", "p16")]
    state = opened(engine, [P5, P16])
    before = available(state)
    state, outputs = window(engine, state, (P5, draws[0], 12, 0), (P16, draws[1], 12, 1))
    assert before - available(state) == 1 + 2
    assert (int(outputs.counts.decode_steps), int(outputs.counts.busy)) == (4, 8)
    state, _ = decode(engine, state)
    assert available(state) == before


def test_closing_one_prompt_leaves_the_others_running(engine):
    """In one window P17 is closed and its row and pages are taken over by P16, while draws of P5 are under way."""
    responses = tiny.drawn()
    running = [r.draw for r in responses.values() if r.prompt_id == "p5" and len(r.tokens) > 4][:3]
    state = opened(engine, [P5, P17])
    state, _ = window(engine, state, *[(P5, draw, 12, 0) for draw in running])
    held = available(state)
    state, rest = window(engine, state, closing=[1], opened=[OpenedPrompt(1, P16.tokens)])
    assert available(state) == held + 4 - 4 - 3  # three responses took their next page
    assert not (rest.rows.status != RUNNING).any()
    # The answers of P5 are in output rows 0 to 2: those of P16 go to 3 and on.
    state, finished = decode(engine, state, *[(P16, draw, 12, 1) for draw in range(6)], first_output=3)
    assert sorted(finished) == list(range(9))
    for row, (id, draw) in enumerate([("p5", draw) for draw in running] + [("p16", draw) for draw in range(6)]):
        assert_response(finished[row], responses[id, draw])
    tiny.assert_idle(window(engine, state, closing=[0, 1])[0], engine.options.pages)


def test_prompts_with_a_common_beginning_share_its_pages(engine):
    """Three prompts are opened at once, each with pages of the one before; the first two are closed before it draws."""
    state, before = engine.init_decode_state(), available(engine.init_decode_state())
    chain = [OpenedPrompt(0, P17.tokens), OpenedPrompt(1, P17.tokens, 0, 3, 12), OpenedPrompt(2, P17.tokens, 1, 3, 12)]
    state, _ = window(engine, state, opened=chain)
    assert available(state) == before - 4 - 1 - 1
    state, _ = window(engine, state, closing=[0])
    assert available(state) == before - 3 - 1 - 1
    draws = range(6)
    state, finished = decode(engine, state, *[(P17, draw, 12, 2) for draw in draws], closing=[1])
    for draw in draws:
        assert_response(finished[draw], tiny.drawn()["p17", draw])
    assert available(state) == before - 4
    tiny.assert_idle(window(engine, state, closing=[2])[0], engine.options.pages)


def test_a_window_without_work_takes_no_turn(engine):
    _, outputs = window(engine, opened(engine, [P5]))
    assert (int(outputs.counts.decode_steps), int(outputs.counts.busy), int(outputs.waiting)) == (0, 0, 0)


def test_a_window_ends_when_the_queue_is_dry_and_a_quarter_of_the_slots_idle(engine):
    # One draw in 8 slots, of 2 tokens at most: after 2 decode_steps of 4 the host can do better than wait.
    draw = next(r.draw for r in tiny.drawn().values() if r.prompt_id == "p5" and len(r.tokens) > 8)
    state, outputs = window(engine, opened(engine, [P5]), (P5, draw, 2, 0), (P5, draw, 12, 0))
    assert (int(outputs.counts.decode_steps), int(outputs.counts.busy)) == (2, 4)
    # Nothing finished yet: idle slots alone end no window.
    _, outputs = window(engine, state)
    assert (int(outputs.counts.decode_steps), int(outputs.counts.busy)) == (4, 4)


@pytest.mark.parametrize(("running", "busy"), [(7, 7 + 7 + 8 + 8), (3, 4 * 4)])
def test_decoding_waits_for_a_prompt_only_where_many_slots_are_idle(engine, running, busy):
    """16 tokens are prefilled in two chunks: beside seven slots that decode, but before three of eight go on."""
    draws = [r.draw for r in tiny.drawn().values() if r.prompt_id == "p5" and len(r.tokens) > 8][:running]
    last = next(r.draw for r in tiny.drawn().values() if r.prompt_id == "p17" and len(r.tokens) > 4)
    assert len(draws) == running
    state, _ = window(engine, opened(engine, [P5]), *[(P5, draw, 12, 0) for draw in draws])
    state, outputs = window(engine, state, (P17, last, 12, 1), first_output=8, opened=[OpenedPrompt(1, P17.tokens)])
    assert (int(outputs.counts.decode_steps), int(outputs.counts.busy)) == (4, busy)
    state, finished = decode(engine, state)
    assert_response(finished[8], tiny.drawn()["p17", last])


def test_requests_wait_on_the_device_from_window_to_window(engine):
    """20 draws for 8 slots, then 12 more while those wait: the ring of 32 goes round; nothing is lost or doubled."""
    state, outputs = window(engine, opened(engine, [P5, P16]), *[(P5, draw % 13, 12, 0) for draw in range(20)])
    assert 0 < int(outputs.waiting) <= 12
    first = {row: None for row in np.flatnonzero(outputs.rows.status != RUNNING)}
    state, finished = decode(engine, state, *[(P16, draw, 12, 1) for draw in range(12)], first_output=20)
    assert first.keys() | finished.keys() == set(range(32)) and not first.keys() & finished.keys()
    for row, answer in finished.items():
        assert_response(answer, tiny.drawn()["p5", row % 13] if row < 20 else tiny.drawn()["p16", row - 20])


def test_a_cancelled_response_ends_with_its_next_token_wherever_it_is(engine):
    """Nine long responses over 8 slots: after a window of 4 tokens one that decodes and the one that waits end."""
    long = next(r for r in tiny.drawn().values() if r.prompt_id == "p5" and r.truncated)
    entries = [(P5, long.draw, 12, 0)] * 9
    state, outputs = window(engine, opened(engine, [P5]), *entries)
    assert outputs.rows.length.tolist()[:9] == [4] * 8 + [0]  # the ninth has not begun
    state, outputs = window(engine, state, cancelled=[0, 8, 20])
    rows, whole = jax.device_get((outputs.rows, state.outputs))
    assert np.flatnonzero(rows.status != RUNNING).tolist() == [0, 8]
    for row, start, length in ((0, 4, 5), (8, 0, 1)):
        assert (rows.start[row], rows.length[row]) == (start, length)
        assert_response((whole.tokens[row, :length], whole.logprobs[row, :length], rows.status[row]),
                        tiny.cut(long, length))  # fmt: skip
    state, finished = decode(engine, state)
    assert [len(tokens) for tokens, _, _ in finished.values()] == [12] * 7
    state, outputs = window(engine, state, *entries)
    assert outputs.rows.length.tolist()[:9] == [4] * 8 + [0]  # nor does it show what the row had before
    decode(engine, state)


def test_an_evicted_response_is_reported_again_from_its_first_token(engine):
    """Two responses have four tokens each when no page is left for the fifth: the first one gives way."""
    draws = [r.draw for r in tiny.drawn().values() if r.prompt_id == "p5" and len(r.tokens) > 8][:2]
    state, _ = window(engine, opened(engine, [P5]), *[(P5, draw, 12, 0) for draw in draws])
    state, outputs = window(engine, state, reserve=available(state))
    assert int(outputs.counts.redone) == 4
    assert [outputs.rows.start.tolist()[:2], outputs.rows.length.tolist()[:2]] == [[0, 4], [0, 8]]
    state, outputs = window(engine, state)
    assert [outputs.rows.start.tolist()[0], outputs.rows.length.tolist()[0]] == [0, 4]
    _, finished = decode(engine, state)
    assert_response(finished[0], tiny.drawn()["p5", draws[0]])


def test_new_responses_leave_the_reserved_pages(engine):
    # A draw of P5 may take three pages of its own. With all but 8 pages reserved two of three begin.
    state = opened(engine, [P5])
    draws = [r.draw for r in tiny.drawn().values() if r.prompt_id == "p5" and len(r.tokens) > 4][:3]
    reserve = available(state) - 8
    state, outputs = window(engine, state, *[(P5, draw, 12, 0) for draw in draws], reserve=reserve)
    assert (int(outputs.counts.busy), int(outputs.waiting)) == (2 * 4, 1)
    assert int(outputs.free_pages) == reserve + 8 - 2
    # The third begins as soon as nothing is reserved.
    _, outputs = window(engine, state)
    assert int(outputs.waiting) == 0


@pytest.mark.parametrize("length", [0, 18])
def test_prompts_that_do_not_fit_are_refused(engine, length):
    with pytest.raises(ValueError, match=f"a prompt has {length} tokens, and the engine takes 1 to 17"):
        engine.options.check_prompt(length)

"""Random streams of requests through the host's real code: pages, rows and requests are conserved, and none is lost.

Most run on `page_engine.PageEngine`, which does page for page what the compiled one does; that it does is tested here
on streams that both get.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterable

import jax
import numpy as np
import pytest

from reinforce_ada_jax.sampling import invariants
from reinforce_ada_jax.sampling.invariants import BrokenInvariant
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.rows import Rows
from reinforce_ada_jax.sampling.scheduler import Scheduler
from reinforce_ada_jax.sampling.state import RUNNING, STOPPED, Outputs, SamplingParams, WindowCounts, WindowOutputs
from reinforce_ada_jax.sampling.token import address
from reinforce_ada_jax.types import Request
from tests.sampling import tiny
from tests.sampling.page_engine import VOCABULARY, PageEngine, given, response_to
from tests.sampling.request_streams import RandomStream, random_options

STREAM, PREFETCH_STREAM = 4, 6


def session(rollouts: Rollouts, stream: RandomStream, yields: int | None = None) -> None:
    """One call of `sample_fn`, ended after `yields` yields."""
    params = tiny.params_on(rollouts.engine.mesh) if hasattr(rollouts.engine, "mesh") else None
    sample_fn = rollouts.sampler(
        params,
        stream=STREAM,
        prefetch_stream=PREFETCH_STREAM,
        sampling=lambda request: SamplingParams(stream.limit(request)),
    )
    running = sample_fn(stream)
    for number, responses in enumerate(running):
        if number == yields:
            running.close()
            return
        stream.receive(responses)
    stream.finish()


def check_responses(stream: RandomStream, longest: int) -> None:
    """Each is that of its own address, under its own limit."""
    for each in stream.rounds:
        for draw in range(each.drawn):
            response = stream.responses.get((each.prompt.id, draw))
            if response is None:  # never taken: prefetch, or the session was broken off
                continue
            words = address(PREFETCH_STREAM if each.prefetch else STREAM, each.prompt.id, draw)
            limit = 1 + (7 * draw + len(each.prompt.tokens)) % longest
            tokens, truncated = response_to(words, limit, longest)
            assert (response.tokens.tolist(), response.truncated) == (tokens, truncated), (each.prompt.id, draw)


def run_streams(seed: int) -> tuple[int, int, int, int]:
    """One to three streams on an engine of random sizes; how many, and responses, tokens redone, tokens shared."""
    rng = np.random.default_rng(seed)
    rollouts = Rollouts(PageEngine(random_options(rng), replicas=int(rng.integers(1, 4))))
    streams, responses, redone, shared = int(rng.integers(1, 4)), 0, 0, 0
    for number in range(streams):
        stream = RandomStream(rng, rollouts.engine.options, VOCABULARY, prefix=f"s{number}p")
        broken_off = int(rng.integers(0, 6)) if rng.random() < 0.2 else None
        session(rollouts, stream, broken_off)
        check_responses(stream, rollouts.engine.options.max_response_tokens)
        responses += len(stream.responses)
        redone += rollouts.counts.redone
        shared += rollouts.counts.shared_tokens
    return streams, responses, redone, shared


def run_seeds(seeds: Iterable[int]) -> tuple[int, int, int, int]:
    """`run_streams` for each; a failure names its seed."""
    counts = []
    for seed in seeds:
        try:
            counts.append(run_streams(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}: tests.sampling.test_invariants.run_streams({seed}) does it again")
            raise
    streams, responses, redone, shared = map(sum, zip(*counts, strict=True))
    return streams, responses, redone, shared


def test_random_streams():
    """Random streams on random engines are answered, each under its own address."""
    streams, responses, redone, shared = run_seeds(range(12))
    assert streams >= 20 and responses > 500 and redone > 40 and shared > 20


@pytest.mark.slow
def test_ten_thousand_random_streams():
    streams, responses, redone, shared = run_seeds(range(12, 5_130))
    assert streams >= 10_000 and responses > 150_000 and redone > 5_000 and shared > 5_000


# ---- the compiled engine ---------------------------------------------------------------------------------------------


def comparable(state, outputs) -> dict:
    """State of a replica that both engines have, without stale values in rows that nobody holds."""
    queue, slots = state.queue, state.slots
    waiting = np.arange(queue.head, queue.end) % len(queue.requests.prompt_row)
    ended, new = np.flatnonzero(outputs.rows.status), np.flatnonzero(outputs.rows.length > outputs.rows.start)
    rows = lambda x, at: np.asarray(x)[at].tolist()  # noqa: E731
    used = np.arange(slots.table.shape[1]) < slots.used[:, None]
    requested = queue.requests.prompt_row, queue.requests.output_row, queue.requests.sampling.max_tokens
    return dict(
        free=state.pool.stack[: state.pool.available].tolist(),
        prompts=[x.tolist() for x in (state.prompts.length, state.prompts.cached)],
        waiting=[rows(x, waiting) for x in requested],
        active=slots.active.tolist(),
        slots=[
            rows(x, slots.active)
            for x in (
                slots.position,
                slots.count,
                slots.requests.output_row,
                slots.shared,
                slots.used,
                slots.requests.sampling.max_tokens,
            )
        ],
        tables=rows(np.where(used, slots.table, 0), slots.active),
        ended=ended.tolist(),
        new=[new.tolist(), rows(outputs.rows.start, new), rows(outputs.rows.length, new)],
        counts=[int(x) for x in (outputs.waiting, outputs.free_pages, *jax.tree.leaves(outputs.counts))],
    )


def recorded(rollouts: Rollouts, stream: RandomStream, cancelled: float = 0.0) -> tuple[list, dict[bytes, np.ndarray]]:
    """State after each window of a session, replica by replica, and the tokens drawn under each address.

    A share of the output rows is cancelled with each window. New tokens must make up the rows of the device.
    """
    engine, windows, rng = rollouts.engine, [], np.random.default_rng(0)
    decode_window, addresses, tokens = engine.decode_window, {}, {}
    size = engine.replicas, engine.options.output_rows, engine.options.max_response_tokens
    texts, logprobs = np.zeros(size, np.int32), np.zeros(size, np.float32)
    if hasattr(rollouts.state, "outputs"):  # of a session before
        had = rollouts.state.outputs
        texts[:], logprobs[:] = (np.asarray(x).reshape(size) for x in (had.tokens, had.logprobs))

    def put_together(replica, new):
        for row in np.flatnonzero(new.length > new.start).tolist():
            start, length = new.start[row], new.length[row]
            texts[replica, row, start:length] = new.tokens[row, : length - start]
            logprobs[replica, row, start:length] = new.logprobs[row, : length - start]
        for row in np.flatnonzero(new.status).tolist():
            tokens[addresses[replica, row]] = texts[replica, row, : new.length[row]].copy()

    def check_whole(outputs):
        for found, has in ((texts, outputs.tokens), (logprobs, outputs.logprobs)):
            present = np.arange(size[2]) < np.asarray(outputs.length).reshape(*size[:2], 1)
            np.testing.assert_array_equal(found[present], np.asarray(has).reshape(size)[present])

    def recording(params, state, all_inputs, vote):
        all_inputs = [each.replace(cancelled=rng.random(len(each.cancelled)) < cancelled) for each in all_inputs]
        for replica, each in enumerate(all_inputs):
            for row, words in zip(each.requests.output_row[: each.count].tolist(), each.requests.key, strict=False):
                addresses[replica, row] = words.tobytes()
        state, outputs = decode_window(params, state, all_inputs, vote)
        of_replicas = engine.fetch_outputs(outputs)
        for replica, each in enumerate(of_replicas):
            put_together(replica, each.rows)
        if hasattr(state, "outputs"):
            check_whole(state.outputs)
        windows.append([comparable(*both) for both in zip(engine.fetch(state), of_replicas, strict=True)])
        return state, outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "decode_window", recording)
        session(rollouts, stream)
    return windows, tokens


FEW = [tiny.PAYING]
MORE = [
    *(tiny.SCARCE, tiny.REPLICAS),  # test_rollouts.py has their samples
    dict(pages=30),
    dict(slots=1, window=2, pages=15, open_prompts=2),
    dict(slots=17, window=5, pages=60, page_size=3, open_prompts=7),
]


@pytest.mark.parametrize(
    ("sizes", "seeds"),
    [(sizes, range(1)) for sizes in FEW]
    + [pytest.param(sizes, range(16), marks=pytest.mark.slow) for sizes in FEW + MORE],
    ids=str,
)
def test_the_compiled_engine_does_the_same_page_for_page(sizes, seeds):
    """All invariants looked after, a stream for each seed, against the plain engine: every window leaves the same.

    Responses end at their limits only, of which each has its own, so both engines' have the same lengths. In half of
    the streams random responses are cancelled. The plain engine answers with the tokens that the compiled one drew.
    """
    real = tiny.rollouts(stop_ids=(-1, -1), check_invariants=True, **sizes)
    options = real.engine.options
    for seed in seeds:
        streams = [RandomStream(np.random.default_rng(seed), options, vocabulary=24) for _ in range(3)]
        cancelled = 0.1 * (seed % 2)
        _, tokens = recorded(real, streams[2])
        real.state = None  # a new one: after a session the free pages lie in another order
        compiled, cut = recorded(real, streams[0], cancelled)
        tokens = cut | tokens  # responses of the next iteration may be drawn only where others were cancelled
        plain = Rollouts(PageEngine(options, real.engine.replicas, given(tokens)))
        plain, _ = recorded(plain, streams[1], cancelled)
        assert len(compiled) == len(plain), f"seed {seed}"
        for number, (one, other) in enumerate(zip(compiled, plain, strict=True)):
            assert one == other, f"seed {seed}, window {number}"


# ---- the checks themselves -------------------------------------------------------------------------------------------


@functools.cache
def in_the_middle() -> tuple:
    """A session's scheduler, the newest state with responses waiting and decoding, and the outputs not read."""
    options = dataclasses.replace(tiny.OPTIONS, pages=40, slots=3, open_prompts=4, window=2, check_invariants=True)
    found, check = [], Scheduler.check

    def watching(scheduler, state, unread):
        check(scheduler, state, unread)
        waiting = state.queue.end - state.queue.head
        if state.slots.active.sum() == 3 and waiting >= 2 and len(scheduler.rows.prompts) > 1:
            found.append(copy.deepcopy((scheduler, state, unread)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "check", watching)
        rollouts = Rollouts(PageEngine(options))
        session(rollouts, RandomStream(np.random.default_rng(5), options, VOCABULARY))
    return found[-1]


def lose_a_page(scheduler, state):
    state.pool.available[...] -= 1


def free_a_page_twice(scheduler, state):
    state.pool.stack[0] = state.pool.stack[1]


def free_a_page_in_use(scheduler, state):
    slot = int(np.flatnonzero(state.slots.active)[0])
    state.pool.stack[0] = state.slots.table[slot, state.slots.shared[slot]]


def count_on_too_much(scheduler, state):
    scheduler.budget.guaranteed_free_pages = int(state.pool.available) + 1


def forget_a_waiting_request(scheduler, state):
    state.queue.head[...] += 1


def decode_a_request_twice(scheduler, state):
    state.slots.requests.output_row[:] = state.slots.requests.output_row[0]


def read_the_pages_of_another_prompt(scheduler, state):
    state.prompts.table[:] = state.prompts.table[:, ::-1]


def skip_a_token(scheduler, state):
    state.slots.position[:] += 1


def close_a_prompt_too_early(scheduler, state):
    rows = scheduler.rows
    prompt_id = next(iter(rows.in_flight.values())).prompt.id
    rows.free_prompt_rows.append(rows.prompts.pop(prompt_id))


def give_an_output_row_twice(scheduler, state):
    scheduler.rows.free_output_rows[0] = next(iter(scheduler.rows.in_flight))


def ask_twice(scheduler, state):
    in_flight = scheduler.rows.in_flight
    first, second, *_ = in_flight
    in_flight[first] = in_flight[second]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_page, r"pages \[\] twice, \[\] unknown, \[\d+\] lost"),
        (free_a_page_twice, r"pages \[\d+\] twice, \[\] unknown, \[\d+\] lost"),
        (free_a_page_in_use, r"pages \[\d+\] twice, \[\] unknown, \[\d+\] lost"),
        (count_on_too_much, r"(\d+) pages are free, and the host counts on \d+"),
        (forget_a_waiting_request, r"requests of output rows \[\d+\] lost, \[\] unknown, \[\] twice"),
        (decode_a_request_twice, r"requests of output rows \[\d+, \d+\] lost, \[\] unknown, \[\d+\] twice"),
        (read_the_pages_of_another_prompt, r"read other pages than their prompts'|pages .* lost"),
        (skip_a_token, r"slots \[0, 1, 2\] are not where their prompts and lengths put them"),
        (close_a_prompt_too_early, r"pages|decode for prompts that are closed"),
        (give_an_output_row_twice, r"output rows \[\d+\] twice, \[\] unknown, \[\d+\] lost"),
        (ask_twice, r"requests \[\('s?p\d+', \d+\)\] are in flight twice"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_broken_is_named(damage, message):
    scheduler, state, unread = copy.deepcopy(in_the_middle())
    scheduler.check(state, unread)
    damage(scheduler, state)
    with pytest.raises(BrokenInvariant, match=message):
        scheduler.check(state, unread)


def outputs_of(options, status, start, length):
    size, only_first = (options.output_rows, 4), np.arange(options.output_rows) == 0
    new = Outputs(
        tokens=np.zeros(size, np.int32), logprobs=np.zeros(size, np.float32), start=np.int32(only_first * start),
        length=np.int32(only_first * length), status=np.where(only_first, np.int32(status), np.int32(RUNNING)),
    )  # fmt: skip
    return WindowOutputs(
        rows=new,
        waiting=np.int32(0),
        free_pages=np.int32(0),
        prompt_length=np.ones(options.open_prompts, np.int32),
        counts=WindowCounts(decode_steps=np.int32(1), busy=np.int32(1), redone=np.int32(0)),
    )


def test_an_answer_that_nobody_waits_for():
    options = dataclasses.replace(tiny.OPTIONS, pages=40, check_invariants=True)
    rows, no_rows = Rows(options), Rows(options)
    rows.in_flight[0] = Request(tiny.PROMPTS[0], 0)
    invariants.check_outputs(outputs_of(options, STOPPED, 0, 3), rows)
    with pytest.raises(BrokenInvariant, match=r"output rows \[0\] got tokens, and no request is in flight for them"):
        invariants.check_outputs(outputs_of(options, RUNNING, 0, 3), no_rows)
    with pytest.raises(BrokenInvariant, match=r"output rows \[0\] ended without a token"):
        invariants.check_outputs(outputs_of(options, STOPPED, 3, 3), rows)


def test_tokens_that_the_host_did_not_get():
    options = dataclasses.replace(tiny.OPTIONS, pages=40, check_invariants=True)
    rows = Rows(options)
    rows.in_flight[0] = Request(tiny.PROMPTS[0], 0)
    rows.write(outputs_of(options, RUNNING, 0, 4).rows)
    invariants.check_outputs(outputs_of(options, RUNNING, 4, 8), rows)
    invariants.check_outputs(outputs_of(options, RUNNING, 0, 3), rows)  # evicted, and drawn again
    for start, length in ((5, 8), (4, 3)):
        with pytest.raises(BrokenInvariant, match=r"new tokens of output rows \[0\] do not follow those before"):
            invariants.check_outputs(outputs_of(options, RUNNING, start, length), rows)


def test_a_session_that_ends_with_a_page_held():
    options = dataclasses.replace(tiny.OPTIONS, pages=40, check_invariants=True)
    (state,) = PageEngine(options).fetch(PageEngine(options).init_decode_state())
    invariants.check_idle(options, state)
    with pytest.raises(BrokenInvariant, match=r"after the session, pages \[\] twice, \[\] unknown, \[1\] lost"):
        invariants.check_idle(options, state.replace(pool=state.pool.replace(
            stack=state.pool.stack[:-2], available=np.int32(38)
        )))  # fmt: skip
    active = state.slots.replace(active=np.eye(1, 8, dtype=bool)[0])
    with pytest.raises(BrokenInvariant, match=r"slots \[0\] still decode"):
        invariants.check_idle(options, state.replace(slots=active))
    with pytest.raises(BrokenInvariant, match="2 requests still wait"):
        invariants.check_idle(options, state.replace(queue=state.queue.replace(end=np.int32(2))))

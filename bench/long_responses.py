"""`bench.long_responses`: what a decode window, the host and a report cost, by the length of responses.

For each length an engine is made whose longest response has this many tokens. All slots then hold responses that lack
only the tokens of a few windows. The tokens before are given with the request (`Request.begun`), so they are prefilled
and need not be drawn. At the end the pool loses pages, so that slots are evicted and draw their tokens again.

Processor seconds are those of all threads: the host's are those of the thread that schedules and reads reports, and the
device's are all others.
"""

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from bench import command_line, engines, inputs
from bench.options import log
from reinforce_ada_jax.collection.continuation import following
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.engine import Engine, enough_pages
from reinforce_ada_jax.sampling.paged_attention import choose_backend
from reinforce_ada_jax.sampling.scheduler import Scheduler
from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams
from reinforce_ada_jax.types import Prompt, Request, Response

SHORTEST, FACTOR = 1024, 4
WINDOWS = 8  # number of windows that a response lacks


class Window(NamedTuple):
    """Cost of one window: counts, and processor seconds."""

    decode_steps: int
    tokens: int
    device_s: float
    schedule_s: float  # inputs of the window
    submit_s: float  # the call
    read_s: float  # outputs to the host, and to its rows


class Drawing:
    """One scheduler over one engine; a window is read before the next one is submitted."""

    def __init__(self, engine: Engine, params: Params):
        self.engine, self.params, self.state = engine, params, engine.init_decode_state()
        self.scheduler = Scheduler(engine.options)
        self._limits: dict[Request, int] = {}
        self.input_bytes = self.report_bytes = self.redone = 0

    def add(self, request: Request, max_tokens: int) -> None:
        """Adds a request, or the rest of a response that has begun."""
        taken = following(request)
        self._limits[taken] = max_tokens
        self.scheduler.add(taken)

    def window(self) -> tuple[Window, list[Response]]:
        """Decodes one window."""
        process, thread = time.process_time(), time.thread_time()
        self.scheduler.open_waiting()
        given = self.scheduler.next_window(
            lambda request: token_lib.address(0, request.prompt.id, request.draw),
            lambda request: SamplingParams(self._limits[request]),
        )
        scheduled = time.thread_time()
        self.state, outputs = self.engine.decode_window(self.params, self.state, [given])
        submitted = time.thread_time()
        jax.block_until_ready(outputs)
        begin_read = time.thread_time()
        (read,) = self.engine.fetch_outputs(outputs)
        responses = self.scheduler.process_outputs(read, 0)
        ended, all_s = time.thread_time(), time.process_time() - process
        self.input_bytes, self.report_bytes = _bytes(given), _bytes(read)
        self.redone += int(read.counts.redone)
        host_s = (submitted - thread) + (ended - begin_read)
        return Window(
            int(read.counts.decode_steps), int(read.counts.busy), all_s - host_s, scheduled - thread,
            submitted - scheduled, ended - begin_read,
        ), responses  # fmt: skip

    def to_end(self) -> list[Window]:
        """Decodes until nothing is left; returns the cost of each window."""
        windows = []
        while self.scheduler.busy:
            spent, responses = self.window()
            windows.append(spent)
            self.scheduler.close([response.prompt_id for response in responses])
        return windows


def _bytes(tree: Any) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


def engine_options(length: int, values: flags.FlagValues) -> EngineOptions:
    """Returns the options of an engine whose longest response has `length` tokens."""
    sizes = EngineOptions(
        slots=values.slots, window=values.window, page_size=values.page_size, pages=0,
        open_prompts=2 * values.slots, prefill_tokens=values.prefill_tokens, max_prompt_tokens=64,
        max_response_tokens=length, begun_tokens=length - 1, stop_ids=(), seed=0, dtype=values.dtype,
        attention=choose_backend(values.attention),
    )  # fmt: skip
    # Twice as many as slots need: the host expects each response to draw its full length after the tokens that it has.
    return dataclasses.replace(sizes, pages=2 * enough_pages(sizes))


def requests(sizes: EngineOptions, missing: int, vocab_size: int) -> list[Request]:
    """Returns a request for each slot, for the last `missing` tokens of a response of full length."""
    rng, begun = np.random.default_rng(0), sizes.max_response_tokens - missing

    def request(number: int) -> Request:
        prompt = Prompt(str(number), "", "", rng.integers(0, vocab_size, 64, np.int32))
        tokens = rng.integers(0, vocab_size, begun, np.int32)
        so_far = Response(prompt.id, 0, tokens, np.zeros(begun, np.float32), truncated=False, is_cut=True)
        return Request(prompt, 0, begun=so_far)

    return [request(number) for number in range(sizes.slots)]


def mean(windows: list[Window]) -> dict[str, float]:
    """Returns the milliseconds of a full window, as medians over `windows`."""
    columns = {name: np.median([getattr(window, name) for window in windows]) for name in Window._fields}
    return {f"{name.removesuffix('_s')}_ms": 1e3 * float(columns[name]) for name in columns if name.endswith("_s")}


def measure_end(engine: Engine, params: Params, vocab_size: int) -> dict[str, Any]:
    """Returns the costs of prefilling almost whole responses, of drawing their last tokens, and of evictions.

    The first half of the windows has enough pages. For the second half, the slots have only half of the pages by which
    they grow.
    """
    sizes, drawing = engine.options, Drawing(engine, params)
    missing = WINDOWS * sizes.window
    for request in requests(sizes, missing, vocab_size):
        drawing.add(request, missing)
    first, *full = [drawing.window()[0] for _ in range(WINDOWS // 2)]  # the first one prefills, and all slots start
    if any(window.tokens != sizes.slots * sizes.window for window in (first, *full)):
        raise RuntimeError("slots were idle: the responses could not all start.")
    growing = sizes.slots * (missing - WINDOWS // 2 * sizes.window)
    few = drawing.state.pool.available * 0 + growing // sizes.page_size // 2
    drawing.state = drawing.state.replace(pool=drawing.state.pool.replace(available=few))
    rest = drawing.to_end()
    of_decoding = float(np.median([window.device_s for window in full]))
    prefilled = sizes.slots * (sizes.max_response_tokens - missing)
    return {
        **mean(full), "report_bytes": drawing.report_bytes, "input_bytes": drawing.input_bytes,
        "table_bytes": drawing.state.slots.table.nbytes + drawing.state.prompts.table.nbytes,
        "prefill_us_per_token": 1e6 * (first.device_s - of_decoding) / prefilled,
        "decode_us_per_token": 1e6 * of_decoding / (sizes.slots * sizes.window),
        "redone_share": drawing.redone / growing,
        "evicted_us_per_token": 1e6 * sum(window.device_s for window in rest) / (growing + drawing.redone),
    }  # fmt: skip


def measure_first(engine: Engine, params: Params, vocab_size: int) -> dict[str, float]:
    """Returns the costs of windows that draw the first tokens of responses."""
    sizes, drawing = engine.options, Drawing(engine, params)
    rng = np.random.default_rng(0)
    for number in range(sizes.slots):
        prompt = Prompt(str(number), "", "", rng.integers(0, vocab_size, 64, np.int32))
        drawing.add(Request(prompt, 0), (WINDOWS + 2) * sizes.window)
    return mean([window for window in drawing.to_end()[2:] if window.decode_steps == sizes.window])


def run(options: flags.FlagValues) -> dict[str, Any]:
    """Measures engines of increasing length, up to --response_tokens."""
    architecture = inputs.architecture_of(options)
    params = inputs.random_weights(options, architecture, options.dtype)
    found: dict[str, Any] = {}
    length, longest = SHORTEST, options.response_tokens or 2**16
    while length <= longest:
        sizes = engine_options(length, options)
        engine = Engine(architecture, sizes, mesh=mesh_lib.make_mesh())
        found[str(length)] = {
            "begin": measure_first(engine, params, architecture.vocab_size),  # it compiles
            "end": measure_end(engine, params, architecture.vocab_size),
        }
        log(command_line.summary({str(length): found[str(length)]}))
        length *= FACTOR
    return found | engines.describe(architecture, engine_options(longest, options), 1)


if __name__ == "__main__":
    command_line.start("long_responses", run)

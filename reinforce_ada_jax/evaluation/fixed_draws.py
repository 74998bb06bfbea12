"""Drawing and grading a fixed number of responses per prompt; each is stored as soon as it is graded."""

import collections
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from reinforce_ada_jax import cli
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import CollectOptions, VerifyFn, collect
from reinforce_ada_jax.config import Config, EvaluationConfig, SamplingConfig
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Interrupt, Interrupted, end
from reinforce_ada_jax.environments.workers import EnvironmentPool
from reinforce_ada_jax.evaluation.response_store import GradedResponse, GradedResponses, ResponseStore
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.reporting.progress import Progress
from reinforce_ada_jax.reporting.samples import transcript
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.training.environments import turn_sampling
from reinforce_ada_jax.training.reward_check import too_many_failed
from reinforce_ada_jax.training.sharded_collection import draw_everywhere
from reinforce_ada_jax.types import Pool, Prompt, Response, Verdict

# Prompts are drawn in chunks of this many responses per slot. The token arrays of a chunk are held until its end, and
# slots are idle only at the end of a chunk: about 1/64 of the work.
RESPONSES_PER_SLOT = 64
Pairs = list[tuple[Prompt, Response]]
# (configuration, components, number of responses, most tokens of one) -> line of a dry run: the time that they take.
Cost = Callable[[Config, Components, int, int], str]


def draw(
    prompts: Sequence[Prompt],
    collect_fn: Callable[..., list[Pool]],
    verify_fn: VerifyFn,
    samples: int,
    *,
    slots: int,
    store: ResponseStore | None = None,
    decode: Callable[[np.ndarray], str] = str,
    on_progress: Callable[[int, int], None],
) -> GradedResponses:
    """Returns `samples` graded responses of every prompt, in the order of the prompts, which have distinct ids.

    Args:
      collect_fn: `collect` with its sampler; called once per chunk of prompts.
      slots: responses that are decoded at the same time, by all processes.
      store: opened for writing. It gets each response of this process as soon as it is graded, and in process 0 the
        responses of the other processes at the end of a chunk.
      decode: turns tokens into the text that is stored.
      on_progress: called with (prompts done, responses drawn) so far; in the newest chunk, this process's only. If
        it raises Interrupted in one process, all processes raise it.
    """
    drawn: GradedResponses = {}
    pending: collections.deque[tuple[Pairs, list[Verdict] | Future[list[Verdict]]]] = collections.deque()

    def verify(pairs: Pairs) -> list[Verdict] | Future[list[Verdict]]:
        pending.append((pairs, verify_fn(pairs)))
        return pending[-1][1]

    def keep_graded() -> None:
        """Stores the responses that have verdicts, in order: none before an earlier one is graded."""
        while pending:
            pairs, verdicts = pending[0]
            if isinstance(verdicts, Future):
                if not verdicts.done():
                    return
                verdicts = verdicts.result()
            pending.popleft()
            if store is not None:
                store.add(
                    (prompt.id, response.draw, transcript(response, decode), GradedResponse.of(response, verdict))
                    for (prompt, response), verdict in zip(pairs, verdicts, strict=True)
                )

    size = chunk_size(slots, samples)
    for first in range(0, len(prompts), size):

        def report(closed: int, finished: int, first: int = first) -> None:
            keep_graded()
            on_progress(first + closed, first * samples + finished)

        collect_chunk = functools.partial(collect_fn, verify_fn=verify, on_progress=report)
        pools = draw_everywhere(prompts[first : first + size], strategies.fixed(samples), collect_chunk)
        keep_graded()
        for pool in pools:
            drawn[pool.prompt.id] = graded(pool)
            if store is not None and processes.is_writer() and store.missing([pool.prompt], samples):
                store.add(
                    (pool.prompt.id, response.draw, transcript(response, decode), of_draw)
                    for response, of_draw in zip(pool.responses, drawn[pool.prompt.id], strict=True)
                )
    return drawn


def chunk_size(slots: int, samples: int) -> int:
    """Returns the number of prompts of a chunk."""
    return max(1, RESPONSES_PER_SLOT * slots // samples)


def graded(pool: Pool) -> list[GradedResponse]:
    return list(map(GradedResponse.of, pool.responses, pool.verdicts))


class _Rate:
    """Tokens a second, for the progress line: while long responses run, the number of responses does not change."""

    def __init__(self, rollouts: Rollouts):
        self._rollouts, self._counts, self._begin, self._before = rollouts, None, 0.0, 0

    def text(self) -> str:
        counts, now = self._rollouts.counts, time.monotonic()
        if counts is not self._counts:  # a new chunk has begun
            self._counts, self._begin, self._before = counts, now, counts.tokens
        seconds, tokens = now - self._begin, counts.tokens - self._before
        return f", {tokens / seconds:,.0f} tokens/s" if tokens else ""


def fill(
    store: ResponseStore,
    prompts: Sequence[Prompt],
    draw_fn: Callable[..., object],
    progress: Progress,
    saved: str,
    rollouts: Rollouts,
    name: str = "",
) -> None:
    """Draws responses to `prompts`, which an open store lacks, with `draw_fn`; a signal to one process ends all.

    `rollouts` counts the tokens. `saved` says where the responses are after a signal; `name` precedes their number in
    the progress line.
    """
    done, rate = progress.done, _Rate(rollouts)
    progress.reach(done, f"{name}0 responses")  # the programs are compiled, and the first window takes a while
    with Interrupt() as interrupt:
        stop = interrupt.stop()

        def report(closed: int, drawn: int) -> None:
            stop.check(name)
            progress.reach(done + closed, f"{name}{drawn:,} responses{rate.text()}")

        try:
            draw_fn(prompts, store=store, on_progress=report)
        except Interrupted:
            progress.close()
            end(interrupt, saved)
    progress.reach(done + len(prompts))


def check_graded(
    config: Config, graders: VerifierPool | EnvironmentPool, what: str, drawn: Iterable[GradedResponses], remedy: str
) -> None:
    """Ends all processes if too many responses could not be graded; only process 0 reads its `drawn`."""
    verdicts = [each.verdict for by_prompt in drawn for responses in by_prompt.values() for each in responses]
    if message := processes.of_writer(too_many_failed(config, graders, what, verdicts, remedy)):
        processes.leave()
        cli.fail(message, cli.STOPPED)


def from_policy(
    params: Params,
    rollouts: Rollouts,
    settings: SamplingConfig | EvaluationConfig,
    stream: int,
    config: Config,
    components: Components,
    verify_fn: VerifyFn,
) -> Callable[..., GradedResponses]:
    """Returns `draw` bound to a policy, as `collector` binds `collect`.

    Its arguments prompts, samples, store and on_progress remain.
    """
    collect_fn, verify_fn = collector(params, rollouts, settings, stream, config, components, verify_fn)
    return functools.partial(
        draw,
        collect_fn=collect_fn,
        verify_fn=verify_fn,
        slots=rollouts.engine.options.slots * rollouts.engine.replicas * processes.count(),
        decode=components.tokenizer.decode,
    )


def collector(
    params: Params,
    rollouts: Rollouts,
    settings: SamplingConfig | EvaluationConfig,
    stream: int,
    config: Config,
    components: Components,
    verify_fn: VerifyFn,
) -> tuple[Callable[..., list[Pool]], VerifyFn]:
    """Returns `collect` bound to a policy, and the function that grades.

    `settings` is the section with temperature, top_k, top_p and the length limit; `stream` is the first word of the
    addresses of all samples. Trajectories are graded by their environment instead of `verify_fn`.
    """
    turns = components.trajectories(config, stream, settings.max_response_tokens)
    collect_fn = functools.partial(
        collect,
        sample_fn=rollouts.sampler(params, stream=stream, sampling=turn_sampling(config, settings, turns)),
        options=CollectOptions(deterministic=components_lib.deterministic(config)),
        turns=turns,
    )
    return collect_fn, verify_fn if turns is None else turns.verdicts

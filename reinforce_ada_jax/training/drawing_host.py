"""A process that only draws: it obeys the orders of process 0 until this ends the run (training/drawing_hosts.py).

It has model, tokenizer, prompts, verifiers and engine, but no learner, no state of the run, and no files of its own.
"""

import dataclasses
import json
import time
from collections.abc import Callable

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.serialization import partial_from_text, to_bytes
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.signals import Stop
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training.drawing import draw_fn
from reinforce_ada_jax.training.drawing_hosts import DRAW, END, REPLY, SO_FAR, WEIGHTS, Order, Reply
from reinforce_ada_jax.training.loop import Ending, Outcome
from reinforce_ada_jax.training.response_journal import Pace
from reinforce_ada_jax.training.run import BenchmarkEvaluator, Inputs
from reinforce_ada_jax.training.sharded_collection import Job, Plan, StoreFn, shard_message, with_plan
from reinforce_ada_jax.types import Prompt

LOOK_EVERY_S = 0.2


def follow(inputs: Inputs, rollouts: Rollouts) -> Outcome:
    """Does what process 0 asks for, until it ends the run; returns how the run ended."""
    engine = inputs.components.engine
    assert engine.hand_over is not None
    weights: Params | None = None
    with inputs.verifiers:
        while (order := Order(**json.loads(processes.receive(0)))).action != END:
            if order.action == WEIGHTS:
                weights = None  # devices may have no room for both
                weights = engine.hand_over.receive(engine.abstract_weights())
            elif order.action == DRAW:
                assert weights is not None
                reply = _drawn(inputs, rollouts, weights, order)
                for process in range(processes.count()):
                    processes.send(process, reply)
            # If an order to break off comes after the drawing has ended, there is nothing to do.
    processes.leave()
    return Outcome(Ending(order.exit_code), order.message)


def _drawn(inputs: Inputs, rollouts: Rollouts, weights: Params, order: Order) -> bytes:
    """Draws and grades this process's shard of an order; returns the reply, which says if it was broken off."""
    verifiers, stop = inputs.verifiers, Stop(_is_told_to_stop())
    graders, begin_s = inputs.components.graders(verifiers), verifiers.busy_s
    graders.failure = ""
    if order.benchmark:
        assert isinstance(inputs.evaluator, BenchmarkEvaluator)
        prompts, strategy = inputs.evaluator.benchmarks[order.benchmark], strategies.fixed(order.samples)
        draw = inputs.evaluator.draw_fn(inputs, rollouts, weights, order.benchmark, order.iteration, stop)
    else:
        prompts, strategy = inputs.prompts, inputs.strategy
        draw = draw_fn(
            inputs, rollouts, weights, iteration=order.iteration, policy_version=order.policy_version, stop=stop
        )
    plan = Plan(order.estimates, order.draws)
    partial, store = partial_from_text(order.partial), store_fn(inputs.config, order)
    job = Job(_chosen(prompts, order), strategy, partial=partial, store=store)
    number = processes.index() - processes.count()
    shard = shard_message(with_plan(job, plan), plan, draw, len(processes.drawing()), number)
    reply = Reply(verifiers.busy_s - begin_s, graders.failure)
    return REPLY + json.dumps(dataclasses.asdict(reply)).encode() + b"\n" + shard


def store_fn(config: Config, order: Order, clock: Callable[[], float] = time.monotonic) -> StoreFn:
    """Returns the function that sends process 0 the responses so far of an order, if the journal stores them."""
    if order.benchmark or not components_lib.rounds_alike(config):
        return lambda _: None
    pace = Pace(clock)
    return lambda so_far: pace.call(lambda: processes.send(0, SO_FAR + to_bytes(so_far())))


def _chosen(prompts: list[Prompt], order: Order) -> list[Prompt]:
    """Returns the prompts of an order, with what the choice of prompts knows of them."""
    known = {prompt.id: prompt for prompt in prompts}
    return [
        dataclasses.replace(known[prompt_id], pass_rate=pass_rate, labels=labels)
        for prompt_id, pass_rate, labels in order.prompts
    ]


def _is_told_to_stop() -> Callable[[], bool]:
    """Returns the function that is True once process 0 has sent another order; it looks now and then."""
    looked_at = 0.0

    def is_told() -> bool:
        nonlocal looked_at
        if time.monotonic() - looked_at < LOOK_EVERY_S:
            return False
        looked_at = time.monotonic()
        return processes.has_sent(0)

    return is_told

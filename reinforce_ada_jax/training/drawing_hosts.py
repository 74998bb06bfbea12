"""The processes that only draw, as those that learn see them: orders go to them, and responses come back.

They know nothing of the run's state, so an order says all that a drawing depends on. Process 0 sends it to each of
them, and each sends its shard of the responses to every process that learns (training/drawing_host.py is their side).
Until then it sends process 0 what it has so far, for the journal.
Orders and responses go through JAX's key-value store, because two threads of a process must not launch programs on the
same devices. The hand-over of weights is a program of all devices, and the main thread calls it.
"""

import dataclasses
import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from reinforce_ada_jax.collection.serialization import CollectedShard, from_bytes, partial_to_text
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.distributed.mesh import shard_bytes
from reinforce_ada_jax.distributed.signals import Stop
from reinforce_ada_jax.environments.workers import EnvironmentPool
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.rollouts import Reshard
from reinforce_ada_jax.training.sharded_collection import Job, Plan, ShardsFn

# What an order asks for: take part in the hand-over of weights; draw and grade; break off the drawing before; end.
WEIGHTS, DRAW, BREAK_OFF, END = "weights", "draw", "break off", "end"
# First byte of the messages of a process that only draws: responses so far, for process 0; the reply to an order.
SO_FAR, REPLY = b"s", b"r"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Order to the processes that only draw; the fields after `action` are of a drawing, or of the end."""

    action: str
    iteration: int = 0  # the one that is drawn; in an evaluation, the one of the weights
    policy_version: int = 0  # of the weights
    benchmark: str = ""  # name of the benchmark; "": a training draws
    samples: int = 0  # of each problem of a benchmark
    prompts: Sequence[Sequence[Any]] = ()  # id, pass rate and labels of each
    estimates: Mapping[str, float] | None = None  # as in `Plan`
    draws: Mapping[str, int] = dataclasses.field(default_factory=dict)  # as in `Plan`
    partial: str = ""  # rollouts of the prompts so far (`partial_to_text`)
    exit_code: int = 0
    message: str = ""  # for the user, at the end


@dataclasses.dataclass(frozen=True)
class Reply:
    """Report of a process on a drawing, in front of its shard of the responses."""

    verify_s: float  # time that grading took
    failure: str  # the first grading that failed, as text


class _Sent:
    """Messages about one order from the processes that only draw.

    A process sends its responses so far before its reply. So all of them are received before the next order.
    """

    def __init__(self, job: Job):
        self._job = job
        self._newest: dict[int, bytes] = {}  # message of each process: a reply, or in process 0 responses so far

    def reply(self, process: int, look: Callable[[], None]) -> bytes:
        """Waits for the reply of a process; meanwhile calls `look`, and stores the responses of all processes."""

        def waiting() -> None:
            look()
            for other in processes.drawing():
                while other != process and not self._has_replied(other) and processes.has_sent(other):
                    self._newest[other] = processes.receive(other)
            if self._newest and processes.is_writer():
                self._job.store(self._so_far)

        while not self._has_replied(process):
            self._newest[process] = processes.receive(process, waiting)
            if not self._has_replied(process):
                waiting()
        return self._newest[process]

    def _has_replied(self, process: int) -> bool:
        return self._newest.get(process, SO_FAR).startswith(REPLY)

    def _so_far(self) -> CollectedShard:
        collected = CollectedShard([])
        for process, message in self._newest.items():
            # Of a reply the shard, behind the line of its report and its own first byte.
            content = message.partition(b"\n")[2][1:] if self._has_replied(process) else message[1:]
            collected.add_rollouts(from_bytes(content, self._job.prompts))
        return collected


class DrawingHosts:
    """The processes that only draw; a run hands weights over by the same names as in `Rollouts`."""

    def __init__(self, engine: Engine, verifiers: VerifierPool, graders: VerifierPool | EnvironmentPool):
        """`verifiers` and `graders` grade nothing here; they get the times and failures of those that do."""
        assert engine.hand_over is not None
        self._engine, self._hand_over = engine, engine.hand_over
        self._verifiers, self._graders = verifiers, graders
        self._newest: weakref.ref[jax.Array] | None = None  # an array of the weights that the processes have
        self.reshard = Reshard()  # of the newest weights

    def decode_weights(self, params: Params) -> Params:
        """Hands the learner's weights over; returns their copy, which keeps the learner's layout."""
        jax.block_until_ready(params)
        begin = time.monotonic()
        weights = self._engine.cast_weights(params)
        self.hand_over(weights)
        self.reshard = Reshard(time.monotonic() - begin, shard_bytes(self._engine.abstract_weights()))
        return weights

    def hand_over(self, weights: Params) -> None:
        """Hands over what `decode_weights` returned before, unless it is what the processes have."""
        one = jax.tree.leaves(weights)[0]
        if self._newest is not None and self._newest() is one:
            return
        self._send(Order(action=WEIGHTS))
        self._hand_over.send(weights)
        self._newest = weakref.ref(one)

    def shards(self, order: Order, stop: Stop) -> ShardsFn:
        """Returns a function that lets these processes draw a job from the newest weights, as `order` says."""

        def shards(job: Job, plan: Plan) -> list[bytes]:
            prompts = [(prompt.id, prompt.pass_rate, dict(prompt.labels)) for prompt in job.prompts]
            partial = partial_to_text(job.partial)
            self._send(dataclasses.replace(order, prompts=prompts, partial=partial, **dataclasses.asdict(plan)))
            sent, is_told = _Sent(job), False

            def look() -> None:
                nonlocal is_told
                stop.show(f"evaluating {order.benchmark}" if order.benchmark else "collecting")
                if stop.asked() and not is_told:
                    self._send(Order(action=BREAK_OFF))
                    is_told = True

            return self._received([sent.reply(process, look) for process in processes.drawing()])

        return shards

    def _received(self, messages: Sequence[bytes]) -> list[bytes]:
        """Returns the shards in replies, and keeps what else they say."""
        headers, _, shards = zip(*(message.partition(b"\n") for message in messages), strict=True)
        replies = [Reply(**json.loads(header.removeprefix(REPLY))) for header in headers]
        self._verifiers.busy_s += max(reply.verify_s for reply in replies)
        for reply in replies:
            self._graders.failure = self._graders.failure or reply.failure
        return list(shards)

    def end(self, exit_code: int, message: str) -> None:
        """Ends the processes with this exit code and message."""
        self._send(Order(action=END, exit_code=exit_code, message=message))

    def _send(self, order: Order) -> None:
        if processes.is_writer():
            for process in processes.drawing():
                processes.send(process, json.dumps(dataclasses.asdict(order)).encode())

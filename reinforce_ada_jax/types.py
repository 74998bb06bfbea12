"""The records that travel between the stages: prompts, requests, responses, verdicts, pools.

Numpy and the standard library only, so that every stage (and every verifier process) may import them.
What is computed from them lives with the stage that computes it.

Axis letters, used in every shape annotation and einsum of this project:

    P prompts    B rows (responses in a batch)    T tokens    S slots    L layers
    D model      F feed-forward    N query heads    K key/value heads    H head dim    V vocabulary
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """One problem, tokenised.

    Attributes:
      id: stable name, unique in its data set; part of the address of every sample drawn for it.
      problem: the text that a person would read.
      answer: the reference answer that the verifier compares with.
      tokens: int32[T], the rendered template, ready for the policy (BOS included where the model has one).
      pass_rate: an estimate made beforehand by `prepare`, in [0, 1], or None.
      labels: what else its source says of it ("subject", "level", ...), for tables.
    """

    id: str
    problem: str
    answer: str
    tokens: np.ndarray
    pass_rate: float | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One response wanted.

    Attributes:
      prompt: of which.
      draw: its number, from 0, in the order of the pool.
      prefetch: it belongs to the next iteration, and is asked for now because a slot would be idle.
    """

    prompt: Prompt
    draw: int
    prefetch: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Response:
    """One finished draw.

    Attributes:
      prompt_id: `Prompt.id`.
      draw: `Request.draw`.
      tokens: int32[T], T >= 1; a stop token that ended it is included (sampled, kept, scored, trained).
      logprobs: float32[T], of each token under the distribution it was sampled from: the behaviour policy at the
        sampling temperature, untruncated.
      truncated: True when the length limit ended it, not a stop token.
      policy_version: of the weights it was drawn with, from first token to last: iterations finished by then.
    """

    prompt_id: str
    draw: int
    tokens: np.ndarray
    logprobs: np.ndarray
    truncated: bool
    policy_version: int = 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the verifier says of one response.

    Attributes:
      correct: what stopping rules and pass rates look at.
      reward: what advantages look at: any finite number, 0 and 1 where nothing shapes it.
      reason: one word when something other than a comparison decided ("no_answer", "timeout", "crash", "error",
        ...), empty otherwise.
    """

    correct: bool
    reward: float
    reason: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """Every response drawn for one prompt in one iteration, in draw order, with its verdicts.

    Attributes:
      prompt: whose pool this is.
      responses: N responses, `responses[i].draw == i`.
      verdicts: N verdicts, aligned with `responses`.
      rounds: how many rounds were drawn.
      met: whether the strategy's stopping rule was met (False: the round limit ended it).
      estimate: the pass rate expected before drawing, where the strategy plans with one; else None.
    """

    prompt: Prompt
    responses: tuple[Response, ...]
    verdicts: tuple[Verdict, ...]
    rounds: int
    met: bool
    estimate: float | None = None

    @property
    def rewards(self) -> np.ndarray:
        """float64[N], rewards in draw order."""
        return np.array([verdict.reward for verdict in self.verdicts], np.float64)

    @property
    def correct(self) -> np.ndarray:
        """bool[N], verdicts in draw order."""
        return np.array([verdict.correct for verdict in self.verdicts], bool)


@dataclasses.dataclass(frozen=True, eq=False)
class PartialRollouts:
    """What one iteration drew of a prompt that belongs to the next (`Request.prefetch`).

    Attributes:
      responses: one for each draw of the rounds begun, by draw; None where it was not drawn.
      verdicts: of the finished rounds; as long as `responses`, or shorter by the round that isn't finished.
      rounds: finished rounds.
    """

    responses: tuple[Response | None, ...]
    verdicts: tuple[Verdict, ...]
    rounds: int


@runtime_checkable
class RequestQueue(Protocol):
    """What a sampler sees of the collection: requests to take, and prompts that need nothing more.

    A `sample_fn(queue)` is a generator: it takes requests, and yields lists of finished responses, in any order,
    until `take` gives nothing while none of its own are in flight.
    """

    def take(self, limit: int) -> list[Request]:
        """Up to `limit` requests, most urgent first; empty when none is waiting now.

        Called while everything taken before has been yielded, it waits for verdicts that may still bring requests.
        """

    def take_prefetch(self, limit: int) -> list[Request]:
        """Up to `limit` requests of the next iteration, for slots that `take` leaves idle."""

    def wait(self) -> bool:
        """Waits for the next verdicts under way, which may close prompts or bring requests; False where none are.

        For a sampler that can't begin what it has taken before some prompt closes.
        """

    def closed(self) -> list[str]:
        """Ids of the prompts closed since the last call: no further request will name them."""

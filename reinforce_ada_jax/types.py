"""Records that travel between the stages: prompts, requests, responses, verdicts, pools.

NumPy and the standard library only, so that every stage and every verifier process may import this module. The
functions that compute something from a record live with the stage that computes it.

Axis letters, used in every shape annotation and einsum of this project:

    P prompts    B rows (responses in a batch)    T tokens    S slots    L layers
    D model      F feed-forward    N query heads    K key/value heads    H head dim    V vocabulary
    E experts    G experts that a device holds    C experts of a token
    X width of an expert    Y columns of gate and up, 2 X
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

# Reasons of a verdict where the verifier or the environment failed; "no_answer" or "too_long" is the response's fault.
FAILURES = ("timeout", "crash", "error")
# Reasons of trajectories that a limit ended before the environment gave a reward.
TRUNCATED, MAX_TURNS = "truncated", "max_turns"


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """One problem, tokenised.

    Attributes:
      id: stable name, unique in its data set; part of the address of every sample drawn for it.
      problem: the text of the problem, without the template.
      answer: the reference answer for the verifier.
      tokens: the rendered template, ready for the policy (with BOS where the model has one).
      pass_rate: an estimate made beforehand by `prepare`, in [0, 1], or None.
      labels: further fields of its source ("subject", "level", ...), for tables.
      messages: role and content of each message, where the source has messages; `tokens` are made of them.
      columns: every column of its row, by the names of the source, for rewards. No checkpoint has them; their hash is
        compared at a resume if the reward is the user's own.
    """

    id: str
    problem: str
    answer: str
    tokens: Int[np.ndarray, " T"]
    pass_rate: float | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def source_text(self) -> str:
        """Text that identifies the prompt before it is rendered: the problem, or the messages as JSON."""
        return json.dumps(list(self.messages)) if self.messages else self.problem


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """Request for one response.

    Attributes:
      prompt: the prompt to draw for.
      draw: number of the response in the prompt's pool, from 0.
      prefetch: number of iterations until the prompt's own iteration; above 0, the request fills an idle slot.
      continues: id of the next turn's prompt, if another turn may follow, else empty. The next prompt begins with the
        tokens of this prompt and of the response, and has one request. A sampler may keep its computed state until that
        request arrives, or until `RequestQueue.closed` names one of the two prompts.
      begun: the response so far, if an earlier collection began it; its tokens are then at the end of the prompt that a
        sampler gets (`continuation.following`).
    """

    prompt: Prompt
    draw: int
    prefetch: int = 0
    continues: str = ""
    begun: "Response | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class Response:
    """One finished draw: a response, or a trajectory of several turns.

    Attributes:
      prompt_id: `Prompt.id`.
      draw: `Request.draw`.
      tokens: at least one. A stop token that ended the response is included: it is sampled, kept, scored and trained.
      logprobs: log-probability of each token under the behaviour policy that sampled it, at the sampling temperature
        and without truncation; 0 at tokens of the environment.
      truncated: the length limit ended it, not a stop token.
      policy_version: version of the weights that drew its first token: the number of iterations finished by then.
      segments: lengths of a trajectory's parts, alternately the model's and the environment's; the first and the last
        are the model's. Empty: the model sampled all tokens.
      versions: (policy version, tokens) of each part, if the weights changed while it was drawn. Empty: they did not.
      is_cut: it has not ended, and may go on (`Request.begun`); such responses are in no pool.
      experts: for a model with experts, those that the sampler chose in each layer, for each token of the prompt and
        the response except the last; the learner replays them (policy/experts.py). None: they were not recorded.
    """

    prompt_id: str
    draw: int
    tokens: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    truncated: bool
    policy_version: int = 0
    segments: tuple[int, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()
    is_cut: bool = False
    experts: UInt[np.ndarray, "S LC"] | None = None

    def __post_init__(self):
        if self.segments and (len(self.segments) % 2 == 0 or sum(self.segments) != len(self.tokens)):
            raise ValueError(
                f"a response of {len(self.tokens)} tokens has the segments {self.segments}: their number must be odd "
                "(model, environment, ..., model), and their sum the number of tokens."
            )

    @property
    def sampled(self) -> Bool[np.ndarray, " T"]:
        """True at the model's tokens, False at those of the environment."""
        if not self.segments:
            return np.ones(len(self.tokens), bool)
        return np.repeat(np.arange(len(self.segments)) % 2 == 0, self.segments)

    @property
    def num_sampled(self) -> int:
        """Number of the model's tokens."""
        return sum(self.segments[::2]) if self.segments else len(self.tokens)

    @property
    def token_versions(self) -> Int[np.ndarray, " T"]:
        """Policy version of each token."""
        versions, counts = zip(*(self.versions or ((self.policy_version, len(self.tokens)),)), strict=True)
        return np.repeat(versions, counts)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verifier's result for one response.

    Attributes:
      correct: whether the response counts as correct, in stopping rules and pass rates.
      reward: reward of the outcome, for advantages: any finite number; 1 or 0 if answers are only right or wrong.
      reason: one word where something other than a comparison decided ("no_answer", "timeout", "crash", "error",
        ...), else empty.
      penalty: penalty for the length of a correct response (rewards/shaping.py), not subtracted from `reward`; 0 for a
        wrong one. Advantages compare it among correct responses only.
      rewards: reward of each function of `reward.path` that applies to the response, by name, before weights. They are
        not compared: two verdicts are equal if they have the same effect.
    """

    correct: bool
    reward: float
    reason: str = ""
    penalty: float = 0.0
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def failed(self) -> bool:
        """True if nothing was graded: the reward 0 is then no grade, and `counted_rewards` replaces it."""
        return self.reason in (*FAILURES, TRUNCATED, MAX_TURNS) and bool(self.reward == 0.0)


def counted_rewards(verdicts: Sequence[Verdict]) -> Float[np.ndarray, " N"]:
    """Returns the rewards of one prompt's verdicts, float64; a failed one gets the lowest of them, at most 0.

    If a wrong answer has the reward -1, a failure with the reward 0 would be better than a wrong answer: the policy
    would learn to stall, or to crash its grader.
    """
    rewards = np.array([verdict.reward for verdict in verdicts], np.float64)
    if not any(verdict.reason for verdict in verdicts):
        return rewards
    failed = np.array([verdict.failed for verdict in verdicts], bool)
    return np.where(failed, rewards.min(initial=0.0), rewards)


class ScoreNoise(NamedTuple):
    """Mean squared norms of responses' scores, expected before drawing, in any unit."""

    success: float  # of the score of a correct one minus the mean of the prompt's correct ones; 0 if all are equal
    correct: float  # of the score of a correct response
    wrong: float  # of the score of a wrong one


# Noise of scores that differ far more between responses than between verdicts, equal for correct and wrong ones.
EQUAL_NOISE = ScoreNoise(1.0, 1.0, 1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """Every response drawn for one prompt in one iteration, in draw order, with its verdicts.

    Attributes:
      prompt: the prompt.
      responses: N responses, `responses[i].draw == i`.
      verdicts: N verdicts, aligned with `responses`.
      rounds: rounds drawn.
      met: the strategy's stopping rule was met (False: the round limit ended the prompt).
      estimate: pass rate expected before drawing, where the strategy plans; else None.
      round_sizes: draws of each round, in order; if none are given, all rounds have the same size.
      discarded: sampled tokens of each speculative draw that was not needed; such draws have no verdict.
      noise: noise of the scores in earlier iterations, for the control variate.
    """

    prompt: Prompt
    responses: tuple[Response, ...]
    verdicts: tuple[Verdict, ...]
    rounds: int
    met: bool
    estimate: float | None = None
    round_sizes: tuple[int, ...] = ()
    discarded: tuple[int, ...] = ()
    noise: ScoreNoise = EQUAL_NOISE

    def __post_init__(self):
        if not self.round_sizes and self.rounds:
            object.__setattr__(self, "round_sizes", (len(self.verdicts) // self.rounds,) * self.rounds)

    @property
    def rewards(self) -> Float[np.ndarray, " N"]:
        """Rewards as they count, in draw order, float64 (`counted_rewards`)."""
        return counted_rewards(self.verdicts)

    @property
    def correct(self) -> Bool[np.ndarray, " N"]:
        """Correctness in draw order."""
        return np.array([verdict.correct for verdict in self.verdicts], bool)

    @property
    def penalties(self) -> Float[np.ndarray, " N"]:
        """Length penalties in draw order, float64."""
        return np.array([verdict.penalty for verdict in self.verdicts], np.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class PartialRollouts:
    """Rollouts that one iteration drew for a prompt of a later one (`Request.prefetch`)."""

    responses: tuple[Response | None, ...]  # by draw of the started rounds; None: missing
    verdicts: tuple[Verdict, ...]  # of the finished rounds; at most one round lacks them, except in `ungraded` rollouts
    rounds: int  # finished rounds
    round_sizes: tuple[int, ...] = ()  # draws of each started round, in order
    begun: tuple[Response, ...] = ()  # tokens so far of missing responses

    def ungraded(self) -> "PartialRollouts":
        """Returns the rollouts without verdicts, to be graded by another reward: no round counts as finished.

        If draws of the last of several rounds still run, this round is left out: its ended draws are the short ones.
        """
        responses, sizes, begun = self.responses, self.round_sizes, self.begun
        if None in responses and len(sizes) > 1:
            responses, sizes, begun = responses[: -sizes[-1]], sizes[:-1], ()
        return PartialRollouts(responses, (), 0, sizes, begun)


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """Prompts of the next collections; a collection may draw responses to them in slots that would be idle."""

    prompts: Sequence[Prompt]  # their ids differ from those of the current prompts
    # By prompt id, the number of collections until the prompt's own; default: 1.
    ahead: Mapping[str, int] = dataclasses.field(default_factory=dict)
    partial: dict[str, PartialRollouts] = dataclasses.field(default_factory=dict)  # by prompt id; added by `collect`


@runtime_checkable
class RequestQueue(Protocol):
    """A sampler's view of the collection: requests to take, and prompts that need no more draws.

    A `sample_fn(queue)` is a generator: it takes requests, and yields lists of finished responses, in any order,
    until `take` returns nothing while none of its requests are in flight. A queue that inherits from this class needs
    `take` alone: by default nothing comes later, and no prompt is closed.
    """

    def take(self, limit: int, *, wait: bool = True) -> list[Request]:
        """Returns up to `limit` requests, most urgent first; none where no request is waiting.

        With `wait`, if all earlier requests are answered, it waits for verdicts that may bring further requests.
        """
        ...

    def take_prefetch(self, limit: int) -> list[Request]:
        """Returns up to `limit` requests of the next iterations, for slots that `take` leaves idle."""
        return []

    def take_speculative(self, limit: int, prompt_ids: Collection[str]) -> list[Request]:
        """Returns up to `limit` requests for idle slots: draws that the next verdicts of these prompts may require.

        Prompts of later turns have none.
        """
        return []

    def wait(self) -> bool:
        """Waits for the next pending verdicts, which may close prompts or bring requests; False where none are pending.

        It is called by a sampler that can't start its requests before some prompt closes.
        """
        return False

    def awaits_verdicts(self) -> bool:
        """Returns True while verdicts are pending."""
        return False

    def closed(self) -> list[str]:
        """Returns ids of the prompts closed since the last call: none of their requests is waiting or in flight.

        A trajectory that has ended closes the prompts of its turns, and that of the turn that could have followed.
        """
        return []


@runtime_checkable
class CuttableQueue(RequestQueue, Protocol):
    """Queue of a collection that may end while responses of later collections run (`Response.is_cut`).

    Attributes:
      cuts_at_end: set by a sampler that cuts the responses which run at the end. `take_prefetch` then has requests
        until the end.
      running: set by a sampler whose responses can go on later; returns the tokens so far of the running responses.
    """

    cuts_at_end: bool
    running: Callable[[], Sequence[Response]]

    def is_complete(self) -> bool:
        """Returns True once all prompts of this collection are closed: running responses are for later ones."""
        ...

    def give_back(self, requests: Iterable[Request]) -> None:
        """Takes back requests for which no token was drawn."""
        ...

    def add_begun(self, cut: Iterable[Response]) -> None:
        """Takes the tokens so far of the responses that run when the sampler is interrupted."""
        ...

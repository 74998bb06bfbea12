"""Environments of a run: a user's class, the model's chat template, and the queue of turns, put together.

The processes of the pool know neither tokens nor prompts. Here a turn becomes text, and messages become tokens.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from reinforce_ada_jax.collection.trajectories import Trajectories
from reinforce_ada_jax.collection.verification import VerifyFn
from reinforce_ada_jax.config import Config, EvaluationConfig, SamplingConfig
from reinforce_ada_jax.data.problems import Problem, place
from reinforce_ada_jax.data.templates import chat_from_config
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.data.turns import following
from reinforce_ada_jax.environments import loading
from reinforce_ada_jax.environments.workers import EnvironmentPool, Episode, Reply
from reinforce_ada_jax.isolation.workers import CannotStart
from reinforce_ada_jax.rewards.shaping import Shaping
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.types import Prompt, Request, Response, Verdict


@dataclasses.dataclass(eq=False)
class _Dialogue:
    """One trajectory: its episode in the pool, and the token that ended its newest turn."""

    episode: Episode
    stop_id: int = -1


class Environments:
    """Environments of one run; `pool` has their processes, which start with the first request."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        """Checks the file and starts one process, which reads the class; ValueError if there is no environment."""
        settings, self.config, self.tokenizer = config.environment, config, tokenizer
        reference = loading.file_reference(settings.path)
        self.pool = EnvironmentPool(reference, config.reward.workers, config.reward.time_limit_s)
        self.pool.check()
        self.tools = self.pool.tools
        self.chat = dataclasses.replace(chat_from_config(config), tools=self.tools)

    def with_messages(self, problems: Sequence[Problem]) -> list[Problem]:
        """Returns the problems with the first messages of their environments; ValueError if one failed."""
        self.pool.failure = ""
        given = [_given(each["id"], each["problem"], each["answer"], each.get("columns", {})) for each in problems]
        found, futures = [], [self.pool.reset(each) for each in given]
        for problem, future in zip(problems, futures, strict=True):
            try:
                reply = future.result()
            except CannotStart as error:
                raise ValueError(error.line) from None
            if reply.failure:
                self.pool.close()  # the other problems would take as long
                raise ValueError(
                    f"environment.path cannot begin {place(problem)}: {self.pool.failure.splitlines()[0]}. Fix "
                    "the environment, or the problem."
                )
            found.append({**problem, "prompt": list(reply.messages)})
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Drawing:
    """Implements collection.trajectories.Environment for one collection."""

    environments: Environments
    stream: int  # part of the address of its randomness

    def begin(self, prompt: Prompt, draw: int) -> _Dialogue:
        """Returns a new trajectory; the address of its randomness is (seed, stream, prompt id, draw)."""
        name = int.from_bytes(hashlib.blake2b(prompt.id.encode(), digest_size=8).digest())
        problem = _given(prompt.id, prompt.problem, prompt.answer, prompt.columns)
        address = self.environments.config.seed, self.stream, name, draw
        return _Dialogue(self.environments.pool.begin(problem, address, prompt.messages))

    def submit(self, trajectory: _Dialogue, tokens: np.ndarray) -> Future[Reply]:
        """Gives a turn to the environment, as text."""
        trajectory.stop_id = int(tokens[-1])
        return self.environments.pool.step(trajectory.episode, self.environments.tokenizer.decode(tokens))

    def read(self, trajectory: _Dialogue, answer: Reply) -> np.ndarray | Verdict:
        """Returns the tokens of the environment's messages, or its verdict."""
        if answer.failure:
            return Verdict(False, 0.0, answer.failure)
        if answer.reward is not None:
            return Verdict(answer.reward > self.environments.config.reward.positive_threshold, answer.reward)
        try:
            first, new = trajectory.episode.first, answer.messages
            return following(self.environments.tokenizer, self.environments.chat, first, new, trajectory.stop_id)
        except ValueError as error:
            return Verdict(False, 0.0, self.environments.pool.failed("error", str(error)).failure)

    def end(self, trajectory: _Dialogue) -> None:
        self.environments.pool.end(trajectory.episode)


def _given(prompt_id: str, problem: str, answer: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `reset` gets: the columns of the row, and `id`, `problem` and `answer`."""
    return {"id": prompt_id, "problem": problem, "answer": answer} | dict(columns)


def turn_sampling(
    config: Config, section: SamplingConfig | EvaluationConfig, turns: Trajectories | None
) -> SamplingParams | Callable[[Request], SamplingParams]:
    """Returns the sampling of responses, or of turns, which may use the tokens that their trajectory leaves."""
    sampling = SamplingParams(section.max_response_tokens, section.temperature, section.top_k, section.top_p)
    if turns is None:
        return sampling
    longest = config.environment.max_turn_tokens or sampling.max_tokens

    def of_turn(request: Request) -> SamplingParams:
        return dataclasses.replace(sampling, max_tokens=min(longest, turns.tokens_left(request)))

    return of_turn


def shaped_verdicts(turns: Trajectories, shaping: Shaping) -> VerifyFn:
    """Returns the function that gives the environment's verdicts to a collection."""

    def verify(pairs: list[tuple[Prompt, Response]]) -> list[Verdict]:
        return shaping.all(turns.verdicts(pairs), [response.num_sampled for _, response in pairs])

    return verify

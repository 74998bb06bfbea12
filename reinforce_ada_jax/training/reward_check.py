"""Checks that a reward works: on a reference answer before weights are read, and on the verdicts of whole batches.

A reward that fails is indistinguishable from one that gives 0, if nobody counts its failures: every advantage is 0, and
the run ends as if it had trained.
"""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from reinforce_ada_jax.collection.metrics import FAILURES
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data.templates import Chat, chat_from_config
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.reporting.writers import read_metrics
from reinforce_ada_jax.rewards.dialects import PROMPT
from reinforce_ada_jax.rewards.workers import GradingFailed, VerifierPool
from reinforce_ada_jax.types import Prompt, Verdict

MAX_SHOWN = 60  # characters of an answer or a response in a message


def output_file(folder: pathlib.Path) -> pathlib.Path:
    """Returns the file below `folder` that gets what a user's reward prints, one for each process of a run."""
    index = processes.index()
    return folder.absolute() / (f"reward_output.{index}.log" if index else "reward_output.log")


def reward_columns(config: Config, prompt: Prompt) -> dict[str, Any]:
    """Returns what reward functions may ask for: the columns of the row, and `id`, `problem`, `answer` and `prompt`.

    `prompt` is the text of the problem, or its messages (`reward.completions`). The other three are the row's own
    columns where it has them under these names.
    """
    template, completions = config.data.template, config.reward.completions
    chat = (bool(prompt.messages) or template == "chat") if completions == "auto" else completions == "chat"
    given: str | list[Any] = prompt.problem
    if chat:
        formats = {"chat": chat_from_config(config), "qwen_math": Chat(), "plain": Chat("", "")}
        given = list(prompt.messages) or formats[template].messages(prompt.problem)
    own = {"id": prompt.id, "problem": prompt.problem, "answer": prompt.answer}
    return own | dict(prompt.columns) | {PROMPT: given}


def check_reward(config: Config, verifiers: VerifierPool, prompts: Iterable[Prompt], name: str | None = None) -> str:
    """Grades the reference answer of each prompt by a reward of the user's; returns what the first one gets, as text.

    Any reward is fine, and 0 is usual where the reward looks for more than the bare answer. `name` is that of the
    reward, by default `reward.path`; "" for a built-in one, which is not checked.

    Raises:
      ValueError: the functions can't be loaded, or one raises, takes too long, or returns no number.
    """
    name, lines = config.reward.path if name is None else name, []
    for prompt in prompts if name else ():
        of = f"the reference answer {shown(prompt.answer)} of problem {prompt.id!r}"
        try:
            verdict = verifiers.check((prompt.answer, prompt.answer, reward_columns(config, prompt)))
        except GradingFailed as error:
            raise ValueError(
                f"{name} cannot grade {of}: {error}. Fix the function, or give the problems the columns that it needs; "
                "docs/how_to/reward.md has the signatures."
            ) from None
        lines.append(f"{name} gives {described(verdict)} to {of}")
    return lines[0] if lines else ""


def described(verdict: Verdict | None) -> str:
    """Returns a graded reward as text, with its parts where there are several."""
    if verdict is None:
        return "nothing"
    parts = ", ".join(f"{name} {reward:g}" for name, reward in verdict.rewards.items())
    notes = [verdict.reason, parts if len(verdict.rewards) > 1 else ""]
    return f"{verdict.reward:g}" + "".join(f" ({note})" for note in notes if note)


def shown(text: str) -> str:
    """Returns a text in quotes, cut where it is long."""
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def num_failed(verdicts: Iterable[Verdict]) -> int:
    """Returns the number of verdicts that say that the grading failed, not the response."""
    return sum(verdict.reason in FAILURES for verdict in verdicts)


def all_failed(config: Config, verifiers: VerifierPool, what: str, verdicts: Sequence[Verdict], remedy: str) -> str:
    """Returns the message for responses whose grading failed without exception, with the first traceback; else ""."""
    if not verdicts or num_failed(verdicts) < len(verdicts):
        return ""
    reward = config.reward.path or f"reward.kind={config.reward.kind}"
    first = f" The first failure:\n{verifiers.failure}\n" if verifiers.failure else " "
    return f"{reward} could grade none of the {len(verdicts):,} responses of {what}.{first}{remedy}"


def training_remedy(config: Config) -> str:
    """Returns what to do about a reward that fails while a run trains."""
    if config.reward.path:
        return "Fix it, then run the same command with --config.checkpoint.accept_changed_reward=True."
    return "Choose a reward.kind that fits the answers, or raise reward.time_limit_s."


def not_graded(workdir: pathlib.Path) -> str:
    """Returns the share of a run's responses that could not be graded, as text for its last line; "" for none."""
    metrics = read_metrics(workdir)
    failed, responses = (
        sum(int(row[f"collection/{key}"]) for row in metrics) for key in ("verifier_failures", "responses")
    )
    return f"; {failed:,} of {responses:,} responses could not be graded ({failed / responses:.1%})" if failed else ""

"""Checks that a reward works: on a reference answer before weights are read, and on the verdicts of whole batches.

A reward that fails is indistinguishable from one that gives 0, if nobody counts its failures: every advantage is 0, and
the run ends as if it had trained.
"""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data.templates import Chat, chat_from_config
from reinforce_ada_jax.distributed import processes
from reinforce_ada_jax.environments.workers import EnvironmentPool
from reinforce_ada_jax.reporting.writers import read_metrics
from reinforce_ada_jax.rewards import judge_template
from reinforce_ada_jax.rewards.dialects import PROMPT
from reinforce_ada_jax.rewards.workers import GradingFailed, VerifierPool
from reinforce_ada_jax.types import FAILURES, Prompt, Verdict

_FUNCTION_REMEDY = (
    "Fix the function, or give the problems the columns that it needs. docs/how_to/reward.md has the signatures; "
    "reward.completions chooses texts or messages for functions of completions."
)
# Remedy by kind of reward, where a reference answer can't be graded.
_REMEDIES = {
    "code": "docs/how_to/code.md has the forms of tests, and what the system must allow.",
    "judge": "Check judge.url, judge.model, judge.template and the API key, or raise reward.time_limit_s.",
}
# Kinds of reward that read boxes alone. A warning appears if at least this share of responses has no box.
_READ_BOXES, MOSTLY = ("math", "reference", "reference_evaluation"), 0.9
MAX_SHOWN = 60  # characters of an answer or a response in a message


def output_file(folder: pathlib.Path, of: str = "reward") -> pathlib.Path:
    """Returns the file below `folder` that gets what a user's reward or environment prints, one for each process."""
    index = processes.index()
    return folder.absolute() / (f"{of}_output.{index}.log" if index else f"{of}_output.log")


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


def checked_name(config: Config) -> str:
    """Returns the name of a reward that depends on more than this program; "" for one that needs no check."""
    reward = config.reward
    return reward.path or (f"reward.kind={reward.kind}" if reward.kind in _REMEDIES else "")


def check_reward(config: Config, verifiers: VerifierPool, prompts: Iterable[Prompt], name: str | None = None) -> str:
    """Grades the reference answer of each prompt; returns what the first one gets, as text.

    Any reward is fine, and 0 is usual where the reward looks for more than the bare answer. Where programs are graded,
    an empty program replaces the answer. `name` is the reward's (None: `checked_name`); "" checks nothing.

    Raises ValueError if the functions can't be loaded, or one raises, takes too long, or returns no number; or if a
    built-in reward, of 0 to 1, would never or always be above the threshold of a correct response.
    """
    name, lines = checked_name(config) if name is None else name, []
    threshold, own = config.reward.positive_threshold, config.environment.path or name not in ("", "reward.kind=code")
    if not own and not 0 <= threshold < 1:
        raise ValueError(
            f"reward.positive_threshold is {threshold:g}, and rewards of reward.kind={config.reward.kind} are 0 to 1: "
            f"{'none' if threshold > 0 else 'each'} would count as correct. Use at least 0 and less than 1."
        )
    kind = "" if config.reward.path else config.reward.kind
    for prompt in prompts if name else ():
        response, of = prompt.answer, f"the reference answer {shown(prompt.answer)} of problem {prompt.id!r}"
        if name == "reward.kind=code":
            response, of = "```python\npass\n```", f"an empty program for problem {prompt.id!r}"
        columns = reward_columns(config, prompt)
        if name == "reward.kind=judge":
            judge_template.checked(config.judge.template, columns)
        try:
            verdict = verifiers.check((response, prompt.answer, columns))
        except GradingFailed as error:
            remedy = _REMEDIES.get(kind, _FUNCTION_REMEDY)
            raise ValueError(f"{name} cannot grade {of}: {error}. {remedy}") from None
        lines.append(f"{name} gives {described(verdict)} to {of}")
    if lines and kind == "code":
        lines[0] += f". {isolation()}"
    return lines[0] if lines else ""


def isolation() -> str:
    """Returns a sentence on the isolation of graded programs on this machine."""
    command = [sys.executable, "-P", "-m", "reinforce_ada_jax.isolation.sandbox"]
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = os.environ | {"PYTHONPATH": path}
    weakness = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if not weakness:
        return "Programs run in namespaces of their own, without network"
    return f"Programs run WITHOUT NAMESPACES ({weakness}): docs/how_to/code.md says what they can reach"


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


def too_many_failed(
    config: Config, graders: VerifierPool | EnvironmentPool, what: str, verdicts: Sequence[Verdict], remedy: str
) -> str:
    """Returns the message for too many responses whose grading failed, with the first traceback; else ""."""
    failed, total = sum(verdict.reason in FAILURES for verdict in verdicts), len(verdicts)
    limit = config.reward.max_failed
    if failed <= limit * total and failed < max(total, 1):
        return ""
    reward = config.environment.path or config.reward.path or f"reward.kind={config.reward.kind}"
    first = f" The first failure:\n{graders.failure}\n" if graders.failure else " "
    if failed < total:
        return (
            f"{reward} could not grade {failed:,} of the {total:,} responses of {what}, more than the share of "
            f"{limit:g} (reward.max_failed).{first}{remedy}"
        )
    return f"{reward} could grade none of the {total:,} responses of {what}.{first}{remedy}"


def none_above_threshold(config: Config, verdicts: Sequence[Verdict]) -> str:
    """Returns a warning where rewards differ and none of them counts as correct; else ""."""
    rewards = [verdict.reward for verdict in verdicts]
    if not rewards or any(verdict.correct for verdict in verdicts) or min(rewards) == max(rewards):
        return ""
    return (
        f"none of {len(rewards):,} responses counts as correct: rewards are {min(rewards):g} to {max(rewards):g}, and "
        f"reward.positive_threshold is {config.reward.positive_threshold:g}. Lower it if some of them are correct."
    )


def without_answer(kind: str, share: float, what: str, flag: str) -> str:
    r"""Returns a warning where a grader that reads boxes finds none in nearly all responses; else "".

    A model that states its answers in another form looks like one that is always wrong. `what` says of
    which problems, `flag` sets another grader.
    """
    if kind not in _READ_BOXES or share < MOSTLY:
        return ""
    return (
        rf"{share:.0%} of the responses{what} have no \boxed{{}}, and the grader {kind!r} reads nothing else. Read "
        "some of them. If they are cut, allow more tokens. If they state answers in another form, ask for the box "
        f"(data.instruction), or choose another grader: {flag} takes the last number."
    )


def share_without_answer(verdicts: Sequence[Verdict]) -> float:
    return sum(verdict.reason == "no_answer" for verdict in verdicts) / max(len(verdicts), 1)


def training_remedy(config: Config) -> str:
    """Returns what to do about a reward that fails while a run trains."""
    if config.reward.path or config.environment.path:
        return "Fix it, then run the same command with --config.checkpoint.accept_changed_reward=True."
    return "Choose a reward.kind that fits the answers, or raise reward.time_limit_s."


def not_graded(workdir: pathlib.Path) -> str:
    """Returns the share of a run's responses that could not be graded, as text for its last line; "" for none."""
    metrics = read_metrics(workdir)
    failed, responses = (
        sum(int(row[f"collection/{key}"]) for row in metrics) for key in ("verifier_failures", "responses")
    )
    return f"; {failed:,} of {responses:,} responses could not be graded ({failed / responses:.1%})" if failed else ""

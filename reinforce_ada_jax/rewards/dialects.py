"""Signatures of reward functions, told apart by the names of their parameters.

| signature | from | called with |
|---|---|---|
| `f(response, answer)` | this project | the two texts, by position |
| `f(prompts, completions, **columns)` | TRL, tunix | lists of one; known by `completions` |
| `f(data_source, solution_str, ground_truth, extra_info=None)` | verl | texts and columns; known by `solution_str` |
| `f(sample, item)` | OpenAI's Python grader | the response, and the columns as one object |

All may be `async`. A further parameter gets the column of the problem that has its name; `**` gets all columns.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from reinforce_ada_jax.isolation.child import Misuse
from reinforce_ada_jax.types import Verdict

# The column with the model's input: a text, or messages. With messages, completions are messages too, as in TRL.
PROMPT = "prompt"
# A function whose first or second parameter has one of these names does not take (response, answer).
_NOT_RESPONSE = (PROMPT, "problem", "question", "answer", "ground_truth")
_NOT_ANSWER = (PROMPT, "problem", "question", "response", "completion")
Columns = Mapping[str, Any]
# The reward of a response, None where it does not apply to it, or a whole verdict.
Reward = float | Verdict | None
RewardFn = Callable[[str, str, Columns], Reward]
Arguments = Callable[[str, str, Columns], dict[str, Any]]


class InvalidReward(Misuse):
    """A function can't be called with a problem's columns, or its result is no reward; the text is for its author."""


def number(value: Any, rule: str = "a grade function must return a Verdict, a number or a bool") -> float:
    """Returns a reward as a float; raises InvalidReward unless it is a finite number, not text that looks like one.

    `rule` begins the message about a value that is no number.
    """
    try:
        # Most of numpy's scalars are no Python floats and its bools no numbers, so anything but text is converted.
        reward = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        reward = None
    if reward is None:
        raise InvalidReward(f"{rule}, not {_shown(value)}")
    if not math.isfinite(reward):
        raise InvalidReward(f"a reward must be finite, not {reward}")
    return reward


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _messages(response: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": response}]


def _batch_arguments(response: str, answer: str, columns: Columns) -> dict[str, Any]:
    prompt = columns.get(PROMPT, "")
    completion = response if isinstance(prompt, str) else _messages(response)
    others = {name: [value] for name, value in ({"answer": answer} | dict(columns)).items() if name != PROMPT}
    return others | {"prompts": [prompt], "completions": [completion]}


def _batch_value(value: Any) -> Reward:
    """Returns the only entry of a list, None where the function does not apply."""
    if value is None or isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or len(value) != 1:
        raise InvalidReward(f"a function of completions must return a list of one reward for each, not {_shown(value)}")
    return None if value[0] is None else number(value[0])


def _verl_arguments(response: str, answer: str, columns: Columns) -> dict[str, Any]:
    given = columns.get("reward_model")
    truth = given.get("ground_truth", answer) if isinstance(given, Mapping) else answer
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": response,
        "ground_truth": truth,
        "extra_info": columns.get("extra_info") or {},
    }


def _verl_value(value: Any) -> Reward:
    if isinstance(value, Mapping):
        if "score" not in value:
            raise InvalidReward(f"an object that a verl function returns must have 'score', not only {sorted(value)}")
        value = value["score"]
    return number(value)


def _openai_arguments(response: str, answer: str, columns: Columns) -> dict[str, Any]:
    sample = {"output_text": response, "choices": [{"message": _messages(response)[0], "finish_reason": "stop"}]}
    return {"sample": sample, "item": {"reference_answer": answer, "answer": answer} | dict(columns)}


def _own_value(value: Any) -> Reward:
    if isinstance(value, Verdict):
        if isinstance(value.correct, str):  # bool("no") is True
            raise InvalidReward(f"correct of a Verdict must be True or False, not {_shown(value.correct)}")
        number(value.reward, "reward of a Verdict must be a number")
        return value
    return number(value)


def _keywords(parameters: Mapping[str, inspect.Parameter], available: Columns) -> dict[str, Any]:
    """Returns the entries of `available` that parameters take by name; InvalidReward if one of them is missing."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}
    missing = [name for name, each in named.items() if each.default is each.empty and name not in available]
    if missing:
        raise InvalidReward(
            f"it needs {', '.join(missing)}, and the problem has only {', '.join(sorted(available)) or 'its answer'}"
        )
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(available)
    return {name: value for name, value in available.items() if name in named}


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # functions written in C may have no signature
        return {}


def _by_name(parameters: Mapping[str, inspect.Parameter]) -> tuple[Arguments, Callable[[Any], Reward]] | None:
    """Returns how a function that takes named arguments is called, and how its result is read; None for any other."""
    if "completions" in parameters:
        return _batch_arguments, _batch_value
    if "solution_str" in parameters:
        return _verl_arguments, _verl_value
    return (_openai_arguments, number) if list(parameters) == ["sample", "item"] else None


def takes_columns(function: Callable[..., Any]) -> bool:
    """Returns True if a function may look at more than (response, answer)."""
    parameters = _parameters(function)
    return _by_name(parameters) is not None or len(parameters) > 2


def adapt(function: Callable[..., Any]) -> RewardFn:
    """Returns a function of any signature as one of (response, answer, columns), which may raise InvalidReward.

    Raises TypeError where it can't be called in any of these ways.
    """
    parameters = _parameters(function)
    by_name, texts = _by_name(parameters), list(parameters)[:2]  # (response, answer) may have other names
    if by_name is None:
        _check_takes_texts(function, parameters)
        parameters = dict(list(parameters.items())[2:])

    def call(response: str, answer: str, columns: Columns) -> Reward:
        try:
            if by_name is not None:
                arguments, read = by_name
                keywords = _keywords(parameters, arguments(response, answer, columns))
                return read(_finished(function(**keywords)))
            keywords = _keywords(parameters, {name: value for name, value in columns.items() if name not in texts})
            return _own_value(_finished(function(response, answer, **keywords)))
        except InvalidReward as error:  # its traceback has no line of the function
            code = getattr(inspect.unwrap(function), "__code__", None)
            place = repr(function) if code is None else f"{code.co_filename}, line {code.co_firstlineno}"
            raise InvalidReward(f"{error} ({place})") from None

    return call


def _check_takes_texts(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    first, second, *_ = (*parameters, "", "")
    if first in _NOT_RESPONSE or second in _NOT_ANSWER:
        raise TypeError(
            f"takes {inspect.signature(function)}, and is called with (response, answer) by position: let it take "
            "these two first, and columns of the problem, such as problem, after them"
        )
    try:
        if parameters:
            inspect.signature(function).bind_partial("response", "answer")
    except TypeError as error:
        raise TypeError(
            f"takes {inspect.signature(function)}, and is called with (response, answer); it may also be a function of "
            "completions (TRL, tunix), of solution_str (verl) or of (sample, item) (OpenAI)"
        ) from error


@functools.cache
def _runner() -> asyncio.Runner:
    """Returns the event loop of the process: clients that a function keeps between calls belong to one loop."""
    return asyncio.Runner()


def _finished(value: Any) -> Any:
    """Returns the value, or what a coroutine returns."""
    return _runner().run(value) if inspect.iscoroutine(value) else value

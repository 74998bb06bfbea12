"""Episode: one trajectory's environment, in a worker process.

The user's class has `reset(problem)`, which returns the first messages, and `step(messages)`, which returns the next
messages or a number, the final reward. `tools` are functions that the model may call; a turn that calls some is
answered by their results, and `step` is not called. `__init__` may take `rng`, the trajectory's own NumPy generator.
"""

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.environments import tools as tools_lib
from reinforce_ada_jax.environments.tool_calls import parse_calls
from reinforce_ada_jax.isolation.child import Misuse

Message = dict[str, str]


class Invalid(Misuse):
    """An environment returned a value that is not allowed."""


# Roles of an environment's messages. Chat templates leave out messages of other roles, or refuse them.
ROLES = ("user", "tool", "system")


def messages_of(value: Any, method: str) -> list[Message]:
    """Returns what a method of an environment returned; Invalid unless it is a list of messages of `ROLES`."""
    if isinstance(value, list | tuple) and value:
        found = [{"role": each["role"], "content": each["content"]} for each in value if is_message(each)]
        if len(found) == len(value):
            return found
    end = "" if method == "reset" else ", or a finite number, the final reward"
    raise Invalid(
        f"{method}() returned {value!r:.200}: it must return a list of messages, each with role (user, tool or "
        f"system) and content{end}"
    )


def is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("role") in ROLES and isinstance(value.get("content"), str)


def tools_of(environment: Any) -> dict[str, tools_lib.Tool]:
    """Returns the tools of an environment, or of its class, by name."""
    tools = getattr(environment, "tools", ())
    if callable(tools):
        raise Invalid("tools is a function: list the functions, as in tools = (calculate,)")
    return {tool.__name__: tool for tool in tools}


def schemas_of(environment_class: type) -> list[Any]:
    """Returns the descriptions of the tools of a class: `tool_schemas` if its environments call their tools themselves.

    Otherwise they are those of an environment, which may set them in `__init__`.
    """
    own = getattr(environment_class, "tool_schemas", None)
    if own is not None:
        return list(own)
    return [tools_lib.schema(tool) for tool in tools_of(made(environment_class, (0,))).values()]


def made(environment_class: type, address: Sequence[int]) -> Any:
    """Returns a new environment, with the generator of its address if it takes one."""
    takes_rng = "rng" in inspect.signature(environment_class).parameters
    return environment_class(**({"rng": np.random.default_rng(list(address))} if takes_rng else {}))


class Episode:
    """Environment of one trajectory, and the conversation so far."""

    def __init__(self, environment_class: type, problem: Mapping[str, Any], address: Sequence[int]):
        """Makes the environment, with the generator of its address if it takes one, and resets it."""
        self._environment: Any = made(environment_class, address)
        self.messages = messages_of(self._environment.reset(dict(problem)), "reset")

    def answer(self, text: str) -> list[Message] | float:
        """Returns the answer to a turn of the model: the next messages, or the final reward."""
        self.messages.append({"role": "assistant", "content": text})
        tools = tools_of(self._environment)
        calls = parse_calls(text, tools)[1] if tools else []
        if calls:
            reply = [{"role": "tool", "name": call.name, "content": tools_lib.run(tools, call)} for call in calls]
            self.messages += reply
            return reply
        value = self._environment.step([dict(message) for message in self.messages])
        if isinstance(value, numbers.Real | np.bool_):
            reward = float(value)
            if not math.isfinite(reward):
                raise Invalid(f"step() returned {value!r:.200}: the final reward must be finite")
            return reward
        reply = messages_of(value, "step")
        self.messages += reply
        return reply

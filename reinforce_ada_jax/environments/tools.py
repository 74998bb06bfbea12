"""Tools: functions that a model may call, their JSON schemas, and calls of them.

A schema is made of a function's annotations and docstring, in the form that chat templates and OpenAI's interface take.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from reinforce_ada_jax.environments.tool_calls import Call

Tool = Callable[..., Any]
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_ACCEPTED = {name: kind for kind, name in _TYPES.items()} | {"number": (int, float)}
MAX_RESULT = 100_000  # bytes of a result as JSON; a message of an environment's process has at most 131,072
# One argument in the "Args:" section of a docstring.
_ARGUMENT = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


def schema(tool: Tool) -> dict[str, Any]:
    """Returns the description of a tool: {"type": "function", "function": {"name", "description", "parameters"}}.

    Annotations may be str, int, float, bool, list, dict, `Literal`, and unions with None. The description is the first
    paragraph of the docstring, and those of arguments come from its section "Args:". Raises ValueError
    for an argument with another annotation or none, for a missing docstring, and for an `async` function.
    """
    name, text = getattr(tool, "__name__", repr(tool)), inspect.getdoc(tool)
    if inspect.iscoroutinefunction(tool):
        raise ValueError(f"the tool {name!r} is async, and nothing would await it: make it a plain function.")
    if not text:
        raise ValueError(f"the tool {name!r} has no docstring, which tells the model what it does: write one.")
    described = dict(_arguments(text))
    properties: dict[str, Any] = {}
    hints, required = typing.get_type_hints(tool), []
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"the tool {name!r} has the argument {parameter}: every argument must have a name.")
        found = _of_type(hints.get(parameter.name))
        if found is None:
            raise ValueError(
                f"the argument {parameter.name!r} of the tool {name!r} must be annotated with str, int, float, bool, "
                "list, dict, Literal, or a union of one of them and None."
            )
        properties[parameter.name] = found
        if parameter.name in described:
            found["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = " ".join(text.split("\n\n")[0].split())
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _arguments(text: str) -> list[tuple[str, str]]:
    """Returns names and descriptions of the section "Args:" of a docstring."""
    _, _, section = text.partition("\nArgs:\n")
    found: list[tuple[str, str]] = []
    indent = len(section) - len(section.lstrip())
    for line in section.splitlines():
        if line.strip() and not line[:1].isspace():
            break
        match = _ARGUMENT.match(line)
        if match and len(line) - len(line.lstrip()) == indent:
            found.append((match[1], match[2].strip()))
        elif found and line.strip():
            found[-1] = found[-1][0], f"{found[-1][1]} {line.strip()}"
    return found


def _of_type(hint: Any) -> dict[str, Any] | None:
    """Returns the schema of an annotation, None where there is none."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        others = [part for part in parts if part is not types.NoneType]
        found = _of_type(others[0]) if len(others) == 1 else None
        return found and found | {"nullable": True}  # as transformers describes it
    if origin is typing.Literal:
        kind = _TYPES.get(type(parts[0]))
        return {"type": kind, "enum": list(parts)} if kind else None
    kind = _TYPES.get(origin or hint)
    if kind is None:
        return None
    items = _of_type(parts[0]) if kind == "array" and parts else None
    return {"type": kind} | ({"items": items} if items else {})


def run(tools: Mapping[str, Tool], call: Call) -> str:
    """Returns the result of a call as text; "error: ..." for one that does not fit, or if the tool raises.

    A result of more than MAX_RESULT bytes is an error as well. Such an error is a mistake of the model, which sees the
    text. The environment has not failed.
    """
    text = _run(tools, call)
    size = len(json.dumps(text))
    return text if size <= MAX_RESULT else f"error: the result has {size:,} bytes; the limit is {MAX_RESULT:,}"


def _run(tools: Mapping[str, Tool], call: Call) -> str:
    if call.name not in tools:
        return f"error: there is no tool {call.name!r}"
    arguments = json.loads(call.arguments)
    parameters = schema(tools[call.name])["function"]["parameters"]
    for name, value in arguments.items():
        allowed = parameters["properties"].get(name)
        if allowed is None:
            return f"error: {call.name} has no argument {name!r}"
        optional = value is None and name not in parameters["required"]
        if not optional and not _fits(value, allowed):
            return f"error: {name} must be of type {_described(allowed)}"
    missing = [name for name in parameters["required"] if name not in arguments]
    if missing:
        return f"error: {call.name} needs the argument {missing[0]!r}"
    try:
        return _text(tools[call.name](**arguments))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def _fits(value: Any, allowed: Mapping[str, Any]) -> bool:
    """Returns True for a value of JSON that fits the schema of an argument, with all items of lists."""
    kind = allowed["type"]
    if value is None:
        return "nullable" in allowed
    if not isinstance(value, _ACCEPTED[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return False
    return value in allowed.get("enum", [value]) and all(
        _fits(each, allowed["items"]) for each in (value if "items" in allowed else ())
    )


def _described(allowed: Mapping[str, Any]) -> str:
    choices = f", one of {', '.join(map(str, allowed['enum']))}" if "enum" in allowed else ""
    null = " or null" if "nullable" in allowed else ""
    return allowed["type"] + (f" of {_described(allowed['items'])}" if "items" in allowed else "") + null + choices


def _text(result: Any) -> str:
    """Returns the result of a tool as JSON, or as Python writes it where JSON has no such value; a text unchanged."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are tuples, a list in itself
        return str(result)

"""Chat templates: a model's Jinja source rendered as transformers renders it, and the messages.

A template is code from the model's folder. It runs in jinja2's immutable sandbox, with the extensions, filters and
globals of transformers and nothing else. The date that it gets is `DATE`, not today's. The sandbox limits neither the
iterations of loops nor the sizes of values, so they are limited here.
"""

import dataclasses
import datetime
import functools
import json
import math
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import exceptions, ext, meta, nodes, sandbox, utils, visitor

from reinforce_ada_jax.config import INSTRUCTION, SYSTEM, Config
from reinforce_ada_jax.files import model_files

# Date for templates that print one. With today's, a run would depend on more than its seed; Llama's have this default.
DATE = datetime.date(2024, 7, 26)
# Limits of a template and one rendering: the longest published template has 10,000 characters, and one iteration per
# message.
MAX_SOURCE, MAX_ITERATIONS, MAX_SIZE, MAX_SECONDS = 10**6, 10**5, 10**6, 2.0
_WIDE = re.compile(rf"\d{{{len(str(MAX_SIZE))},}}")


@dataclasses.dataclass(frozen=True)
class Chat:
    """System message and instruction around a problem; by default the paper's."""

    system: str = SYSTEM  # the system message; "" for none
    instruction: str = INSTRUCTION  # text after the problem and a space in the user's message; "" for none
    date: datetime.date = DATE  # date that the template gets as today's
    tools: Sequence[Mapping[str, Any]] = ()  # descriptions of functions that the model may call

    def messages(self, problem: str) -> list[dict[str, str]]:
        """Returns the conversation that the model continues."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        user = f"{problem} {self.instruction}" if self.instruction else problem
        return [*system, {"role": "user", "content": user}]


CHAT = Chat()


def chat_from_config(config: Config) -> Chat:
    """Returns the `Chat` of `data.system` and `data.instruction`."""
    return Chat(config.data.system, config.data.instruction)


def _offer_tools(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]] | None]:
    """Returns the messages and tools to render; if the template knows no tools, they are in the messages.

    Then the system message ends with their descriptions, and a tool's result is a message of the user.
    """
    if not tools or takes_tools(template):
        return list(messages), list(tools) or None
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'
    text = f"To call a function, answer {call}. The functions are:\n{lines}"
    rest = [
        {"role": "user", "content": f"<tool_response>{message.get('content', '')}</tool_response>"}
        if message["role"] == "tool"
        else message
        for message in messages
    ]
    if rest[0]["role"] == "system":
        return [{"role": "system", "content": f"{rest[0]['content']}\n\n{text}"}, *rest[1:]], None
    return [{"role": "system", "content": text}, *rest], None


def read_template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
    """Returns the folder's chat template or None; chat_template.jinja precedes the others, as in transformers."""
    text = model_files.read_text(folder / "chat_template.jinja")
    if text is not None:
        return text
    named_file = model_files.read_json(folder / "chat_template.json") or {}
    template = named_file.get("chat_template", config.get("chat_template"))
    if isinstance(template, list) and all(isinstance(entry, dict) and "name" in entry for entry in template):
        named = {str(entry["name"]): entry.get("template") for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: its chat template is a {type(template).__name__}, not text: copy the files again.")
    return template


class _Generation(ext.Extension):
    """Extension for {% generation %}, which marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which transformers refuses."""

    def __init__(*args, **kwargs):
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise exceptions.SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")


class _Counted(visitor.NodeTransformer):
    """Transformer that counts iterations of loops and calls of macros, and checks the size of `a ~ b`.

    The calls that it inserts go to attributes of the environment, which the template's own names cannot hide.
    """

    def visit_For(self, node):  # noqa: N802  (jinja2's)
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("count_iteration"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call))
        return node.set_lineno(node.lineno)

    visit_Macro = visit_CallBlock = visit_For  # noqa: N815

    def visit_Concat(self, node):  # noqa: N802
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None, lineno=node.lineno)


def _refuse(condition: bool, reason: str) -> None:
    if condition:
        raise exceptions.SecurityError(f"{reason}: no chat template needs that")


def _size(value: Any) -> int:
    """Returns the characters of a text or a list of texts; any other item of a list counts as one."""
    if isinstance(value, list | tuple):
        return sum(len(each) if isinstance(each, str) else 1 for each in value)
    return len(value) if isinstance(value, str) else 0


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """Sandbox with limits. It checks widths and repetitions before it computes them."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    iterations, start = 0, 0.0

    def begin(self) -> None:
        self.iterations, self.start = 0, time.thread_time()

    def _parse(self, source, name, filename):
        _refuse(len(source) > MAX_SOURCE, f"a template of {len(source):,} characters")
        tree = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def count_iteration(self) -> None:
        self.iterations += 1
        _refuse(self.iterations > MAX_ITERATIONS, f"more than {MAX_ITERATIONS:,} iterations of loops")
        _refuse(time.thread_time() - self.start > MAX_SECONDS, f"more than {MAX_SECONDS:g} seconds of the processor")

    def join(self, *parts) -> str:
        text = "".join(map(str, parts))
        _refuse(len(text) > MAX_SIZE, f"a text of {len(text):,} characters")
        return text

    def call_binop(self, context, operator, left, right):
        number = next((abs(x) for x in (right, left) if isinstance(x, int)), 0)
        match operator:
            case "*":
                bits = left.bit_length() + right.bit_length() if isinstance(left, int) and isinstance(right, int) else 0
                size = max(_size(left) * number, _size(right) * number, bits)
            case "**":
                size = left.bit_length() * number if isinstance(left, int) and isinstance(right, int) else 0
            case "+":
                size = _size(left) + _size(right)
            case _:
                size = MAX_SIZE + 1 if isinstance(left, str) and (_WIDE.search(left) or "*" in left) else 0
        _refuse(size > MAX_SIZE, f"a value as large as by this {operator!r}")
        return super().call_binop(context, operator, left, right)

    def call(*args: Any, **kwargs: Any) -> Any:  # self, context, callable, and the template's arguments, of any name
        _, _, function, *given = args
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, str):
            formats = getattr(function, "__name__", "") in ("format", "format_map")
            _refuse(formats and bool(_WIDE.search(text)), "a width")
            _bounded([text, *given], kwargs)
        else:
            _bounded(given, kwargs)
        return sandbox.ImmutableSandboxedEnvironment.call(*args, **kwargs)


def _bounded(arguments: Sequence[Any], named: dict[str, Any]) -> None:
    """Refuses arguments that may make a too large value: a width, or a text that replaces each letter."""
    values = [*arguments, *named.values()]
    numbers = [value for value in values if isinstance(value, int)]
    _refuse(max(numbers, default=0) > MAX_SIZE, f"a number above {MAX_SIZE:,} as an argument")
    sizes = sorted(map(_size, values))[-2:]
    _refuse(len(sizes) == 2 and math.prod(sizes) > 100 * MAX_SIZE, "arguments as long")


def _with_bounds(function):
    @functools.wraps(function)
    def bounded(*arguments, **named):
        _bounded(arguments, named)
        return function(*arguments, **named)

    return bounded


def _formatted(value, *arguments, **named):
    """Formats as Jinja's filter does, without widths of a million."""
    _refuse(bool(_WIDE.search(value)) or "*" in value, "a width as large")
    return str(value) % (named or arguments)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Returns JSON without the escapes for HTML of Jinja's filter."""
    # A number is a value here, as the default of a tool's argument is, and no width: it may be large.
    _bounded([None if isinstance(value, int) else value, indent, separators], {})
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise exceptions.TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compile(template: str, date: datetime.date) -> tuple[_Environment, jinja2.Template]:
    """Compiles a template in 3 ms, while a rendering takes 0.03 ms; a run renders one template ten thousand times."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
    environment.filters |= {
        name: _with_bounds(environment.filters[name])
        for name in ("batch", "center", "indent", "join", "replace", "slice")
    }
    environment.filters |= {"tojson": _to_json, "format": _formatted}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = date.strftime
    environment.globals["namespace"] = _Namespace
    del environment.globals["lipsum"]  # any number of paragraphs, and no template needs one
    return environment, environment.from_string(template)


@functools.lru_cache(maxsize=8)
def takes_tools(template: str) -> bool:
    """Returns True if the template reads the variable `tools`.

    The word alone says less: Phi-4-mini's reads a field `tools` of a message. Raises jinja2.TemplateError where the
    template is invalid.
    """
    environment, _ = _compile(template, DATE)
    return "tools" in meta.find_undeclared_variables(environment.parse(template))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its reasoning under the two names that templates read, as in transformers 5."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: dict[str, str],
    date: datetime.date = DATE,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns the text of a conversation up to the start of the assistant's answer.

    Messages have "role" and "content"; `special_tokens` maps "bos_token", ... to their text. Tools that the template
    does not know are described in the system message. Raises jinja2.TemplateError where the template refuses the
    messages, is invalid, fails, or breaks a rule or a limit of the sandbox.
    """
    # As in transformers. Parquet fills fields with None, and templates ask whether a message has "tool_calls".
    filled = [{name: value for name, value in message.items() if value is not None} for message in messages]
    filled = list(map(_with_reasoning, filled))
    try:
        messages, offered = _offer_tools(template, filled, tools)
        environment, compiled = _compile(template, date)
        environment.begin()
        return compiled.render(
            messages=messages,
            tools=offered,
            documents=None,
            add_generation_prompt=True,
            date_string=date.strftime("%d %b %Y"),
            **special_tokens,
        )
    except exceptions.TemplateError:
        raise
    except Exception as error:  # a template is a program: 1 / 0, an endless recursion, range(10**9)
        raise exceptions.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error

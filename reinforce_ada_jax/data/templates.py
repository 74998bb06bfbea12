r"""Chat templates: the Jinja source that comes with a model, rendered as transformers renders it, and the messages.

A template is code from the model's folder. It runs in jinja2's immutable sandbox, with what transformers gives it (its
extensions, filters and globals) and nothing else; the date is the configuration's, not today's. What the sandbox leaves
to it is bounded here: turns of loops, and the size of what it makes.
"""

import dataclasses
import datetime
import functools
import json
import math
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2 import exceptions, ext, nodes, sandbox, utils, visitor

from reinforce_ada_jax.config import DAY, INSTRUCTION, SYSTEM

# Llama's templates print today's date otherwise, and a run would not be its seed. This is the day they fall back on.
DATE = datetime.date.fromisoformat(DAY)
# A model's JSON files have some MB at most; its tokenizer.json some dozens of them.
MAX_JSON_BYTES = 64 * 2**20
# Of a template and one rendering: the longest published template has 10,000 characters, and a turn for each message.
MAX_SOURCE, MAX_TURNS, MAX_SIZE, MAX_SECONDS = 10**6, 10**5, 10**6, 10.0
_WIDE = re.compile(rf"\d{{{len(str(MAX_SIZE))},}}")


@dataclasses.dataclass(frozen=True)
class Chat:
    """What is said around a problem.

    Attributes:
      system: the system message; "" for none.
      instruction: follows the problem and a space in the user's message; "" for nothing.
      date: what a template is told that today is.
    """

    system: str = SYSTEM
    instruction: str = INSTRUCTION
    date: datetime.date = DATE

    def messages(self, problem: str) -> list[dict[str, str]]:
        """The conversation that the model is to continue."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        user = f"{problem} {self.instruction}" if self.instruction else problem
        return [*system, {"role": "user", "content": user}]


def chat_from_config(config: Any) -> Chat:
    """What `data.system`, `data.instruction` and `data.date` say."""
    return Chat(config.data.system, config.data.instruction, datetime.date.fromisoformat(config.data.date))


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no such file; ValueError where it can be no model's."""
    if not file.exists():
        return {}
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(
            f"{file} has {file.stat().st_size:,} bytes, more than {MAX_JSON_BYTES:,}: copy it from the model's folder "
            "again."
        )
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # of nesting too deep for the decoder
        raise ValueError(f"{file} is not valid JSON ({error}): copy it from the model's folder again.") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{file} holds a {type(value).__name__}, not an object: copy it from the model's folder again."
        )
    return value


def read_template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
    """The folder's chat template or None. A file of its own goes before tokenizer_config.json, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.exists():
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{file} has {file.stat().st_size:,} bytes, more than {MAX_JSON_BYTES:,}: copy it again.")
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no text ({error}): copy it from the model's folder again.") from error
    template = read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list) and all(isinstance(entry, dict) and "name" in entry for entry in template):
        template = {str(entry["name"]): entry.get("template") for entry in template}.get(
            "default"
        )  # several named ones
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: its chat template is a {type(template).__name__}, not text: copy the files again.")
    return template


class _Generation(ext.Extension):
    """{% generation %}: marks, for those who train on conversations, what the assistant said. Here, only its body."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore: transformers refuses them."""

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
    """Has every turn of a loop and every call of a macro counted, and `a ~ b` made where its size is looked at.

    Attributes of the environment: names could be covered by the template's own.
    """

    def visit_For(self, node):  # noqa: N802  (jinja2's)
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("count_turn"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call))
        return node.set_lineno(node.lineno)

    visit_Macro = visit_CallBlock = visit_For  # noqa: N815

    def visit_Concat(self, node):  # noqa: N802
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None, lineno=node.lineno)


def _refuse(holds: bool, what: str) -> None:
    if holds:
        raise exceptions.SecurityError(f"{what}: no template for chats needs that")


def _size(value: Any) -> int:
    """Characters of a text or a list of texts; anything else in a list counts as one."""
    if isinstance(value, list | tuple):
        return sum(len(each) if isinstance(each, str) else 1 for each in value)
    return len(value) if isinstance(value, str) else 0


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with bounds. Widths and repetitions are looked at before they are honoured."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    turns, began = 0, 0.0

    def begin(self) -> None:
        """Counts from here on."""
        self.turns, self.began = 0, time.monotonic()

    def _parse(self, source, name, filename):
        _refuse(len(source) > MAX_SOURCE, f"a template of {len(source):,} characters")
        tree = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def count_turn(self) -> None:
        self.turns += 1
        _refuse(self.turns > MAX_TURNS, f"more than {MAX_TURNS:,} turns of loops")
        _refuse(time.monotonic() - self.began > MAX_SECONDS, f"more than {MAX_SECONDS:g} seconds")

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

    def call(*args, **kwargs):  # self, context, callable, and what the template gives: of any name
        _, _, function, *given = args
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, str):
            _refuse(
                getattr(function, "__name__", "") in ("format", "format_map") and bool(_WIDE.search(text)), "a width"
            )
            _bounded([text, *given], kwargs)
        else:
            _bounded(given, kwargs)
        return sandbox.ImmutableSandboxedEnvironment.call(*args, **kwargs)


def _bounded(arguments: Sequence[Any], named: dict[str, Any]) -> None:
    """Refuses arguments of which something too large may be made: a width, or a text put in place of each letter."""
    values = [*arguments, *named.values()]
    numbers = [value for value in values if isinstance(value, int)]
    _refuse(max(numbers, default=0) > MAX_SIZE, f"a number above {MAX_SIZE:,} as an argument")
    sizes = sorted(map(_size, values))[-2:]
    _refuse(len(sizes) == 2 and math.prod(sizes) > 100 * MAX_SIZE, "arguments as long")


def _with_bounds(function):
    """A filter whose arguments are looked at first."""

    @functools.wraps(function)
    def bounded(*arguments, **named):
        _bounded(arguments, named)
        return function(*arguments, **named)

    return bounded


def _formatted(value, *arguments, **named):
    """Jinja's filter, without widths of a million."""
    _refuse(bool(_WIDE.search(value)) or "*" in value, "a width as large")
    return str(value) % (named or arguments)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise exceptions.TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compile(template: str, date: datetime.date) -> jinja2.Template:
    """Compiling takes 3 ms, rendering 0.03 ms, and a run renders one template ten thousand times."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
    environment.filters |= {
        name: _with_bounds(environment.filters[name]) for name in ("center", "indent", "replace", "join")
    }
    environment.filters |= {"tojson": _with_bounds(_to_json), "format": _formatted}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = date.strftime
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


def render_chat(
    template: str, messages: list[dict[str, str]], special_tokens: dict[str, str], date: datetime.date = DATE
) -> str:
    """The text of a conversation, ending where the assistant is to begin.

    Args:
      template: Jinja source.
      messages: dicts with "role" and "content".
      special_tokens: "bos_token", ... to their text; templates write them.
      date: of the day that templates print.

    Raises:
      jinja2.TemplateError: the template refuses the messages, is no valid Jinja, fails, or wants out of the sandbox or
        beyond its bounds.
    """
    try:
        compiled = _compile(template, date)
        compiled.environment.begin()
        return compiled.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            date_string=date.strftime("%d %b %Y"),
            **special_tokens,
        )
    except exceptions.TemplateError:
        raise
    except Exception as error:  # it is somebody's program: 1 / 0, a recursion without end, range(10**9)
        raise exceptions.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error

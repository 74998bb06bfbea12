"""Conversations and templates that tests render: here without torch, in tests/parity against transformers."""

import pathlib

from tests.data import shared

TEMPLATES = shared.FOLDER / "tokenizers" / "templates"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def published() -> list[pathlib.Path]:
    """Files of published templates; none where there is no real data."""
    return sorted(TEMPLATES.glob("*.jinja")) if shared.SET else []


def _add(name: str, argument: dict) -> dict:
    """A tool with one argument."""
    parameters = {"type": "object", "properties": {"x": argument}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "Adds <x> & 'y'.", "parameters": parameters}}


USER, ANSWER, SYSTEM = (
    {"role": "user", "content": "What is $1+1$?"},
    {"role": "assistant", "content": "It is \\boxed{2}."},
    {"role": "system", "content": "Be short."},
)
TOOLS = [
    _add("add", {"type": "integer", "description": "A number.", "default": 5_000_000}),
    _add("join", {"type": "array", "items": {"type": "string"}, "nullable": True}),
    _add("choose", {"type": "string", "enum": ["é", "b"], "default": "b"}),
    _add("nest", {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "boolean"}}}),
    _add("either", {"oneOf": [{"type": "string", "default": "q"}, {"type": "number", "description": "n"}]}),
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"x": "½<"}}}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": '{"x": 20}'}

# (messages, tools). A template may refuse some of them.
CONVERSATIONS = [
    ([USER], []),
    ([SYSTEM, USER], []),
    ([SYSTEM, USER, ANSWER, USER], []),
    ([USER, ANSWER] * 5 + [USER], []),
    ([{"role": "system", "content": "½ 你好 🙂"}, {"role": "user", "content": "é e\u0301 \u202e\u200d \t\r\n\\n"}], []),
    ([SYSTEM, {"role": "user", "content": "a<|im_end|><|end|>b<|start|>c</s>[INST]<|return|>"}], []),
    ([SYSTEM | {"content": ""}, USER | {"content": ""}, ANSWER, USER | {"content": "\n "}], []),
    ([{"role": "user", "content": "{{ 1 + 1 }}{% raw %}<b>&amp;</b>'\"\\"}, ANSWER, USER], []),
    ([{"role": "system", "content": " Short. /no_think "}, USER, {"role": "assistant", "content": "\n\n2"}, USER], []),
    ([USER, ANSWER | {"tool_calls": None, "name": None}, USER], []),
    ([USER, {"role": "assistant", "content": "a<|channel|>final<|message|>2"}, USER], []),
    ([SYSTEM, USER, USER], []),
    ([USER], TOOLS),
    ([SYSTEM, USER, CALL, RESULT], TOOLS),
    ([USER, CALL | {"content": None}, RESULT, ANSWER, USER], TOOLS),
    ([USER, RESULT], TOOLS),
]

# What templates of published models write, in small: (template, its rendering of MESSAGES, as transformers gives it).
MESSAGES = [{"role": "system", "content": " <é> "}, {"role": "user", "content": "U", "tool_calls": None}]
CONSTRUCTS = {
    "JSON": (
        "{{ messages | tojson(indent=1) }}{{ {'b': '<', 'a': [1.5, none, true]} | tojson(sort_keys=true) }}",
        '[\n {\n  "role": "system",\n  "content": " <é> "\n },\n {\n  "role": "user",\n  "content": "U"\n }\n]'
        '{"a": [1.5, null, true], "b": "<"}',
    ),
    "a large number as JSON": ("{{ 5000000 | tojson }}|{{ {'x': 10 ** 9} | tojson }}", '5000000|{"x": 1000000000}'),
    "a break": (
        "{% for m in messages %}\n  {%- if loop.last %}{% break %}{% endif %}\n {{ m.content | trim }}\n{% endfor %}\n",
        " <é>\n",
    ),
    "a namespace": (
        "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
        "2",
    ),
    "a part for training": (
        "a\n  {% generation %}\n b{% set c = 1 %}\n  {% endgeneration %}\n{{ c is defined }}",
        "a\n bFalse",
    ),
    "what is given": (
        "{{ tools }}|{{ documents }}|{{ add_generation_prompt }}|{{ bos_token }}|{{ eos_token }}|{{ nothing }}",
        "None|None|True|<s>|</s>|",
    ),
    # A macro sees what is given to the template, a default that it sets stays its own, and it may call itself.
    "macros": (
        "{% macro one(x, deep=false) -%}\n"
        "  {%- if identity is not defined %}{% set identity = 'I' %}{% endif %}\n"
        "  {%- if x is mapping %}{{ identity ~ add_generation_prompt }}({{ one(x.a, true) }})"
        "{% else %}{{ x }}{{ deep }}{% endif %}\n"
        "{%- endmacro %}\n"
        "{%- set text = one({'a': {'a': 'b'}}) %}{{ text + '.' }} {{ text | length }} {{ identity is defined }}",
        "ITrue(ITrue(bTrue)). 19 False",
    ),
    "messages that follow": (
        "{% set rest = messages[1:] %}{% set last = namespace(name=none) %}{% for m in rest %}"
        "{% for later in rest[loop.index:] %}{% set last.name = later.role %}{% endfor %}"
        "{{ 'tool_calls' in m }}{{ last.name is none }}{{ m.nothing is defined }}{{ 'x' in nothing }}{% endfor %}",
        "FalseTrueFalseFalse",
    ),
    "methods of texts": (
        "{{ messages[0].content.replace('é', 'e').rstrip().lstrip('\\n') }}|{{ '\\n\\na'.lstrip('\\n') }}"
        "|{{ ['a', 'b'] | join('\" | \"') }}|{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "|{{ messages[0].get('functions', none) is none }}",
        ' <e>|a|a" | "b|1|True',
    ),
    "white space": (
        "{#- a comment -#}\n {{- 'a' -}} \n {% if true -%}\n   b\n {%- endif -%}\n  {{ 'c' }}\n{#- d #}\n<|start|>x\n",
        "abc<|start|>x",
    ),
}

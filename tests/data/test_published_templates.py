"""Chat templates of published models, by hashes of what transformers renders, and what they write in small."""

import datetime
import hashlib
import json

import jinja2
import pytest

from reinforce_ada_jax.data.templates import Chat, render_chat, takes_tools
from tests.data import conversations, shared
from tests.running import ROOT

GOLDEN = json.loads((ROOT / "tests" / "golden" / "templates" / "renderings.json").read_text())["templates"]


def rendered(template, messages, tools=()):
    return render_chat(template, messages, conversations.SPECIAL_TOKENS, tools=tools)


@pytest.mark.parametrize("name", conversations.CONSTRUCTS)
def test_what_published_templates_write(name):
    template, expected = conversations.CONSTRUCTS[name]
    assert rendered(template, conversations.MESSAGES) == expected


@pytest.mark.data
@pytest.mark.skipif(not shared.SET, reason=f"real data: set {shared.VARIABLE}")
@pytest.mark.parametrize("name", GOLDEN)
def test_published_templates(name):
    """Each conversation gives the text of transformers, or is refused as there."""
    file = conversations.TEMPLATES / f"{name}.jinja"
    if not file.exists():
        pytest.skip(f"{file} is not there (tests/golden/templates/README.md)")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == GOLDEN[name]["template"]
    template, hashes = file.read_text(), GOLDEN[name]["renderings"]
    for (messages, tools), expected in zip(conversations.CONVERSATIONS, hashes, strict=True):
        if tools and not takes_tools(template):  # transformers leaves them out, here the system message has them
            continue
        try:
            text = rendered(template, messages, tools)
        except jinja2.TemplateError:
            assert expected is None, messages
        else:
            assert hashlib.sha256(text.encode()).hexdigest()[:16] == expected, (messages, text)


def test_fields_of_none_are_no_fields():
    """A file of Parquet fills fields that other messages have."""
    template = "{% for m in messages %}{{ m.role }}{{ 'tool_calls' in m }}{{ m.content is defined }};{% endfor %}"
    assert rendered(template, [{"role": "assistant", "content": None, "tool_calls": None}]) == "assistantFalseFalse;"
    assert rendered(template, [{"role": "user", "content": "U", "tool_calls": []}]) == "userTrueTrue;"


def test_a_field_named_tools_takes_no_tools():
    """As in Phi-4-mini, whose template would not have shown the model the tools that it is offered."""
    field = "{% for m in messages %}{{ m.content }}{% if 'tools' in m %}{{ m['tools'] }}{% endif %}{% endfor %}"
    (tool, *_) = conversations.TOOLS
    assert not takes_tools(field)
    text = rendered(field, [conversations.SYSTEM, conversations.USER], [tool])
    assert text.startswith('Be short.\n\nTo call a function, answer <tool_call>{"name": NAME') and '"add"' in text
    for taken in ("{{ tools }}", "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}"):
        assert takes_tools(taken)
    assert takes_tools("{% macro m() %}{% for tool in tools %}{{ tool }}{% endfor %}{% endmacro %}{{ m() }}")
    with pytest.raises(jinja2.TemplateError):
        rendered("{% if tools %}", [conversations.USER], [tool])


def test_a_width_of_json_is_bounded_and_a_number_is_not():
    assert rendered("{{ (0 - 10 ** 12) | tojson }}", []) == "-1000000000000"
    for template in (
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ range(99999) | list | tojson(separators=(',' * 99999, ':')) }}",
    ):
        with pytest.raises(jinja2.TemplateError, match="no chat template needs that"):
            rendered(template, [])


def test_the_date_of_a_chat_is_that_of_templates():
    template = "{% macro m() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ m() }}"
    date = datetime.date(2025, 8, 5)
    assert render_chat(template, Chat().messages("1"), {}, date) == "2025-08-05"

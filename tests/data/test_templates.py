"""Rendering of templates as transformers renders them; tests/parity/test_templates.py compares with it live."""

import datetime
import json
import time

import jinja2
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config, DataConfig, ModelConfig
from reinforce_ada_jax.data import templates
from reinforce_ada_jax.data.templates import Chat, chat_from_config, render_chat
from tests import standins

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


def render(template, date=templates.DATE):
    return render_chat(template, MESSAGES, {"bos_token": "<s>"}, date)


def test_templates_see_what_transformers_gives_them():
    assert render("{{ messages | tojson }}") == json.dumps(MESSAGES)
    # Jinja's own filter would write \u003c; ours passes the options of json.dumps on.
    assert render("{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}") == '{"a":1,"b":"<é>"}'
    assert render("{% for m in messages %}\n    {{- m.role }}\n    {% break %}\n{% endfor %}") == "system\n"
    assert render("{% if tools is not none or documents is not none %}tools{% endif %}") == ""
    # trim_blocks and lstrip_blocks: a line that holds only a tag leaves nothing.
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert render("{{ bos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}.") == "<s>S."
    assert render("{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}") == "2"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_read_under_the_names_of_templates(name):
    # transformers 5.23, render_jinja_template: gpt-oss reads `thinking`, Qwen3 `reasoning_content`.
    template = "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning_content }}/{{ m.content }};{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "deep"}]
    assert render_chat(template, messages, {}) == "//a;deep/deep/b;"


def test_the_date_is_pinned():
    assert render("{{ date_string }}|{{ strftime_now('%Y-%m-%d') }}") == "26 Jul 2024|2024-07-26"
    assert render("{{ date_string }}|{{ strftime_now('%d') }}", datetime.date(2025, 1, 2)) == "02 Jan 2025|02"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append.__globals__ }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ open('/etc/passwd') }}",
        "{% if %}",
        # The ways out of Python's sandboxes that are known.
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}{{ ''['__cla' ~ 'ss__'].__base__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': 1}).y.z }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].system('id') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment.from_string('x') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__self__.__class__.__subclasses__() }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
        "{% for m in messages %}{{ loop.__class__.__mro__[1].__subclasses__() }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages.pop() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{% extends '/etc/passwd' %}",
    ],
)
def test_what_a_template_may_not_do(template):
    with pytest.raises(jinja2.TemplateError):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
        "{% set count_turn = 1 %}{% set environment = 1 %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s|replace('x', n.s) %}{% endfor %}",
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s.replace('x', n.s) %}{% endfor %}",
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = [n.s, n.s]|join(n.s) %}{% endfor %}",
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s.join([n.s] * 9) %}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ '%*d' % (1000000000000, 1) }}",
        "{{ '%1000000000000d'|format(1) }}",
        "{{ '{:1000000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000000) }}",
        "{{ 'x'.ljust(1000000000000) }}",
        "{{ 'x'|center(1000000000000) }}",
        "{{ 'x\nx'|indent(1000000000000) }}",
        "{{ [1]|tojson(indent=1000000000000) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.at_all }}",
        "x" * 2_000_000,
        "{{ " + "(" * 100_000,
        "{% if true %}" * 20_000,
    ],
    ids=lambda template: template[:60],
)
def test_what_takes_for_ever_or_all_memory_is_an_error(template, monkeypatch):
    standins.constants(monkeypatch, templates, MAX_SECONDS=0.5)  # 2 s are those of a user's machine
    begin = time.monotonic()
    with pytest.raises(jinja2.TemplateError):
        render(template)
    assert time.monotonic() - begin < 20  # of a busy machine: each takes less than 0.2 s


def test_the_limit_counts_the_time_of_the_processor(monkeypatch):
    """On a busy machine a rendering of a millisecond may take seconds."""
    standins.constants(monkeypatch, templates, MAX_SECONDS=0.2)
    standins.before(monkeypatch, templates._Environment, "count_iteration", lambda _: time.sleep(0.3))
    assert render("{% for i in range(1) %}{{ i }}{% endfor %}") == "0"
    standins.constants(monkeypatch, templates, MAX_SECONDS=1e-9)
    with pytest.raises(jinja2.TemplateError, match=r"more than 1e-09 seconds of the processor"):
        render("{% for i in range(2) %}{{ i }}{% endfor %}")


def test_bounds_leave_room_for_what_templates_do():
    assert render("{% for i in range(3) %}{{ i ~ '-' ~ loop.length }}{{ ',' if not loop.last }}{% endfor %}") == (
        "0-3,1-3,2-3"
    )
    assert render("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}{{ m('a' ~ none) }}") == "<1><aNone>"
    assert render("{{ 'a' * 3 + 'b' }} {{ 2 ** 10 }} {{ '%05.1f' % 2.25 }} {{ '%s!' | format('x') }}") == (
        "aaab 1024 002.2 x!"
    )
    assert render("{{ '{:>4}'.format('x') }}{{ 'x'|center(3) }}{{ 'a\nb'|indent(2) }}") == "   x x a\n  b"
    long = "{% for i in range(1000) %}{{ i }}{% endfor %}"
    assert all(render(long) == "".join(map(str, range(1000))) for _ in range(101))  # each rendering has its own count


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"chat_template.jinja": b"\xff\xfe"}, "chat_template.jinja is not text"),
        ({"chat_template.json": b'{"chat_template": 3}'}, "its chat template is a int, not text"),
        ({"chat_template.json": b'{"chat_template": [3]}'}, "its chat template is a list, not text"),
        ({"chat_template.json": b"[]"}, "chat_template.json holds a list, not an object"),
        ({"chat_template.json": b"[" * 200_000}, "chat_template.json is nested too deeply"),
    ],
)
def test_files_that_hold_no_template(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        templates.read_template(tmp_path, {})


def test_messages():
    """A chat has the system message, and the problem with its suffix."""
    assert Chat().messages("1+1?") == [
        {"role": "system", "content": r"Please reason step by step, and put your final answer within \boxed{}."},
        {"role": "user", "content": r"1+1? Let's think step by step and output the final answer within \boxed{}."},
    ]
    assert Chat("", "Go.").messages("1+1?") == [{"role": "user", "content": "1+1? Go."}]
    assert Chat("S", "").messages("1+1?") == [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]


def test_the_configuration_says_what_the_paper_says():
    assert chat_from_config(Config()) == Chat()
    assert chat_from_config(Config(data=DataConfig(system=""))) == Chat(system="")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "chatml"}, "data.template is 'chatml'; it must be one of plain, qwen_math, chat"),
        ({"system": "S"}, r"used by data.template='chat' only, and it is 'qwen_math'"),
        ({"system": "", "instruction": ""}, r"it is 'qwen_math': set data.template=chat, or leave the two out"),
        ({"template": "plain", "system": "", "instruction": "Go."}, r"and it is 'plain'"),
    ],
)
def test_what_the_configuration_refuses(changes, message):
    config = Config(model=ModelConfig(path="model"), data=DataConfig(prompts="problems.jsonl", **changes))
    with pytest.raises(ValueError, match=message):
        config_lib.check(config)


@pytest.mark.parametrize(("template", "instruction"), [("chat", "Go."), ("plain", "")])  # plain adds no text either way
def test_the_configuration_takes_texts(template, instruction):
    data = DataConfig(prompts="problems.jsonl", template=template, system="", instruction=instruction)
    config_lib.check(Config(model=ModelConfig(path="model"), data=data))

"""Rendering of templates as transformers renders them; tests/parity/test_templates.py compares with it live."""

import datetime
import json

import jinja2
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.data import templates
from reinforce_ada_jax.data.templates import Chat, chat_from_config, render_chat

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
    ],
)
def test_what_a_template_may_not_do(template):
    with pytest.raises(jinja2.TemplateError):
        render(template)


def test_messages():
    assert Chat().messages("1+1?") == [
        {"role": "system", "content": r"Please reason step by step, and put your final answer within \boxed{}."},
        {
            "role": "user",
            "content": r"1+1? Let's think step by step and output the final answer within \boxed{}.",
        },
    ]
    assert Chat("", "Go.").messages("1+1?") == [{"role": "user", "content": "1+1? Go."}]
    assert Chat("S", "").messages("1+1?") == [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]


def test_the_configuration_says_what_the_paper_says():
    config = config_lib.defaults()
    assert chat_from_config(config) == Chat()
    config.data.date = "2025-01-02"
    config.data.system = ""
    assert chat_from_config(config) == Chat(system="", date=datetime.date(2025, 1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "chatml"}, "data.template is 'chatml'; it must be one of plain, qwen_math, chat"),
        ({"system": "S"}, r"used by data.template='chat' only, and it is 'qwen_math'"),
        ({"date": "26 Jul 2024"}, r"data.date is '26 Jul 2024'; it must be a day as 2024-07-26"),
    ],
)
def test_what_the_configuration_refuses(changes, message):
    config = config_lib.defaults()
    config.model.path, config.data.prompts = "model", "problems.jsonl"
    config.data.update(changes)
    with pytest.raises(ValueError, match=message):
        config_lib.validate(config)


def test_the_configuration_takes_texts_for_chat():
    config = config_lib.defaults()
    config.model.path, config.data.prompts = "model", "problems.jsonl"
    config.data.update({"template": "chat", "system": "", "instruction": "Go."})
    config_lib.validate(config)

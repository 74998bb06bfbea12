"""Tokens between the turns of a model, in chat templates that do and do not know tools."""

import dataclasses

import pytest

from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.data.turns import following
from tests.data.chatml import CHATML, write_chatml

WITH_TOOLS = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + CHATML
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
FIRST = [{"role": "user", "content": "2 + 3"}]
HINT = [{"role": "user", "content": "more"}]
RESULT = [{"role": "tool", "content": "5"}]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    """A tokenizer of characters, with the marks of ChatML as tokens."""
    return Tokenizer.load(write_chatml(tmp_path_factory.mktemp("chatml")))


def text(tokenizer, tokens):
    return "".join(tokenizer.token(int(token)) for token in tokens)


def with_template(tokenizer, template):
    return dataclasses.replace(tokenizer, chat_template=template)


def test_a_turns_tokens_are_what_the_template_puts_after_it(chatml):
    chat, end = Chat("", ""), chatml.encode("<|im_end|>")[0]
    prompt = chatml.render("", "chat", chat, messages=FIRST)
    assert text(chatml, prompt) == "<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n"
    between = following(chatml, chat, FIRST, HINT, int(end))
    assert text(chatml, between) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    # Prompt, the turn with its stop token, and what follows are the rendered conversation.
    conversation = [*FIRST, {"role": "assistant", "content": "4"}, *HINT]
    whole = text(chatml, prompt) + "4<|im_end|>" + text(chatml, between)
    assert whole == chatml.render_text("", chat, conversation)


def test_another_stop_token_stays_before_the_end_of_the_turn(chatml):
    other = int(chatml.encode("<|endoftext|>")[0])
    assert text(chatml, following(chatml, Chat(), FIRST, HINT, other)).startswith("<|im_end|>\n<|im_start|>user")


def test_tools_are_the_templates_where_it_knows_them(chatml):
    knowing = with_template(chatml, WITH_TOOLS)
    chat = Chat("", "", tools=[ADD])
    assert knowing.render_text("", chat, FIRST).startswith("[add]<|im_start|>user\n2 + 3")
    between = following(knowing, chat, FIRST, RESULT, 0)
    assert text(knowing, between) == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


def test_tools_are_described_in_words_where_the_template_knows_none(chatml):
    rendered = chatml.render_text("", Chat("", "", tools=[ADD]), [{"role": "system", "content": "Be kind."}, *FIRST])
    assert rendered == (
        '<|im_start|>system\nBe kind.\n\nTo call a function, answer <tool_call>{"name": NAME, "arguments": {...}}'
        '</tool_call>. The functions are:\n{"name": "add", "description": "Adds.", "parameters": {}}<|im_end|>\n'
        "<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n"
    )
    chat = Chat("", "", tools=[ADD])
    alone = chatml.render_text("", chat, FIRST)
    assert alone.startswith("<|im_start|>system\nTo call a function")
    between = following(chatml, chat, FIRST, RESULT, 0)
    assert "user\n<tool_response>5</tool_response><|im_end|>" in text(chatml, between)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}", "can't render a conversation"),
        ("{{ messages[0].content }}", "does not render the turns of the model"),
    ],
)
def test_templates_without_turns_are_refused(chatml, template, message):
    with pytest.raises(ValueError, match=message):
        following(with_template(chatml, template), Chat(), FIRST, HINT, 0)

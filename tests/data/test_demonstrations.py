"""Demonstrations of all dialects: the same tokens, the end as the template writes it, and rows that are refused."""

import dataclasses

import pytest

from reinforce_ada_jax.data import demonstrations
from reinforce_ada_jax.data.rows import BY_RULES, Columns
from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from tests.data.chatml import write_chatml
from tests.data.shared import write_rows

USER, ANSWER = {"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "It is 5."}
CHAT = Chat("", "")


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    return Tokenizer.load(write_chatml(tmp_path_factory.mktemp("chatml")))


def read(tmp_path, tokenizer, rows, *, columns=BY_RULES, template="chat", prompt=99, response=99):
    return demonstrations.read(
        write_rows(tmp_path / "rows.jsonl", rows), columns, tokenizer, template, CHAT,
        max_prompt_tokens=prompt, max_response_tokens=response,
    )  # fmt: skip


def texts(tokenizer, row):
    return tuple("".join(tokenizer.token(int(token)) for token in part) for part in (row.prompt.tokens, row.tokens))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER], "prompt": "another text", "response": "another", "answer": ["5", "five"]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": "2 + 3", "completion": "It is 5."},
        {"prompt": "2 + 3", "response": "It is 5."},
        {"prompt": [USER], "response": "It is 5.", "reward_model": {"ground_truth": "5"}},
        {"problem": "2 + 3", "solution": "It is 5.", "answer": "5"},
        {"question": "2 + 3", "answer": "It is 5."},
    ],
)
def test_rows_of_all_dialects_have_the_same_tokens(tmp_path, chatml, row):
    (found,) = read(tmp_path, chatml, [row])
    expected = "<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n", "It is 5.<|im_end|>"
    assert texts(chatml, found) == expected
    assert found.prompt.answer == "It is 5."


def test_named_columns_and_messages_of_a_conversation(tmp_path, chatml):
    row = {"problem": "x", "question": "2 + 3", "solution": "no", "generation": "It is 5."}
    (found,) = read(tmp_path, chatml, [row], columns=Columns("question", "generation"))
    assert texts(chatml, found)[1] == "It is 5.<|im_end|>" and found.prompt.problem == "2 + 3"
    (found,) = read(tmp_path, chatml, [row | {"messages": [USER]}], columns=Columns("question", ""))
    assert texts(chatml, found)[1] == "no<|im_end|>"
    (found,) = read(tmp_path, chatml, [{"messages": [USER, ANSWER, USER, ANSWER]}])
    prompt, response = texts(chatml, found)
    assert prompt.count("It is 5.") == 1 and response == "It is 5.<|im_end|>"  # only the last one is learned


def test_the_end_is_what_the_template_writes(tmp_path, chatml):
    spaced = dataclasses.replace(chatml, chat_template=chatml.chat_template.replace("<|im_end|>", "\n<|im_end|>"))
    (found,) = read(tmp_path, spaced, [{"messages": [USER, ANSWER]}])
    assert texts(chatml, found)[1] == "It is 5.\n<|im_end|>"
    (found,) = read(tmp_path, chatml, [{"prompt": "2 + 3", "response": "5"}], template="plain")
    assert texts(chatml, found) == ("2 + 3", "5<|im_end|>")
    endless = dataclasses.replace(chatml, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="writes none of the end tokens"):
        read(tmp_path, endless, [{"messages": [USER, ANSWER]}])


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"messages": [USER]}], "line 1: no response: none of completion, response"),
        ([{"prompt": "a", "completion": ""}], "completion is ''; a response must be a text that is not empty"),
        ([{"prompt": "a", "completion": [USER]}], "a response must be a text"),
        ([{"messages": [USER, ANSWER | {"tool_calls": [{"id": "a"}]}]}], "messages has tool_calls, and only content"),
        ([{"messages": [USER, ANSWER | {"reasoning_content": "deep"}]}], "has reasoning_content, and only content"),
        ([{"prompt": "a", "completion": [ANSWER | {"thinking": "deep"}]}], "completion has thinking, and only content"),
        ([{"prompt": "a", "completion": [ANSWER, ANSWER]}], "a response must be a text"),
        (
            [{"prompt": "a", "response": "b"}, {"id": "x", "prompt": "a", "response": "b" * 8},
             {"prompt": "c", "response": "b" * 20}],
            "2 responses .* have 9 to 21 tokens, limit 8: raise sampling.max_response_tokens.* 'x'",
        ),
        ([{"prompt": "a" * 60, "response": "b"}], "limit 60: raise data.max_prompt_tokens"),
    ],
)  # fmt: skip
def test_rows_that_are_refused(tmp_path, chatml, rows, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, chatml, rows, prompt=60, response=8)

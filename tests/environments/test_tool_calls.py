"""Calls in a model's text: what Python reads as JSON and others do not is no call."""

import json

import pytest

from reinforce_ada_jax.environments.tool_calls import Call, parse_calls, partial_length, settled_length


def in_tags(*texts):
    return "".join(f"<tool_call>{text}</tool_call>" for text in texts)


@pytest.mark.parametrize(
    "arguments",
    ['{"a": NaN}', '{"a": [1, Infinity]}', '{"a": {"b": -Infinity}}', '{"a": 1e999}', '{"a": "\\ud800"}', "[1]", "null",
     '"a"', "3"],
)  # fmt: skip
def test_arguments_that_no_client_could_read_are_no_call(arguments):
    """An interface passes them on as JSON, and a tool would get a number that JSON does not have."""
    text = f'{{"name": "add", "arguments": {arguments}}}'
    assert parse_calls(in_tags(text), {"add"}) == (in_tags(text), [])
    assert parse_calls(text, {"add"}) == (text, [])
    # Nor are the calls beside it, which the model would believe to be answered alone.
    good = '{"name": "add", "arguments": {}}'
    assert parse_calls(in_tags(good, text), {"add"})[1] == []


@pytest.mark.parametrize("name", ['"\\udfff"', "3", "null", '["add"]'])
def test_a_name_that_is_no_text_is_no_call(name):
    text = in_tags(f'{{"name": {name}, "arguments": {{}}}}')
    assert parse_calls(text, {"add"}) == (text, [])


def test_arguments_of_calls_are_json():
    given = {"a": 1, "b": [1.5, None, True], "c": {"d": "é", "e": 10**30}}
    text = (
        f"I add.{in_tags(json.dumps({'name': 'add', 'arguments': given}), json.dumps({'name': 'x', 'parameters': {}}))}"
    )
    before, calls = parse_calls(text, {"add"})
    assert before == "I add." and calls[1] == Call("x", "{}")
    assert json.loads(calls[0].arguments, parse_constant=pytest.fail) == given


def test_json_alone_is_a_call_of_a_function_that_is_offered():
    text = '{"name": "add", "arguments": {"a": 1}}'
    assert parse_calls(text, {"add"}) == ("", [Call("add", '{"a": 1}')])
    assert parse_calls(text, {"sub"}) == (text, []) and parse_calls("5", {"add"}) == ("5", [])


@pytest.mark.parametrize("text", ["I add." + in_tags("x"), "{", "a <tool", "a <tool_cal", "a<", "", "plain"])
def test_no_part_that_is_settled_is_ever_part_of_a_call(text):
    """Shown while the text grows: never more than is shown in the end."""
    lengths = [settled_length(text[:count]) for count in range(len(text) + 1)]
    assert lengths == sorted(lengths) and all(length <= count for count, length in enumerate(lengths))
    assert "<" not in text[: lengths[-1]]


def test_a_partial_word_is_the_longest():
    assert [partial_length(text, "aab") for text in ("", "b", "a", "xaa", "aaa", "aab", "aaba")] == [
        0,
        0,
        1,
        2,
        2,
        0,
        1,
    ]

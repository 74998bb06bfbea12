"""Schemas of tools, and calls of them."""

from typing import Literal

import pytest

from reinforce_ada_jax.environments import tools
from reinforce_ada_jax.environments.tool_calls import Call
from tests.environments import classes


def search(query: str, kind: Literal["web", "news"] = "web", limit: int | None = None, tags: list[str] = []):  # noqa: B006
    """Searches
    for a text.

    More that the model need not know.
    """
    return {"query": query, "kind": kind, "limit": limit, "tags": tags}


def test_a_schema_is_made_of_annotations_and_docstring():
    assert tools.schema(classes.add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first number, on two lines."},
                    "b": {"type": "integer", "description": "the second one."},
                },
                "required": ["a"],
            },
        },
    }
    function = tools.schema(search)["function"]
    assert function["description"] == "Searches for a text."
    assert function["parameters"]["properties"] == {
        "query": {"type": "string"},
        "kind": {"type": "string", "enum": ["web", "news"]},
        "limit": {"type": "integer", "nullable": True},
        "tags": {"type": "array", "items": {"type": "string"}},
    }


def first(count: int | None, sizes: list[float | None] = []) -> str:  # noqa: B006
    """Returns as many letters as it is told; null: three."""
    return "x" * (3 if count is None else count)


def untyped(a):
    """Has no annotation."""


def silent(a: int):
    return a


def many(*names: str):
    """Takes any number."""


async def awaited(a: int):
    """Would have to be awaited."""


def table(kind: str, sizes: list[int | None] = []):  # noqa: B006
    """Returns what JSON does not have."""
    inner: list = []
    inner.append(inner)
    return {"pairs": {(1, 2): 3}, "loop": inner, "set": {5}}[kind]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (awaited, "the tool 'awaited' is async"),
        (untyped, "must be annotated"),
        (silent, "has no docstring"),
        (many, "every argument must have a name"),
    ],
)
def test_a_tool_without_a_schema_is_refused(tool, message):
    with pytest.raises(ValueError, match=message):
        tools.schema(tool)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", '{"a": 2}', "3"),
        ("add", '{"a": "2"}', "error: a must be of type integer"),
        ("add", '{"a": true}', "error: a must be of type integer"),
        ("add", '{"a": null}', "error: a must be of type integer"),
        ("add", '{"c": 2}', "error: add has no argument 'c'"),
        ("add", '{"b": 2}', "error: add needs the argument 'a'"),
        ("fail", "{}", "error: RuntimeError: no luck"),
        ("sub", "{}", "error: there is no tool 'sub'"),
        ("search", '{"query": "x", "kind": "sport"}', "error: kind must be of type string, one of web, news"),
        ("search", '{"query": "x", "tags": ["a", 1]}', "error: tags must be of type array of string"),
        ("search", '{"query": "x", "tags": "a"}', "error: tags must be of type array of string"),
        ("table", '{"kind": "pairs"}', "{(1, 2): 3}"),
        ("table", '{"kind": "loop"}', "[[...]]"),
        ("table", '{"kind": "set", "sizes": [1, null]}', '"{5}"'),
        ("first", '{"count": null}', "xxx"),
        ("first", "{}", "error: first needs the argument 'count'"),
        ("first", '{"count": "2"}', "error: count must be of type integer or null"),
        ("first", '{"count": 1, "sizes": [0.5, null]}', "x"),
        ("first", '{"count": 1, "sizes": ["a"]}', "error: sizes must be of type array of number or null"),
        ("first", '{"count": 99998}', "x" * 99_998),  # two quotation marks more as JSON
        ("first", '{"count": 99999}', "error: the result has 100,001 bytes; the limit is 100,000"),
        (
            "search",
            '{"query": "x", "limit": null}',
            '{"query": "x", "kind": "web", "limit": null, "tags": []}',
        ),
    ],
)
def test_a_call_is_answered_as_text(name, arguments, result):
    offered = {tool.__name__: tool for tool in (classes.add, classes.fail, search, table, first)}
    assert tools.run(offered, Call(name, arguments)) == result

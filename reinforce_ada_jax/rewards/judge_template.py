"""The text that a judge is asked (`judge.template`), and its check before anything is asked."""

from collections.abc import Collection

from jinja2 import StrictUndefined, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reinforce_ada_jax.rewards.loading import judge_template

TEMPLATE = """You grade a response to a problem.

Problem:
{{ problem }}

{% if answer %}Reference answer:
{{ answer }}

{% endif %}Response:
{{ response }}

Say in a few sentences what is right and what is wrong. Then end with one line "Score: N", where N is a number from
{{ lowest }} to {{ highest }}.
"""
GIVEN = ("response", "answer", "lowest", "highest")  # added to the problem's columns; they hide columns of these names
ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
_OPTIONAL = ("defined", "undefined", "default", "d")  # tests and filters of names that may be missing


def checked(setting: str, columns: Collection[str] | None = None) -> str:
    """Returns the text of `judge.template` ("": the default), whose names are `GIVEN` and columns of the problem.

    If `columns` is None, the columns are not known, and any name may be one. A name that is asked for with `is defined`
    may be missing. Raises ValueError where the text can't be read, is no template, does not show the response, or uses
    an unknown name.
    """
    text = judge_template(setting)
    if not setting:
        return text
    place = "judge.template" if text == setting else f"judge.template ({setting})"
    try:
        tree = ENVIRONMENT.parse(text)
        ENVIRONMENT.compile(text)  # finds unknown filters
    except TemplateSyntaxError as error:
        raise ValueError(f"{place}, line {error.lineno}, is no template: {error.message} {_names(columns)}") from error
    used = meta.find_undeclared_variables(tree) - ENVIRONMENT.globals.keys()
    if "response" not in used:
        names = ", ".join(sorted(used)) or "no name"
        raise ValueError(
            f"{place} does not show the response: it uses {names}, and needs {{{{ response }}}}. {_names(columns)}"
        )
    for each in (*tree.find_all(nodes.Test), *tree.find_all(nodes.Filter)):
        if each.name in _OPTIONAL and isinstance(each.node, nodes.Name):
            used.discard(each.node.name)
    known = used if columns is None else {*GIVEN, *columns}
    for node in tree.find_all(nodes.Name):
        if node.name in used - known:
            raise ValueError(f"{place}, line {node.lineno}, uses {node.name!r}, which there is not. {_names(columns)}")
    return text


def _names(columns: Collection[str] | None) -> str:
    """Returns a sentence on the names that a template may use."""
    own = "" if columns is None else f": {', '.join(sorted({*columns} - {*GIVEN}))}"
    return f"A template may use {', '.join(GIVEN)}, and the columns of the problem{own}."

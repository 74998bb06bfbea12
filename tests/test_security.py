"""The threat model of docs/security.md: every test that it names exists."""

import ast
import pathlib
import re

from tests.test_docs import DOCS, ROOT, table_below

HEADING = "## Not trusted: who may be hostile, and what holds"


def named_tests(rows: list[list[str]]) -> list[tuple[str, str]]:
    """(file, function) of every test in the last column of a table."""
    return [found for row in rows for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[3])]


def exists(file: pathlib.Path, function: str) -> bool:
    """Returns True if a file defines a function at its top level."""
    return file.is_file() and function in {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_test_of_the_threat_model_exists():
    rows = table_below("security.md", HEADING)
    named = named_tests(rows)
    assert len(named) >= 20
    assert [f"{file}::{name}" for file, name in named if not exists(ROOT / file, name)] == []
    # A row without a test says in bold that nothing holds.
    assert [row for row in rows if not named_tests([row]) and "**nothing**" not in row[2]] == []


def test_files_that_the_page_names_exist():
    files = re.findall(r"tests/[\w/]+\.py", (DOCS / "security.md").read_text())
    assert [file for file in files if not (ROOT / file).is_file()] == []

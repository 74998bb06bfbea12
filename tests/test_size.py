"""Limits on the length of functions and files of the package and of bench/ (CONTRIBUTING.md)."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = [file for folder in ("bench", "reinforce_ada_jax") for file in (ROOT / folder).rglob("*.py")]
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 400
MAX_LONG_FILES = 10


def long_functions(source: str) -> list[str]:
    """Functions of more than MAX_FUNCTION_LINES lines, with their decorators, as "name: lines"."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    lengths = [
        (node.name, node.end_lineno - min(line.lineno for line in (node, *node.decorator_list)) + 1)
        for node in functions
    ]
    return [f"{name}: {lines}" for name, lines in lengths if lines > MAX_FUNCTION_LINES]


def test_functions_fit_on_a_screen():
    found = {str(file.relative_to(ROOT)): long_functions(file.read_text()) for file in SOURCES}
    assert len(found) > 100
    assert {file: functions for file, functions in found.items() if functions} == {}


def test_few_files_are_long():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in SOURCES}
    assert len([file for file, lines in lengths.items() if lines > MAX_FILE_LINES]) <= MAX_LONG_FILES, lengths


def test_a_long_function_is_found():
    body = "\n".join(["    pass"] * (MAX_FUNCTION_LINES - 1))
    assert long_functions(f"def f():\n{body}") == []
    assert long_functions(f"@g\ndef f():\n{body}") == ["f: 81"]

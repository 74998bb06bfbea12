"""Flags of the measurements: the help of each has those that its module reads."""

import ast
import pathlib

import pytest
from absl import flags

from bench import options

BENCH = pathlib.Path(options.__file__).parent


@pytest.mark.parametrize("name", options.USED)
def test_the_help_of_a_measurement_has_the_flags_that_it_reads(name):
    known = {*options.define_flags(flags.FlagValues())}
    assert known.issuperset(options.USED[name]) and len(set(options.USED[name])) == len(options.USED[name])
    tree = ast.parse((BENCH / f"{name}.py").read_text(encoding="utf-8"))
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("options", "values")
    }
    assert (read & known) - {*options.USED[name], "json"} == set()

"""Flags of the measurements: the help of each has those that its module reads."""

import ast
import pathlib

import pytest
from absl import flags

from bench import accelerator, command_line, options

BENCH = pathlib.Path(options.__file__).parent


# Modules whose functions get the flags of a measurement.
CALLED = ("command_line", "engines", "inputs")


def names_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The flags that a piece of code reads, and all names in it."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    owners = [each.value.id if isinstance(each.value, ast.Name) else "" for each in attributes]
    read = {each.attr for each, owner in zip(attributes, owners, strict=True) if owner in ("options", "values")}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return read, names | {each.attr for each in attributes}


def parsed(module: str) -> ast.Module:
    return ast.parse((BENCH / f"{module}.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "flag"), [("serve", "replicas"), ("serve", "window"), ("turns", "replicas")])
def test_a_flag_that_a_measurement_does_not_read_is_refused(name, flag):
    """`turns` shared the slots by two replicas, and ran one of them; `rollout` reads all three flags."""
    values = options.define_flags(flags.FlagValues())
    values(["bench", f"--{flag}=2", "--slots=8", "--json=out.json"])
    with pytest.raises(ValueError, match=f"`{name}` does not read --{flag}; --help lists"):
        command_line.check_flags(name, values)
    command_line.check_flags("rollout", values)


@pytest.mark.parametrize("name", options.USED)
def test_the_help_of_a_measurement_has_the_flags_that_it_reads(name):
    """The help has each flag that the module reads, and none that neither it nor a function that it calls reads."""
    known = {*options.define_flags(flags.FlagValues())}
    assert known.issuperset(options.USED[name]) and len(set(options.USED[name])) == len(options.USED[name])
    read, waiting = names_in(parsed(name))
    assert (read & known) - {*options.USED[name], "json"} == set()
    functions = {
        node.name: names_in(node) for each in CALLED for node in parsed(each).body if isinstance(node, ast.FunctionDef)
    }
    while called := waiting & functions.keys():
        found = [functions.pop(each) for each in called]
        read, waiting = read.union(*(flag for flag, _ in found)), waiting.union(*(names for _, names in found))
    # The sizes of `accelerator` are read by their names.
    assert {*options.USED[name]} - read - (set(accelerator.SIZES) if name == "accelerator" else set()) == set()

"""The documents say what is so: their examples run, their tables hold the defaults, their links lead somewhere."""

import ast
import pathlib
import re
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.advantages import make_group
from reinforce_ada_jax.collection.simulate import run_strategy

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def code_block(document: str, containing: str) -> str:
    """The one Python block of a document that has `containing` in it."""
    (block,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (DOCS / document).read_text(), re.DOTALL)
        if containing in block
    ]
    return block


def table_below(document: str, heading: str) -> list[list[str]]:
    """Cells of the first table below `heading`, header and ruler left out."""
    lines = (DOCS / document).read_text().split(f"\n{heading}\n", 1)[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return table[2:]


# ---- docs/strategies.md ----------------------------------------------------------------------------------------------


def test_the_strategy_of_ones_own(tmp_path):
    file = tmp_path / "my_strategy.py"
    file.write_text(code_block("strategies.md", "def triple"))
    config = SimpleNamespace(strategy=f"{file}:triple", group_size=2, samples_per_round=8, max_rounds=4)
    # Rounds of 2 and 6. Right at once; right in the second; never; both right.
    rewards = np.array([[0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 0], [0] * 8, [1] * 8])
    pools = run_strategy(config, rewards)
    assert [len(pool.responses) for pool in pools] == [2, 8, 8, 2]
    assert [pool.met for pool in pools] == [True, True, False, True]
    groups = [make_group(pool, strategies.build(config)) for pool in pools]
    assert [group.kept.tolist() for group in groups] == [[0, 1], [0, 5], [0, 1], [0, 1]]
    np.testing.assert_array_equal(groups[1].advantages, [-0.25, 0.75])  # 2 of 8


def test_the_table_of_settings_has_the_defaults():
    settings = table_below("strategies.md", "## Settings")
    documented = {key.strip("`"): ast.literal_eval(default.strip("`")) for key, default, *_ in settings}
    collection = config_lib.defaults().collection.to_dict()
    # What is no strategy's: how many prompts, and how the loop over them runs.
    for key in ("prompts_per_iteration", "barrier", "deterministic", "overlap_iterations"):
        del collection[key]
    assert documented == collection


def test_the_table_of_fields_is_the_dataclass():
    documented = [
        (field.strip("`"), default.strip("`"))
        for field, default, _ in table_below("strategies.md", "## A strategy of your own")
    ]
    shown = {strategies.one: "1", strategies.always: "1", "pool": '"pool"'}
    fields = strategies.Strategy.__dataclass_fields__.values()
    expected = [
        (field.name, "" if field.default is field.default_factory else shown.get(field.default, str(field.default)))
        for field in fields
    ]
    assert documented == expected


def test_every_strategy_is_in_the_table():
    assert [name.strip("`") for name, *_ in table_below("strategies.md", "## The six")] == list(strategies.BUILT_IN)


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(document: pathlib.Path) -> set[str]:
    """Names that headings have as links."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", sorted(DOCS.glob("*.md")), ids=lambda document: document.stem)
def test_links_lead_somewhere(document):
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{text}: {target}"
        assert not anchor or anchor in anchors(file), f"{text}: {target}"
        # A link to code names what to look for there.
        if file.suffix == ".py":
            names = {node.name for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "name")}
            for name in re.findall(r"`(\w+)`", text):
                assert name in names, f"{name} is not in {path}"

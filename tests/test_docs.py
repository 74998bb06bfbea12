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
from reinforce_ada_jax.collection.metrics import FAILURES
from reinforce_ada_jax.collection.simulate import run_strategy
from reinforce_ada_jax.learning.learner import UpdateMetrics

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


# ---- docs/troubleshooting.md -----------------------------------------------------------------------------------------

PACKAGE = pathlib.Path(config_lib.__file__).parent


def strings_of_the_program() -> set[str]:
    """Every string in its sources, and what stands between the braces of its f-strings."""
    return {
        node.value
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def is_metric(key: str, strings: set[str]) -> bool:
    """Whether a key of metrics.jsonl is written somewhere."""
    if key.startswith("update/") and key.removeprefix("update/") in UpdateMetrics._fields:
        return True
    if key.startswith("collection/verdict_"):
        return key.removeprefix("collection/verdict_") in FAILURES
    return key in strings


def test_troubleshooting_names_keys_and_words_that_there_are():
    text = (DOCS / "troubleshooting.md").read_text()
    sections, strings = set(config_lib.defaults().to_dict()), strings_of_the_program()
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", text))
    settings = {name for name in named if name.split(".")[0] in sections}
    assert len(settings) > 20 and named - settings == {"metrics.jsonl"}
    flat = config_lib._flatten(config_lib.defaults().to_dict())
    assert settings <= flat.keys(), settings - flat.keys()
    metrics = {key for key in re.findall(r"`([a-z_]+/[a-z_]+)`", text)}
    assert len(metrics) > 15 and {key for key in metrics if not is_metric(key, strings)} == set()
    said = re.findall(r'"([^"]+)"', " ".join(text.split()))
    assert len(said) == 7
    for words in said:
        assert any(words in " ".join(string.split()) for string in strings), words


def test_a_metric_that_is_none_is_found():
    strings = strings_of_the_program()
    for key in ("update/entropi", "collection/verdict_timeouts", "collection/zero_signals", "time/verify"):
        assert not is_metric(key, strings), key

"""The public API: lazy, documented, and its examples in docs/api.md run."""

import ast
import importlib
import re

import pytest

import reinforce_ada_jax as ada
from tests import sharing
from tests.running import ROOT, run_python

DOCUMENT = (ROOT / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def test_importing_loads_no_jax_and_takes_no_time():
    code = (
        "import time, sys, reinforce_ada_jax; print(time.process_time(), 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    before = "import time; print(time.process_time())"
    start, run = (run_python("-c", text).stdout.split() for text in (before, code))
    assert run[1:] == ["False", "False"]
    assert float(run[0]) - float(start[0]) < 0.3


def test_every_name_is_there_and_documented():
    stub = ast.parse((ROOT / "reinforce_ada_jax" / "__init__.pyi").read_text()).body
    declared = [node.names[0].asname for node in stub if isinstance(node, ast.ImportFrom)]
    assert len(declared) > 30 and sorted([*declared, "__version__"]) == dir(ada)
    for name in declared:
        value = getattr(ada, name)
        assert value.__doc__ and len(value.__doc__.split()) > 3, name
        assert re.search(rf"\bada\.{name}\b", DOCUMENT) or name in LEFT_OUT, f"docs/api.md shows no ada.{name}"
    with pytest.raises(AttributeError, match="no attribute 'colect'; its public names are .*collect"):
        ada.colect  # noqa: B018


# Of the runs in tests/training, whose programs an example shares.
SIZES = "config.sampling.slots, config.collection.prompts_per_iteration, config.learning.prompts_per_update = 32, 8, 4"

# Records and variants that the examples have no room for.
LEFT_OUT = {
    *("Group", "LossConfig", "Pool", "Request", "RequestQueue", "Strategy", "anchored_advantages", "config"),
    *("defaults", "grade_minerva", "leave_one_out_advantages", "validate"),
}


def test_train_is_the_module_of_the_command():
    assert importlib.import_module("reinforce_ada_jax.train") is ada.train
    with pytest.raises(ValueError, match="model.path is empty"):
        ada.train.train(ada.Config(), "nowhere")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: str(EXAMPLES.index(text)))
def test_the_examples_run(example, tmp_path, monkeypatch, capsys):
    text = example.replace('"runs/', f'"{tmp_path}/runs/').replace('"models/', f'"{tmp_path}/models/')
    text = text.replace("config.iterations = 2\n", f"config.iterations = 2\n{SIZES}\n")
    monkeypatch.chdir(ROOT)
    with sharing.shared_programs():
        exec(compile(text, "docs/api.md", "exec"), {"__name__": "example"})
    capsys.readouterr()


def test_what_the_examples_show(tmp_path, monkeypatch):
    """The numbers in the comments."""
    (arrays,) = (text for text in EXAMPLES if "objective_weight" in text)
    names: dict = {}
    exec(arrays, names)
    assert names["kept"].tolist() == [0, 1, 2, 5] and names["advantages"].tolist() == [-0.25, 0.75]
    assert names["weight"] == 4.0
    (loss,) = (text for text in EXAMPLES if "clipped_policy_loss" in text)
    names = {}
    exec(loss, names)
    assert float(names["loss"]) == pytest.approx(-1 / 3)

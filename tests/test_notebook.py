"""examples/notebook.ipynb: its cells run in order, as Jupyter runs them."""

import json
import re

import pytest
from matplotlib import pyplot as plt

from reinforce_ada_jax.policy import huggingface
from tests.running import ROOT

FOLDER = ROOT / "examples"
CELLS = json.loads((FOLDER / "notebook.ipynb").read_text())["cells"]


def sources(kind):
    return ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == kind]


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", "".join(sources("markdown")))
    assert len(targets) > 2 and [target for target in targets if not (FOLDER / target).exists()] == []


def test_no_output_is_stored():
    assert [cell["id"] for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_reward():
    names = {}
    for source in sources("code"):
        if "def reward" in source:
            exec(f"import re\n{source}", names)
    graded = [names["reward"](text, "12") for text in (r"\boxed{12}", r"\boxed{12} \boxed{2}", r"\boxed{-12}", "12")]
    assert graded == [1.0, 0.2, 0.2, 0.0]


@pytest.mark.slow
def test_the_cells_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)  # Jupyter's kernel starts in the notebook's folder
    names = {"__name__": "notebook"}
    for number, source in enumerate(sources("code")):
        exec(compile(source, f"<cell {number}>", "exec"), names)
    plt.close("all")
    accuracy = [line["evaluation/test/avg"] for line in names["run"].metrics if "evaluation/test/avg" in line]
    assert len(accuracy) == 4 and accuracy[-1] > accuracy[0] and accuracy[-1] > 0.6
    assert huggingface.load(tmp_path / "runs" / "notebook" / "trained")[0] == names["run"].architecture
    assert "->" in capsys.readouterr().out

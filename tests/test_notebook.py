"""examples/notebook.ipynb: its cells run in order, as Jupyter runs them."""

import json
import re

import pytest

from reinforce_ada_jax.policy import huggingface
from tests.running import ROOT, environment, run_python

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
    """The reward of the notebook is whole for one box with the answer, and a part for any box."""
    names = {}
    for source in sources("code"):
        if "def reward" in source:
            exec(f"import re\n{source}", names)
    graded = [names["reward"](text, "12") for text in (r"\boxed{12}", r"\boxed{12} \boxed{2}", r"\boxed{-12}", "12")]
    assert graded == [1.0, 0.2, 0.2, 0.0]


# A plain process: here promotion of dtypes is strict, which optax is not made for.
RUN = """
import json, sys
names = {"__name__": "notebook"}
for number, source in enumerate(json.load(sys.stdin)):
    exec(compile(source, f"<cell {number}>", "exec"), names)
averages = [line["evaluation/test/avg"] for line in names["run"].metrics if "evaluation/test/avg" in line]
print(json.dumps([averages, names["run"].architecture.num_parameters]))
"""


@pytest.mark.slow
def test_the_cells_run(tmp_path):
    """In an empty folder; the examples are found as from Jupyter's kernel, which starts in the notebook's folder."""
    settings = environment() | {"PYTHONPATH": f"{FOLDER}:{ROOT}", "MPLBACKEND": "agg"}
    result = run_python("-c", RUN, input=json.dumps(sources("code")), cwd=tmp_path, env=settings)
    assert result.returncode == 0, result.stderr[-2000:]
    *said, last = result.stdout.splitlines()
    accuracy, num_parameters = json.loads(last)
    assert len(accuracy) == 4 and accuracy[-1] > accuracy[0] and accuracy[-1] > 0.6
    trained = huggingface.read_config(tmp_path / "runs" / "notebook" / "trained")
    assert trained.num_parameters == num_parameters
    assert any("->" in line for line in said)

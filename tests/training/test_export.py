"""`export`: one weight at a time from a checkpoint, in one process or several."""

import filecmp
import shutil

import jax
import numpy as np
import pytest

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax import export
from reinforce_ada_jax.learning.learner import Learner
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.policy.transformer import flatten
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import records
from reinforce_ada_jax.training.checkpoint import Checkpoints
from tests import hosts
from tests.running import refused, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A work directory whose checkpoint 1 has the weights of the packaged model, twice as large.

    The file of its environment is gone.
    """
    workdir, config = tmp_path_factory.mktemp("run"), tiny()
    trained = tiny(**{"environment.path": f"{workdir}/gone.py:Game", "data.template": "chat"})
    (workdir / "config.json").write_text(config_lib.to_json(trained))
    (workdir / records.RUN_ID).write_text("a run\n")
    components = components_lib.build(config, components_lib.model_folder(config.model.path))
    params = jax.tree.map(lambda x: 2 * x, components_lib.load_params(config, components))
    checkpoints = Checkpoints(workdir, keep=1, run_id="a run", writes=True)
    checkpoints.save(1, Learner(components.architecture, config, components.mesh).init(params), {})
    checkpoints.wait()
    checkpoints.close()
    return workdir


def test_one_weight_at_a_time_is_in_memory(run, tmp_path, monkeypatch):
    restore, before, live = Checkpoints.restore_params, live_bytes(), {}

    def counted(self, iteration, target, only=""):
        live[only] = live_bytes() - before
        found = restore(self, iteration, target, only)
        live[f"{only}, read"] = live_bytes() - before
        return found

    monkeypatch.setattr(Checkpoints, "restore_params", counted)
    export.main(run, None, tmp_path / "model")
    _, first = huggingface.load(components_lib.model_folder("package:cipher"))
    _, found = huggingface.load(tmp_path / "model")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(2 * a, b), first, found)
    sizes = {name: weight.nbytes for name, weight in flatten(first).items()}
    assert len(live) == 2 * len(sizes)
    for name, size in sizes.items():
        # All weights have 429,568 bytes, and the optimizer's moments twice as many. A fingerprint has 4.
        assert live[name] < 1_000 and live[f"{name}, read"] < size + 1_000, (name, live)


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow  # a test above writes one weight at a time; test_processes.py has two processes
def test_two_processes_write_the_folder_of_one(run, tmp_path):
    export.main(run, 1, tmp_path / "one")
    two = tmp_path / "two"
    spoke, silent = hosts.finished(
        hosts.start(["-m", "reinforce_ada_jax.export", f"--workdir={run}", f"--output={two}"], 2, devices=2)
    )
    assert "iteration 1 of" in spoke and "iteration 1 of" not in silent
    compared = filecmp.dircmp(tmp_path / "one", two)
    assert compared.common_files == compared.left_list == compared.right_list and not compared.diff_files
    assert filecmp.cmp(tmp_path / "one" / "model.safetensors", two / "model.safetensors", shallow=False)


def test_a_damaged_checkpoint_is_said_with_the_remedy(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / "1" / "learner")
    said = refused(capsys, export.main, copy, None, tmp_path / "out").err
    assert "the checkpoint of iteration 1 in " in said and "is damaged: " in said
    assert "Restore its folder from a copy. Other checkpoints there: none." in said
    assert not (tmp_path / "out").exists()

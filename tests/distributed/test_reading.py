"""A model folder is read by several processes, each its own part."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reinforce_ada_jax.training import components
from tests import hosts


@pytest.mark.slow  # test_huggingface.py::test_each_number_is_read_by_one_device holds that parts differ
def test_a_number_that_one_process_reads_ends_all(tmp_path):
    shutil.copytree(components.model_folder("package:cipher"), tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = {name: tensor.copy() for name, tensor in load_file(file).items()}
    tensors["model.layers.0.mlp.down_proj.weight"][-1, -1] = np.nan  # of the second half, which process 1 reads
    save_file(tensors, file)
    flags = [f"--config.model.path={tmp_path / 'model'}", "--config.mesh.fsdp=2", f"--workdir={tmp_path / 'run'}"]
    started = hosts.start(["-m", "reinforce_ada_jax.train", "--config=configs/tiny.py", *flags], 2, devices=2)
    (_, other), (_, own) = (process.communicate(timeout=120) for process in started)
    assert [process.returncode for process in started] == [2, 2]
    assert "1 of the 6,144 values of model.layers.0.mlp.down_proj.weight are NaN or infinite" in own
    assert "process 1 of 2 refused its configuration or a file" in other
    assert not (tmp_path / "run").exists()

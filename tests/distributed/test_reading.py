"""A model folder is read by several processes, each its own part."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.training import components
from tests import hosts
from tests.bucket_server import Buckets, needs_gcsfs, serving
from tests.policy.test_hub_models import Hub


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


# Prints the bytes of the weights that this host has copied, and a sum of its part of each weight.
LOAD = """
import os, sys
from reinforce_ada_jax.distributed import mesh, processes
os.environ["XDG_CACHE_HOME"] = f"{sys.argv[2]}/{os.environ[processes.INDEX]}"
os.environ["HF_HUB_CACHE"] = f"{sys.argv[2]}/hub{os.environ[processes.INDEX]}"
import jax, numpy as np
from reinforce_ada_jax.files import partial_copy
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.training.components import model_folder
partial_copy.BLOCK = 1024
with processes.joined(cluster=False):
    folder = model_folder(sys.argv[1])
    params = huggingface.load(folder, mesh.make_mesh(data=1, fsdp=2, tensor=1))[1]
    sums = np.fromfile(partial_copy.find(folder / "model.safetensors").file.with_name("model.safetensors.crc"), "<u4")
    print(np.count_nonzero(sums), len(sums), *np.flatnonzero(sums))
    total = jax.jit(lambda params: sum(abs(each).sum() for each in jax.tree.leaves(params)))(params)
    print(float(total))
"""


def check_halves(told, wanted):
    """Two hosts have fetched half of the weights each: little more than what the header and the bounds of rows take."""
    copied = []
    for line, total in (text.splitlines()[-2:] for text in told):
        count, blocks, *numbers = map(int, line.split())
        assert 0.45 * blocks < count < 0.65 * blocks
        copied += numbers
        assert float(total) == pytest.approx(wanted)
    assert {*copied} == {*range(blocks)}


def total_of_the_built_in_model():
    folder = components.model_folder("package:cipher")
    return sum(float(abs(each).sum()) for each in jax.tree.leaves(huggingface.load(folder)[1]))


@needs_gcsfs
def test_two_hosts_fetch_half_of_a_model_in_a_bucket_each(tmp_path):
    server = Buckets()
    for file in components.model_folder("package:cipher").iterdir():
        server.write(f"gs://two/model/{file.name}", file.read_bytes())
    with serving(server) as env:
        started = hosts.start(["-c", LOAD, "gs://two/model", str(tmp_path)], 2, devices=2, env=env)
        check_halves(hosts.finished(started), total_of_the_built_in_model())


def test_two_hosts_fetch_half_of_a_model_of_the_hub_each(tmp_path):
    folder = components.model_folder("package:cipher")
    with Hub({"tiny/cipher": {file.name: file.read_bytes() for file in folder.iterdir()}}) as hub:
        env = {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
        started = hosts.start(["-c", LOAD, "tiny/cipher", str(tmp_path)], 2, devices=2, env=env)
        check_halves(hosts.finished(started), total_of_the_built_in_model())
        hub.shutdown()
    weights = [each for each in hub.asked if each[0] == "GET" and each[1].endswith("model.safetensors")]
    assert len(weights) == len(hub.ranges)  # never as a whole

"""Models in a bucket: the weights of a folder, with only what is read of them, and the refusals of a folder."""

import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.files import buckets, partial_copy
from reinforce_ada_jax.policy import adapter_files, huggingface
from tests import standins
from tests.bucket_server import Buckets, needs_gcsfs, serving
from tests.policy.recording import FAMILIES, GOLDEN
from tests.policy.test_hostile_files import FILES
from tests.policy.test_huggingface import assert_same, edited
from tests.policy.test_mxfp4 import packed

pytestmark = needs_gcsfs


@pytest.fixture(scope="module")
def running():
    served = Buckets()
    with serving(served) as environment:
        yield served, environment


@pytest.fixture
def server(running, monkeypatch, tmp_path):
    served, environment = running
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    standins.constants(monkeypatch, partial_copy, BLOCK=4096)
    clients = type(buckets.file_system())
    clients.clear_instance_cache()  # of another file's server
    yield served
    clients.clear_instance_cache()


def uploaded(server, folder, url):
    """This machine's folder of a model that is put into a bucket."""
    for file in folder.iterdir():
        server.write(f"{url}/{file.name}", file.read_bytes())
    return partial_copy.fetch(url)


def reading(server):
    """A `watch` that refuses requests after the fetch, and what it counted."""
    counted = []

    def watch(numbers, what):
        counted.append(what)
        sent = len(server.sent)
        for number in numbers:
            assert what != "layers read" or len(server.sent) == sent
            yield number

    return watch, counted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("meshed", [False, True])
def test_a_model_in_a_bucket_has_the_weights_of_the_folder(server, family, meshed):
    mesh = mesh_lib.make_mesh(data=2, fsdp=4, tensor=1) if meshed else None
    folder = uploaded(server, GOLDEN / family, f"gs://{family}{meshed}/model")
    watch, counted = reading(server)
    architecture, params = huggingface.load(folder, mesh, watch=watch)
    assert counted == ["MiB of weights fetched", "layers read"]
    wanted, others = huggingface.load(GOLDEN / family, mesh)
    assert architecture == wanted
    assert_same(params, others)


def test_blocks_of_mxfp4_are_fetched_with_their_scales(server, tmp_path):
    folder, _ = packed(tmp_path)
    watch, _ = reading(server)
    fetched = huggingface.load(uploaded(server, folder, "gs://mxfp4/model"), watch=watch)[1]
    assert_same(fetched, huggingface.load(folder)[1])


def test_a_tied_head_is_compared(server, tmp_path):
    embedding = load_file(GOLDEN / "qwen2" / "model.safetensors")["model.embed_tokens.weight"].copy()
    folder = edited(tmp_path, {"lm_head.weight": embedding})
    assert_same(huggingface.load(uploaded(server, folder, "gs://tied/model"))[1], huggingface.load(GOLDEN / "qwen2")[1])
    embedding[-1, -1] += 1
    shutil.rmtree(folder)
    folder = uploaded(server, edited(tmp_path, {"lm_head.weight": embedding}), "gs://tied/other")
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        huggingface.check_weights(folder, huggingface.read_config(folder))


def test_names_and_shapes_are_checked_by_headers_alone(server):
    folder = uploaded(server, GOLDEN / "qwen2", "gs://headers/model")
    before = len(server.sent)
    assert huggingface.check_weights(folder, huggingface.read_config(folder))
    assert len(server.sent) == before


def test_a_base_keeps_its_fingerprint(server, monkeypatch):
    standins.constants(monkeypatch, adapter_files, SAMPLED_BYTES=100)
    folder = uploaded(server, GOLDEN / "qwen2", "gs://base/model")
    assert adapter_files.fingerprint(folder) == adapter_files.fingerprint(GOLDEN / "qwen2")


def test_a_nan_is_named(server, tmp_path):
    norm = np.full(32, np.nan, np.float32)
    folder = uploaded(server, edited(tmp_path, {"model.norm.weight": norm}), "gs://nan/model")
    with pytest.raises(ValueError, match=r"32 of the 32 values of model.norm.weight are NaN"):
        huggingface.load(folder)


@pytest.mark.parametrize("case", FILES)
def test_a_hostile_file_is_refused_as_in_a_folder(server, tmp_path, case):
    local = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2", local)
    (local / "model.safetensors").write_bytes(FILES[case])
    folder = uploaded(server, local, f"gs://hostile{[*FILES].index(case)}/model")
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))}/model.safetensors is not a whole safetensors file"):
        huggingface.load(folder)


def test_a_pointer_of_git_lfs_is_named(server, tmp_path):
    local = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2", local)
    (local / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="is a pointer of Git LFS"):
        huggingface.load(uploaded(server, local, "gs://lfs/model"))


def test_shards_are_fetched(server, tmp_path):
    architecture, params = huggingface.load(GOLDEN / "qwen3")
    huggingface.save(tmp_path / "shards", architecture, params, max_shard_bytes=20_000)
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 3
    folder = uploaded(server, tmp_path / "shards", "gs://shards/model")
    assert_same(huggingface.load(folder)[1], params)

"""Whole runs whose work directory, problems and exports are in a bucket, of a server that fails and answers late."""

import json
import pathlib
import time

import numpy as np
import pytest
import safetensors.numpy

from reinforce_ada_jax import cli
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.policy import weight_files
from tests.bucket_server import Buckets, needs_gcsfs, serving
from tests.forked import Forked, finished
from tests.running import environment, reproducible

pytestmark = needs_gcsfs

ITERATIONS = 4
FLAGS = (
    "--config=configs/tiny.py", f"--config.iterations={ITERATIONS}", "--config.checkpoint.every=1",
    "--config.evaluation.every=0", "--config.collection.prompts_per_iteration=8",
    "--config.learning.prompts_per_update=8", "--config.sampling.slots=32",
)  # fmt: skip
PROBLEMS = "".join(json.dumps(problem) + "\n" for problem in cipher.problems("train")[:64])


def _train(workdir: str, problems: str, env: dict[str, str]) -> Forked:
    return Forked(
        ["-m", "reinforce_ada_jax.train", *FLAGS, f"--workdir={workdir}", f"--config.data.prompts={problems}"], env
    )


def _committed(server: Buckets, run: str) -> list[int]:
    names = server.names(f"{run}/checkpoints")
    return sorted(int(name.split("/")[0]) for name in names if name.count("/") == 1 and "commit_success" in name)


@pytest.mark.slow
@pytest.mark.parametrize(("latency_s", "error_share"), [(0.0, 0.05), (0.2, 0.05)], ids=["faulty", "faulty and late"])
def test_killed_and_resumed_nothing_is_lost_and_two_at_once_are_refused(tmp_path, latency_s, error_share):
    (tmp_path / "problems.jsonl").write_text(PROBLEMS)
    env = environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    finished(_train(str(tmp_path / "unbroken"), str(tmp_path / "problems.jsonl"), env))
    server, run = Buckets(latency_s=latency_s, error_share=error_share), "gs://runs/here/tiny"
    with serving(server) as address:
        server.write("gs://runs/problems.jsonl", PROBLEMS.encode())
        first = _train(run, "gs://runs/problems.jsonl", env | address)
        while not _committed(server, run):
            assert first.poll() is None, first.communicate()
            time.sleep(0.01)
        first.kill()
        first.communicate()
        second = _train(run, "gs://runs/problems.jsonl", env | address)
        while f"process {second.pid} " not in _holder(server, run):
            assert second.poll() is None, second.communicate()
            time.sleep(0.01)
        third = _train(run, "gs://runs/problems.jsonl", env | address)
        out, _ = finished(second)
        assert "resuming after iteration" in out and f"Weights: {run}/checkpoints" in out
        _, refused = third.communicate(timeout=500)
        assert third.returncode in (0, cli.BAD_INPUT)  # 0: the second had ended before it was watched
        assert third.returncode == 0 or f"another training runs in {run} (process {second.pid} on" in refused
        copy = tmp_path / "copy"
        for name in server.names(run):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(server.read(f"{run}/{name}"))
        exported = Forked(
            ["-m", "reinforce_ada_jax.export", f"--workdir={run}", "--output=gs://runs/model"], env | address
        )
        finished(exported)
        (tmp_path / "model.safetensors").write_bytes(server.read("gs://runs/model/model.safetensors"))
    assert reproducible(copy) == reproducible(tmp_path / "unbroken")
    assert (copy / "logs" / "host-0.log").read_text().count(": begins after iteration") >= 2
    samples = tmp_path / "unbroken" / "samples"
    assert all((copy / "samples" / file.name).read_bytes() == file.read_bytes() for file in samples.iterdir())
    assert "training.lock" not in server.names(run)
    here = ["-m", "reinforce_ada_jax.export", f"--workdir={tmp_path / 'unbroken'}", f"--output={tmp_path / 'model'}"]
    finished(Forked(here, env))
    _assert_equal_tensors(tmp_path / "model.safetensors", tmp_path / "model" / weight_files.SINGLE)


def _holder(server: Buckets, run: str) -> str:
    try:
        holder = json.loads(server.read(f"{run}/training.lock"))
    except KeyError:
        return ""
    return f"process {holder['process']} "


def _assert_equal_tensors(one: pathlib.Path, other: pathlib.Path) -> None:
    ours, theirs = safetensors.numpy.load_file(one), safetensors.numpy.load_file(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name])

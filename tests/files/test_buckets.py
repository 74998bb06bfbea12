"""Buckets against a server on this machine: names, copies of what is read, and outputs."""

import pathlib

import pytest

from reinforce_ada_jax.config.paths import check_input, check_output, check_source
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.local_copy import LocalCopy
from tests import standins
from tests.bucket_server import files_of, needs_gcsfs

pytestmark = needs_gcsfs


def test_urls_are_known_also_as_pathlib_shortens_them():
    assert buckets.is_bucket("gs://b/run") and buckets.is_bucket(pathlib.Path("gs://b/run"))
    assert not buckets.is_bucket("runs/gs") and not buckets.is_bucket("s3://b/run")
    assert buckets.url(pathlib.Path("gs://b/run/")) == buckets.url("gs://b/run/") == "gs://b/run"


def test_what_cannot_be_a_bucket_is_refused_before_any_work(monkeypatch):
    with pytest.raises(ValueError, match=r"--input is 's3://b/a.jsonl', and only folders .* buckets of Google Cloud"):
        check_input("--input", "s3://b/a.jsonl")
    with pytest.raises(ValueError, match=r"data.prompts is 's3://b/a.jsonl', and only folders"):
        check_source("data.prompts", "s3://b/a.jsonl")
    check_source("data.prompts", "tfds:/data/gsm8k")  # an absolute path
    check_source("data.prompts", "hf:/data/gsm8k:test")
    with pytest.raises(ValueError, match="--output is 'gs://', which names no bucket"):
        check_output("--output", "gs://", folder=True)
    check_output("--output", "gs://b/model", folder=True)
    with pytest.raises(ValueError, match=r"--workdir is .gs://b/run\[1\]., and .* are wildcards .*: name another"):
        check_output("--workdir", "gs://b/run[1]", folder=True)
    standins.without_packages(monkeypatch, "gcsfs")
    with pytest.raises(ValueError, match=r"model.path is 'gs://b/m', and buckets need the extra gcs: pip install"):
        check_input("model.path", "gs://b/m")


def test_an_object_and_a_folder_are_fetched_once_for_each_version(server, cache):
    server.write("gs://fetch/data/a.jsonl", b"1\n")
    server.write("gs://fetch/model/config.json", b"{}")
    server.write("gs://fetch/model/deep/x.bin", bytes(range(256)) * 100)
    file = buckets.fetch("gs://fetch/data/a.jsonl")
    assert file.name == "a.jsonl" and file.read_bytes() == b"1\n" and file.is_relative_to(cache)
    folder = buckets.fetch("gs://fetch/model/")
    assert files_of(folder) == ["config.json", "deep/x.bin"]
    assert (folder / "deep/x.bin").read_bytes() == bytes(range(256)) * 100
    read = sum("/o/" in request for request in server.requests)
    assert buckets.fetch("gs://fetch/model") == folder
    assert sum("alt=media" in request for request in server.requests[read:]) == 0
    server.write("gs://fetch/model/config.json", b'{"new": 1}')
    again = buckets.fetch("gs://fetch/model")
    assert again != folder and (again / "config.json").read_bytes() == b'{"new": 1}'
    with pytest.raises(ValueError, match="There is no gs://fetch/absent: name an object"):
        buckets.fetch("gs://fetch/absent")


def test_a_folder_whose_name_begins_another_is_not_mixed_with_it(server):
    server.write("gs://names/run/metrics.jsonl", b"one")
    server.write("gs://names/run2/metrics.jsonl", b"two")
    assert [*buckets.objects("gs://names/run")] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["../outside", "deep/../../../outside", "deep/.."])
def test_an_object_whose_copy_would_lie_outside_of_the_folder_is_refused(server, cache, name):
    bucket = f"gs://outside{len(name)}"
    server.write(f"{bucket}/run/metrics.jsonl", b"1")
    server.write(f"{bucket}/run/{name}", b"hostile")
    with pytest.raises(buckets.BucketError, match=r"has '..', gs:.*: remove or rename it"):
        buckets.fetch(f"{bucket}/run")
    with pytest.raises(buckets.BucketError, match="remove or rename it"):
        LocalCopy(f"{bucket}/run")
    assert not [file for file in cache.parent.rglob("*") if file.name == "outside"]


def test_an_output_appears_after_success_only(server):
    with pytest.raises(RuntimeError), buckets.output("gs://out/model") as folder:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise RuntimeError
    assert server.names("gs://out/model") == []
    with buckets.output("gs://out/model") as folder:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    with buckets.output("gs://out/results.json") as file:
        file.write_text("[]")
    assert server.names("gs://out") == ["model/config.json", "results.json"]
    with buckets.output("results.json") as file:
        assert file == pathlib.Path("results.json")


def test_a_folder_is_moved_and_removed(server):
    server.write("gs://move/checkpoints/3/a/b", b"1")
    server.write("gs://move/checkpoints/30/a", b"2")
    folder = buckets.path("gs://move/checkpoints/3")
    buckets.move(folder, buckets.path("gs://move/damaged/3.0"))
    assert server.names("gs://move") == ["checkpoints/30/a", "damaged/3.0/a/b"]
    buckets.remove(buckets.path("gs://move/damaged/3.0"))
    assert server.names("gs://move") == ["checkpoints/30/a"]

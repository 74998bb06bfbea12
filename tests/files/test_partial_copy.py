"""Partial copies of weights in a bucket: what is asked for, once, also after kills and damage."""

import json
import math
import os
import pathlib
import signal
import time

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save

from reinforce_ada_jax.files import buckets, partial_copy
from reinforce_ada_jax.training import components
from tests import forked, standins
from tests.bucket_server import needs_gcsfs
from tests.running import environment

pytestmark = needs_gcsfs

BLOCK = 1024  # in these tests, and four blocks in a request at most
ROWS, COLUMNS = 512, 64  # of float32: four rows are a block, and the tensor has 128 blocks
TENSOR = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
CONTENT = save({"a": TENSOR, "b": np.ones(3, np.float32)})
DATA = len(CONTENT) - TENSOR.nbytes - 12
# Copies the tensor as a process of its own does.
COPY = f"""
import sys
from reinforce_ada_jax.files import partial_copy
partial_copy.BLOCK, partial_copy.REQUEST_BLOCKS = {BLOCK}, 4
folder = partial_copy.fetch(sys.argv[1])
partial = partial_copy.find(folder / "model.safetensors")
partial_copy.copy({{partial: [partial.span("a", slice(None))]}}, lambda numbers, what: numbers)
print(partial_copy.find(folder / "model.safetensors").missing([(0, {len(CONTENT)})]))
"""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    standins.constants(monkeypatch, partial_copy, BLOCK=BLOCK, REQUEST_BLOCKS=4, MIB=BLOCK)


@pytest.fixture
def model(server, request):
    """The URL of a model in a bucket of this test."""
    url = f"gs://{request.node.name[:40].strip('[').replace('_', '-')}/model"
    server.write(f"{url}/model.safetensors", CONTENT)
    server.write(f"{url}/config.json", b"{}")
    server.write(f"{url}/original/other.safetensors", b"copied as it is")
    return url


def found(folder) -> partial_copy.PartialCopy:
    partial = partial_copy.find(folder / "model.safetensors")
    assert partial is not None
    return partial


def copied(partial, *rows, watch=lambda numbers, what: numbers):
    """Copies rows of the tensor."""
    partial_copy.copy({partial: [partial.span("a", each) for each in rows]}, watch)


def rows_of(partial, rows):
    return np.frombuffer(partial.file.read_bytes()[DATA : DATA + TENSOR.nbytes], np.float32).reshape(TENSOR.shape)[rows]


def bytes_of(sent):
    return sum(end - begin for name, begin, end in sent if name.endswith("model/model.safetensors"))


def test_a_folder_holds_headers_which_no_program_takes_for_weights(server, model):
    before = len(server.sent)
    folder = partial_copy.fetch(model)
    assert bytes_of(server.sent[before:]) == BLOCK  # of 129
    assert (folder / "model.safetensors").read_bytes() == CONTENT[:DATA]
    assert (folder / "original/other.safetensors").read_bytes() == b"copied as it is"
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(folder / "model.safetensors", framework="numpy")
    assert found(folder).file.stat().st_size == len(CONTENT)
    assert partial_copy.fetch(model) == folder and bytes_of(server.sent[before:]) == BLOCK


def test_each_machine_copies_its_rows_alone(server, model, monkeypatch, tmp_path):
    sent = {}
    halves = slice(0, 200), slice(200, ROWS)
    for host, rows in enumerate(halves):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(host)))
        partial, before = found(partial_copy.fetch(model)), len(server.sent)
        copied(partial, rows)
        np.testing.assert_array_equal(rows_of(partial, rows), TENSOR[rows])
        sent[host] = [(begin, end) for _, begin, end in server.sent[before:]]
        assert all(end - begin <= 4 * BLOCK for begin, end in sent[host])
    # The header's block was there. Rows begin in the middle of a block, so both have the one with rows 199 and 200.
    counts = [sum(end - begin for begin, end in each) for each in sent.values()]
    assert counts == [50 * BLOCK, len(CONTENT) - 50 * BLOCK]
    partial = found(partial_copy.fetch(model))
    before = len(server.sent)
    copied(partial, halves[1], slice(300, 301))
    assert len(server.sent) == before


def test_a_progress_line_counts_what_is_missing(model):
    partial, seen = found(partial_copy.fetch(model)), []

    def watch(numbers, what):
        seen.append((numbers, what))
        for number in numbers:
            seen.append(number)
            yield number

    copied(partial, slice(0, 100), slice(0, 4), watch=watch)
    assert seen == [(range(25), "MiB of weights fetched"), *range(25)]
    seen.clear()
    copied(partial, slice(0, 100), watch=watch)
    assert seen == []


def test_a_killed_process_goes_on_where_it_was(server, model, monkeypatch):
    before = len(server.sent)
    monkeypatch.setattr(server, "most_sent", before + 20)  # of 33: the process can't end before it is killed
    process = forked.Forked(["-c", COPY, model], environment())
    while len(server.sent) < before + 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    monkeypatch.setattr(server, "most_sent", math.inf)
    partial, before = found(partial_copy.fetch(model)), len(server.sent)
    missing = partial.missing([(0, len(CONTENT))])
    assert 0 < sum(map(len, missing)) < 128 - 4 * 8
    copied(partial, slice(None))
    # The server may answer requests of the killed process late. What they asked for is missing as well.
    assert {begin for _, begin, _ in server.sent[before:]} == {blocks.start * BLOCK for blocks in missing}
    np.testing.assert_array_equal(rows_of(partial, slice(None)), TENSOR)


def test_two_processes_copy_each_block_once(server, model):
    before = len(server.sent)
    both = [forked.Forked(["-c", COPY, model], environment()) for _ in range(2)]
    for process in both:
        out, err = process.communicate(60)
        assert (process.returncode, out) == (0, "[]\n"), err
    # Requests of the process that the test before has killed may be answered only now: theirs is another bucket.
    weights = f"{model.removeprefix('gs://')}/model.safetensors"
    begins = [begin for name, begin, _ in server.sent[before:] if name == weights and begin]
    assert len(begins) == len(set(begins)) == 32
    np.testing.assert_array_equal(rows_of(found(partial_copy.fetch(model)), slice(None)), TENSOR)


def flip(file: pathlib.Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda partial, sums: flip(partial.file, 40 * BLOCK), 1),
        (lambda partial, sums: flip(partial.file, 3), 1),  # the header's length
        (lambda partial, sums: flip(sums, 4 * 7 + 2), 1),
        (lambda partial, sums: os.truncate(partial.file, 100 * BLOCK), 29),
        (lambda partial, sums: os.truncate(sums, 4 * 120 + 1), 9),
        (lambda partial, sums: sums.unlink(), 129),
        (lambda partial, sums: partial.file.unlink(), 129),
    ],
)
def test_what_is_damaged_is_copied_again(server, model, damage, lost):
    folder = partial_copy.fetch(model)
    copied(found(folder), slice(None))
    partial, before = found(folder), len(server.sent)
    (sums,) = partial.file.parent.glob("*.crc")
    damage(partial, sums)
    partial = found(partial_copy.fetch(model))
    copied(partial, slice(None))
    assert partial.file.read_bytes() == CONTENT
    again = bytes_of(server.sent[before:])
    assert (again + BLOCK - 1) // BLOCK == lost


def test_a_damaged_record_is_named(model):
    folder = partial_copy.fetch(model)
    (record,) = found(folder).file.parent.glob("*.json")
    os.truncate(record, 10)
    with pytest.raises(ValueError, match=r"model.safetensors.json is not JSON .*\. Remove .*model and .*model.blocks"):
        partial_copy.find(folder / "model.safetensors")


def test_another_version_is_another_folder_and_none_is_mixed(server, model):
    folder = partial_copy.fetch(model)
    partial = found(folder)
    copied(partial, slice(0, 100))
    other = save({"a": -TENSOR, "b": np.ones(3, np.float32)})
    server.write(f"{model}/model.safetensors", other)
    with pytest.raises(buckets.BucketError, match=r"gs://.*/model/model.safetensors can't be read or written"):
        copied(partial, slice(None))
    assert partial_copy.fetch(model) != folder
    copied(found(partial_copy.fetch(model)), slice(None))
    np.testing.assert_array_equal(rows_of(found(partial_copy.fetch(model)), slice(None)), -TENSOR)
    np.testing.assert_array_equal(rows_of(partial, slice(0, 100)), TENSOR[:100])


def test_processes_that_find_different_versions_are_told(model, monkeypatch):
    standins.of_processes(monkeypatch, exchange=lambda own: [own, b"another version"])
    with pytest.raises(ValueError, match=f"the versions of {model} differ between process 0 and process 1 of 2"):
        components.model_folder(model)


def test_an_error_in_the_middle_keeps_what_was_copied(server, model, monkeypatch):
    folder = partial_copy.fetch(model)
    standins.constants(monkeypatch, partial_copy, REQUESTS=1)

    class Sent(list):
        def append(self, each):
            super().append(each)
            if len(self) == 10:
                server.write(f"{model}/model.safetensors", b"another version")

    monkeypatch.setattr(server, "sent", Sent())
    with pytest.raises(buckets.BucketError):
        copied(found(folder), slice(None))
    assert sum(map(len, found(folder).missing([(0, len(CONTENT))]))) == 128 - 4 * 10


def test_a_folder_from_elsewhere_names_no_bucket(model, tmp_path):
    folder = partial_copy.fetch(model)
    for each in (folder, found(folder).file.parent):
        (tmp_path / each.name).mkdir()
        for file in each.iterdir():
            if file.is_file():
                (tmp_path / each.name / file.name).write_bytes(file.read_bytes())
    assert partial_copy.find(tmp_path / "model" / "model.safetensors") is None
    (tmp_path / "link").symlink_to(folder)
    assert partial_copy.find(tmp_path / "link" / "model.safetensors") is not None


def test_a_folder_without_weights_and_one_file_are_copied_as_a_whole(server):
    server.write("gs://whole/model/config.json", b"{}")
    server.write("gs://whole/model.gguf", b"GGUF")
    assert [file.name for file in partial_copy.fetch("gs://whole/model").iterdir()] == ["config.json"]
    assert partial_copy.fetch("gs://whole/model.gguf").read_bytes() == b"GGUF"
    with pytest.raises(ValueError, match="There is no gs://whole/absent: name an object"):
        partial_copy.fetch("gs://whole/absent")


def test_a_name_that_leads_out_of_the_folder_is_refused(server, cache):
    server.write("gs://leads-out/model/model.safetensors", CONTENT)
    server.write("gs://leads-out/model/../../x.safetensors", CONTENT)
    with pytest.raises(buckets.BucketError, match="has '..', gs:.*: remove or rename it"):
        partial_copy.fetch("gs://leads-out/model")
    assert not cache.exists()


@pytest.mark.parametrize("length", [2**63, 2**24, len(CONTENT), 0])
def test_a_strange_length_of_the_header_costs_no_more_than_the_file(server, length, monkeypatch):
    standins.constants(monkeypatch, partial_copy, MAX_HEADER_BYTES=8 * BLOCK)
    url, before = f"gs://strange{length}/model", len(server.sent)
    server.write(f"{url}/model.safetensors", length.to_bytes(8, "little") + json.dumps({}).encode() + bytes(20 * BLOCK))
    folder = partial_copy.fetch(url)
    assert sum(end - begin for _, begin, end in server.sent[before:]) <= 9 * BLOCK
    assert (folder / "model.safetensors").stat().st_size <= 8 + 8 * BLOCK

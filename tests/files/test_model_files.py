"""Files of model folders that are not what they seem: links, pipes and devices are never read or copied."""

import os
import pathlib
import re
import shutil

import pytest

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.files import model_files
from reinforce_ada_jax.policy import huggingface, weight_files

CIPHER = pathlib.Path(model_files.__file__).parents[1] / "assets" / "cipher"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(CIPHER, tmp_path / "model")


@pytest.fixture
def private(tmp_path):
    file = tmp_path / "id_ed25519"
    file.write_text('{"secret": 1}')
    return file


HARMS = {
    "a link elsewhere": (lambda file, private: file.symlink_to(private), "is a link to .*id_ed25519, outside of"),
    "a relative link": (lambda file, private: file.symlink_to("../id_ed25519"), "is a link to .*id_ed25519, outside"),
    "a device": (lambda file, private: file.symlink_to("/dev/zero"), "is no regular file"),
    "a pipe": (lambda file, private: os.mkfifo(file), "is no regular file"),
    "a folder": (lambda file, private: file.mkdir(), "is no regular file"),
    "a link to itself": (lambda file, private: file.symlink_to(file), "can't be opened"),
}


@pytest.mark.parametrize(("harm", "message"), HARMS.values(), ids=HARMS)
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
     "chat_template.jinja", "chat_template.json"],
)  # fmt: skip
def test_no_reader_opens_it(folder, private, harm, message, name):
    (folder / name).unlink(missing_ok=True)
    harm(folder / name, private)
    with pytest.raises(ValueError, match=message):
        weight_files.find(folder)
        huggingface.read_config(folder)
        Tokenizer.load(folder)


def test_an_export_copies_no_link(folder, private, tmp_path):
    (folder / "special_tokens_map.json").symlink_to(private)
    architecture, params = huggingface.load(folder)
    with pytest.raises(ValueError, match=r"special_tokens_map.json is a link to .*, outside of its folder"):
        huggingface.save(tmp_path / "exported", architecture, params, tokenizer_from=folder)
    assert not (tmp_path / "exported").exists()


def test_links_of_the_hubs_cache_are_followed(folder, tmp_path):
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert Tokenizer.load(snapshot).vocab_size == Tokenizer.load(folder).vocab_size
    assert weight_files.find(snapshot) == [snapshot / "model.safetensors"]
    # So are links within a folder, and a link to the folder itself.
    (folder / "copy.json").symlink_to("config.json")
    (tmp_path / "linked").symlink_to(folder)
    assert model_files.read_json(tmp_path / "linked" / "copy.json") == model_files.read_json(folder / "config.json")
    # But not those to another model of the cache.
    (tmp_path / "models--c--d" / "blobs").mkdir(parents=True)
    (tmp_path / "models--c--d" / "blobs" / "0").write_text("{}")
    (snapshot / "other.json").symlink_to("../../../models--c--d/blobs/0")
    with pytest.raises(ValueError, match="outside of its folder"):
        model_files.read_json(snapshot / "other.json")


def test_a_linked_gguf_file_can_be_named_by_its_own_path(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "stored.gguf").write_bytes(b"GGUF")
    link = tmp_path / "models" / "mine.gguf"
    link.symlink_to("../stored.gguf")
    with pytest.raises(ValueError, match=re.escape(f"name {tmp_path.resolve() / 'stored.gguf'} itself if you trust")):
        model_files.is_present(link)
    assert model_files.is_present(tmp_path / "stored.gguf")


def test_what_is_not_there(folder):
    assert model_files.read_json(folder / "none.json") is None and model_files.read_text(folder / "none") is None
    assert not model_files.is_present(folder / "config.json" / "deeper.json")
    (folder / "dangling.json").symlink_to("nothing.json")
    assert model_files.read_json(folder / "dangling.json") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe{}", "is not text"),
        (b'{"a": ', "is not JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"[1, 2]", "holds a list, not an object"),
        (b"null", "holds a NoneType, not an object"),
        (b"1" * 5000, "is not JSON"),
    ],
)
def test_json_that_is_no_object_is_refused_in_a_line(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        model_files.read_json(tmp_path / "config.json")
    assert str(error.value).startswith(str(tmp_path / "config.json")) and "Copy it again" in str(error.value)


@pytest.mark.parametrize(
    ("read", "most"),
    [
        (model_files.read_json, model_files.MAX_JSON_BYTES),
        (model_files.read_text, model_files.MAX_BYTES),
        (model_files.read_bytes, model_files.MAX_BYTES),
    ],
)
def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path, read, most):
    file = tmp_path / "tokenizer.json"
    file.touch()
    os.truncate(file, most + 1)  # a file of holes, which takes no room
    with pytest.raises(ValueError, match=f"has {most + 1:,} bytes, more than {most:,}"):
        read(file)

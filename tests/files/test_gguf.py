"""Headers of GGUF files, byte for byte; tests/policy reads models out of whole files."""

import struct

import pytest

from reinforce_ada_jax.files import gguf
from reinforce_ada_jax.files.gguf import Tensor


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


# Two keys: a text, and the alignment 128. Two tensors: two rows of 32 numbers in blocks of 34 bytes, and three floats.
KEYS = text(b"general.name") + struct.pack("<I", 8) + text(b"tiny") + text(b"general.alignment")
KEYS += struct.pack("<II", 4, 128)
TENSORS = text(b"w") + struct.pack("<IQQIQ", 2, 32, 2, 8, 0) + text(b"b") + struct.pack("<IQIQ", 1, 3, 0, 128)
HEADER = b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + KEYS + TENSORS
BEGIN = 256  # 167 bytes of a header, up to the next multiple of 128, where one of 32 would be 192
WHOLE = HEADER.ljust(BEGIN, b"\0") + bytes(128 + 12)


def written(tmp_path, content):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_by_hand(tmp_path, version):
    assert len(HEADER) == 167
    found = gguf.read(written(tmp_path, WHOLE[:4] + struct.pack("<I", version) + WHOLE[8:]))
    assert found.metadata == {"general.name": "tiny", "general.alignment": 128} and found.begin == BEGIN
    # Shapes are the reverse of the file's. Two blocks of 32 elements take 68 bytes; the floats begin 128 bytes later.
    assert found.tensors == {"w": Tensor((2, 32), 8, BEGIN, 68), "b": Tensor((3,), 0, BEGIN + 128, 12)}


def test_every_file_that_was_cut_is_refused(tmp_path):
    for length in range(len(WHOLE)):
        with pytest.raises(ValueError, match="is not a whole GGUF file"):
            gguf.read(written(tmp_path, WHOLE[:length]))
    gguf.read(written(tmp_path, WHOLE))


def test_tensors_may_touch_and_not_overlap(tmp_path):
    offset = WHOLE.rindex(struct.pack("<Q", 128))
    for begin, is_allowed in ((68, True), (67, False), (0, False)):
        content = WHOLE[:offset] + struct.pack("<Q", begin) + WHOLE[offset + 8 :]
        file = written(tmp_path, content)
        if is_allowed:
            assert gguf.read(file).tensors["b"].begin == BEGIN + begin
        else:
            with pytest.raises(ValueError, match="'[wb]' and '[wb]' have bytes in common"):
                gguf.read(file)


@pytest.mark.parametrize("name", ["model.gguf", "deep.json"])
def test_which_file_a_path_means(tmp_path, name):
    assert gguf.find(tmp_path) is None and gguf.find(tmp_path / "absent.gguf") == tmp_path / "absent.gguf"
    (tmp_path / name).touch()
    assert gguf.find(tmp_path) == (tmp_path / name if name == "model.gguf" else None)
    (tmp_path / "config.json").touch()  # a Hugging Face folder, whatever else is in it
    assert gguf.find(tmp_path) is None
    (tmp_path / "folder.gguf").mkdir()
    assert gguf.find(tmp_path / "folder.gguf") is None

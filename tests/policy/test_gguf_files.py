"""GGUF files: the recorded models come out of them as out of their folders, and files that lie are refused."""

import dataclasses
import math
import struct

import gguf as library
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.files import gguf
from reinforce_ada_jax.policy import adapter_files, gguf_files, huggingface
from reinforce_ada_jax.policy.gguf_files import FAMILIES
from tests import standins
from tests.policy import ggufs
from tests.policy.recording import GOLDEN


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_and_its_folder_give_what_the_hugging_face_folder_gives(family, tmp_path):
    file = ggufs.write(tmp_path / "model.gguf", family)
    architecture, params = huggingface.load(GOLDEN / family)
    # The recorded Llama stretches its rotary frequencies in another way than the published ones.
    expected = dataclasses.replace(architecture, rope_scaling=None, eos_ids=(2,), bos_id=1)
    for path in (file, tmp_path):
        found, weights = huggingface.load(path)
        assert found == expected
        assert jax.tree.all(jax.tree.map(np.array_equal, weights, params))
    assert adapter_files.fingerprint(file) == adapter_files.fingerprint(tmp_path)


def blocks(matrix):
    return matrix.reshape(-1, 32)


def q8_0(matrix):
    x = blocks(matrix)
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    whole = np.round(x / np.where(scale == 0, 1, scale))
    return (whole * scale.astype(np.float16).astype(np.float32)).reshape(matrix.shape)


def q4_1(matrix):
    x = blocks(matrix)
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    scale = (high - low) / 15
    whole = np.clip(np.floor((x - low) / np.where(scale == 0, 1, scale) + 0.5), 0, 15)
    return (whole * scale.astype(np.float16).astype(np.float32) + low.astype(np.float16)).reshape(matrix.shape)


def bf16(matrix):
    bits = matrix.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


FORMULAS = {"Q8_0": q8_0, "Q4_1": q4_1, "F16": lambda x: x.astype(np.float16).astype(np.float32), "BF16": bf16}


@pytest.mark.parametrize("kind", FORMULAS)
def test_quantised_matrices_are_scale_times_whole_number(kind, tmp_path, monkeypatch):
    standins.constants(monkeypatch, gguf_files, CHUNK_BYTES=64)  # a few rows at a time
    file = ggufs.write(tmp_path / "model.gguf", "qwen2", kind=kind)
    source = load_file(GOLDEN / "qwen2" / "model.safetensors")
    tensors = gguf_files.Tensors(file)
    assert set(tensors.keys()) == set(source)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        np.testing.assert_array_equal(tensors.get_tensor(name), FORMULAS[kind](source[name]))
    np.testing.assert_array_equal(tensors.get_tensor("model.norm.weight"), source["model.norm.weight"])


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_factors_of_llama_3_are_recognised(factor):
    # As llama.cpp's converter computes them, one frequency at a time.
    factors = []
    for place in range(0, 64, 2):
        wavelength = 2 * math.pi * 500000.0 ** (place / 64)
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else between)
    found = gguf_files._llama3_scaling(np.array(factors, np.float32), 500000.0, 64)
    assert found["factor"] == factor and found["original_max_position_embeddings"] == 8192
    with pytest.raises(ValueError, match="rotary factors"):
        gguf_files._llama3_scaling(np.array(factors, np.float32) * 1.01, 500000.0, 64)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def test_the_tokenizer_splits_as_the_file_says(tmp_path):
    tokenizer = Tokenizer.load(ggufs.write(tmp_path / "model.gguf", "qwen2"))
    ids = {token: index for index, token in enumerate(ggufs.TOKENS)}
    assert tokenizer.stop_ids == (ids["<|endoftext|>"], ids["<|im_end|>"])
    # Digits alone, though the vocabulary could merge "12"; two spaces before a digit are one token.
    text = "and  12<|im_end|><tool>"
    expected = ["and", "ĠĠ", "1", "2", "<|im_end|>", "<tool>"]
    assert [tokenizer.token(index) for index in tokenizer.encode(text).tolist()] == expected
    assert tokenizer.decode(tokenizer.encode("and  12 <tool>é\n")) == "and  12 <tool>é\n"
    messages = [{"role": "user", "content": "and"}]
    assert tokenizer.render_messages(messages) == "<|im_start|>user and<|im_end|>"


def test_bos_is_added_where_the_file_says_so(tmp_path):
    changes = {"tokenizer.ggml.add_bos_token": True}
    tokenizer = Tokenizer.load(ggufs.write(tmp_path / "model.gguf", "qwen2", changes))
    assert [tokenizer.token(index) for index in tokenizer.encode("and").tolist()] == ["<|im_start|>", "and"]


def test_llama_3_files_without_the_flag_have_bos(tmp_path):
    tokenizer = Tokenizer.load(ggufs.write(tmp_path / "model.gguf", "llama", {"tokenizer.ggml.pre": "llama-bpe"}))
    assert [tokenizer.token(index) for index in tokenizer.encode("and").tolist()] == ["<|im_start|>", "and"]
    without = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    tokenizer = Tokenizer.load(ggufs.write(tmp_path / "model.gguf", "llama", without))
    assert [tokenizer.token(index) for index in tokenizer.encode("and").tolist()] == ["and"]


def test_an_exported_folder_has_the_tokenizer(tmp_path):
    file = ggufs.write(tmp_path / "model.gguf", "qwen2", {"tokenizer.ggml.eot_token_id": 0})
    architecture, params = huggingface.load(file)
    huggingface.save(tmp_path / "folder", architecture, params, tokenizer_from=file)
    first, second = Tokenizer.load(file), Tokenizer.load(tmp_path / "folder")
    assert first.stop_ids == second.stop_ids == (0, 2) and first.chat_template == second.chat_template == ggufs.TEMPLATE
    assert first.encode("and  12").tolist() == second.encode("and  12").tolist()
    assert huggingface.load(tmp_path / "folder")[0] == architecture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "splits text by the rule 'tekken'; those known are gpt-2, smollm"),
        ({"tokenizer.ggml.model": "llama"}, "of the kind 'llama', and only byte pairs"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000, and it has"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "a token of its vocabulary is there twice"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "lack a list of texts, tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "a merge of its tokenizer is no pair of tokens"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "Token `zz` out of vocabulary"),
        ({"tokenizer.ggml.pre": ["smollm"]}, r"splits text by the rule \['smollm'\]"),
        ({"tokenizer.ggml.token_type": 7}, "tokenizer.ggml.token_type does not have a kind for each"),
        ({"tokenizer.ggml.add_bos_token": "no"}, "tokenizer.ggml.add_bos_token is 'no', neither true nor false"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
            "tokenizer.ggml.bos_token_id does not say which",
        ),
    ],
)
def test_tokenizers_that_are_not_known_are_refused(changes, message, tmp_path):
    file = ggufs.write(tmp_path / "model.gguf", "qwen2", changes)
    with pytest.raises(ValueError, match=message) as refused:
        Tokenizer.load(file)
    assert str(refused.value).startswith(str(file))  # and no temporary folder


# ---- files that lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "its architecture is 'gemma3'; supported are llama, qwen2, qwen3"),
        ({"qwen2.block_count": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"qwen2.block_count": 2**30}, "num_hidden_layers"),
        ({"qwen2.block_count": "many"}, "num_hidden_layers"),
        ({"qwen2.embedding_length": 64}, "config.json asks for"),
        ({"qwen2.attention.head_count": None}, "num_attention_heads"),
        ({"qwen2.rope.scaling.type": "yarn"}, "its rotary scaling is 'yarn'"),
        ({"qwen2.rope.scaling.factor": 4.0}, "its rotary scaling is 'linear'"),
        ({"qwen2.rope.scale_linear": 2.0}, "its rotary scaling is 'linear'"),
        ({"qwen2.rope.dimension_count": 2}, "it rotates 2 of the 8 components of a head"),
        ({"qwen2.rope.freq_base": "fast"}, "qwen2.rope.freq_base is 'fast', no number"),
        ({"general.alignment": 0}, "its alignment is 0"),
    ],
)
def test_models_that_are_not_whole_are_refused(changes, message, tmp_path):
    file = ggufs.write(tmp_path / "model.gguf", "qwen2", changes)
    with pytest.raises(ValueError, match=message):
        huggingface.load(file)


def test_factors_of_a_head_of_another_size_are_refused_before_memory_is_taken(tmp_path):
    changes = {"llama.attention.key_length": 2**31 - 2}  # 8 GB of wavelengths
    file = ggufs.write(tmp_path / "model.gguf", "llama", changes, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(
        ValueError, match=r"its rotary factors have the shape \(8,\), and a head has the size 2147483646"
    ):
        huggingface.load(file)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: bytes = b"", keys: bytes = b"", num_tensors=None, num_keys=None, version=3, magic=b"GGUF") -> bytes:
    counts = struct.pack("<QQ", bool(tensors) if num_tensors is None else num_tensors, num_keys or bool(keys))
    return magic + struct.pack("<I", version) + counts + keys + tensors + bytes(4096)


def tensor(shape=(32,), kind=0, offset=0, name=b"a") -> bytes:
    return text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


LIES = {
    "nothing": b"",
    "another format": header(magic=b"GGML"),
    "big-endian": header(version=3 << 24),
    "an old version": header(version=1),
    "more keys than bytes": header(num_keys=4000),
    "2**60 keys": header(num_keys=2**60),
    "2**60 tensors": header(num_tensors=2**60),
    "a text of 2**62 bytes": header(keys=struct.pack("<Q", 2**62)),
    "a text that is none": header(keys=text(b"\xff\xfe") + struct.pack("<IB", 0, 1)),
    "an array of 2**61 items": header(keys=text(b"k") + struct.pack("<IIQ", 9, 4, 2**61)),
    "an array of arrays": header(keys=text(b"k") + struct.pack("<IIQ", 9, 9, 1) * 100),
    "a type of value that nobody has": header(keys=text(b"k") + struct.pack("<I", 99)),
    "a key that is there twice": header(keys=(text(b"k") + struct.pack("<IB", 0, 1)) * 2, num_keys=2),
    "arrays with 2**21 items": header(
        keys=b"".join(text(name) + struct.pack("<IIQ", 9, 0, 2**20) + bytes(2**20) for name in (b"a", b"b")), num_keys=2
    ),
    "a tensor beyond the file": header(tensor((2**20,))),
    "an offset beyond the file": header(tensor(offset=2**63)),
    "a shape beyond 64 bits": header(tensor((2**63, 2**63, 2**63))),
    "a tensor of nothing": header(tensor((0,))),
    "a tensor of 60 axes": header(text(b"a") + struct.pack("<I", 60)),
    "half a block": header(tensor((16,), kind=8)),
    "a type that nobody has": header(tensor(kind=77)),
    "a tensor that is there twice": header(tensor() * 2, num_tensors=2),
    "tensors with bytes in common": header(tensor() + tensor(name=b"b", offset=64), num_tensors=2),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused_in_one_line(lie, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(LIES[lie])
    with pytest.raises(ValueError, match=r"is not a whole GGUF file \(.+\)\. Fetch it again") as refused:
        huggingface.load(file)
    assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)


def test_every_cut_of_a_file_is_refused(tmp_path):
    whole = ggufs.write(tmp_path / "whole.gguf", "qwen2").read_bytes()
    file = tmp_path / "cut.gguf"
    for length in range(0, len(whole), len(whole) // 40):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut"):
            huggingface.load(file)


def test_of_several_files_one_must_be_named(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        ggufs.write(tmp_path / name, "qwen2")
    with pytest.raises(ValueError, match=r"has 2 GGUF files \(a.gguf, b.gguf\): name one of them"):
        huggingface.load(tmp_path)
    huggingface.load(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"c.gguf is missing: name a GGUF file"):
        huggingface.load(tmp_path / "c.gguf")


def test_a_file_beside_another_description_must_be_named(tmp_path):
    ggufs.write(tmp_path / "model.gguf", "qwen2")
    (tmp_path / "config.json").write_bytes((GOLDEN / "qwen2" / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"model.gguf describes itself: name that file"):
        huggingface.load(tmp_path)
    huggingface.load(tmp_path / "model.gguf")


def test_a_link_to_a_file_elsewhere_is_refused(tmp_path):
    file = ggufs.write(tmp_path / "model.gguf", "qwen2")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").symlink_to(file)
    with pytest.raises(ValueError, match="is a link to"):
        huggingface.load(tmp_path / "folder")


def test_types_are_those_of_the_library():
    for number, (name, elements, size) in gguf.BLOCKS.items():
        kind = library.GGMLQuantizationType(number)
        assert (kind.name, library.GGML_QUANT_SIZES[kind]) == (name, (elements, size))

"""GGUF files for tests: the recorded models, and a small byte-level vocabulary."""

import contextlib
import json
import pathlib
from typing import Any

import gguf as library
import numpy as np
from safetensors.numpy import load_file

from reinforce_ada_jax.policy.gguf_files import NAMES
from tests.policy.recording import GOLDEN

LETTERS = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "a n", "an d", "1 2", "Ġ 1"]
TOKENS = [*SPECIAL, *LETTERS, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
KINDS = [3] * len(SPECIAL) + [1] * (len(LETTERS) + len(MERGES)) + [4]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"


def with_pairs_side_by_side(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter puts them for Llama: row i of a head and row i + H / 2 become neighbours."""
    rows = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return np.stack([rows[:, 0], rows[:, 1]], axis=2).reshape(matrix.shape)


def write(
    file: pathlib.Path,
    family: str,
    changes: dict[str, Any] | None = None,
    kind: str = "F32",
    tokenizer: bool = True,
    extra: dict[str, np.ndarray] | None = None,
) -> pathlib.Path:
    """The recorded model of a family as a GGUF file, its matrices in the type `kind`; `changes` to its metadata.

    `extra` are further tensors, by the names of GGUF.
    """
    config = json.loads((GOLDEN / family / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = library.GGUFWriter(file, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types(KINDS)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)
    for key, value in (changes or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, library.GGUFValueType.get_type(value))
    ends = {name.rpartition("{}")[2]: theirs.rpartition("{}")[2] for name, theirs in NAMES.items()}
    for name, tensor in load_file(GOLDEN / family / "model.safetensors").items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        theirs = f"blk.{layer}{ends[name.removeprefix(f'model.layers.{layer}')]}" if layer else NAMES[name]
        if family == "llama" and "q_proj" in name:
            tensor = with_pairs_side_by_side(tensor, heads)  # noqa: PLW2901
        if family == "llama" and "k_proj" in name:
            tensor = with_pairs_side_by_side(tensor, kv_heads)  # noqa: PLW2901
        whole_blocks = tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        quantised = library.GGMLQuantizationType[kind if whole_blocks else "F32"]
        data = library.quants.quantize(tensor.astype(np.float32), quantised)
        writer.add_tensor(theirs, data, raw_dtype=quantised)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    with contextlib.closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return file

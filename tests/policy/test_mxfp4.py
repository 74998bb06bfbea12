"""Experts in MXFP4: literal blocks, folders that have them, and folders that are damaged."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reinforce_ada_jax.policy import huggingface, mxfp4, transformer
from tests.policy import recording

EXPERTS = "model.layers.{}.mlp.experts.{}"


def test_literal_blocks():
    # Bytes of a column of 32 rows: the lower half is the even row. 0x21: 0.5 then 1; 0xF7: 6 then -6; then zeros.
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    blocks[0, 0, 0, :2] = 0x21, 0xF7
    blocks[0, 1, 0, 15] = 0xA3  # 1.5 in row 30, -1 in row 31
    scales = np.array([[[127], [124]]], np.uint8)  # 2^0 and 2^-3
    wanted = np.zeros((1, 32, 2), np.float32)
    wanted[0, :4, 0] = 0.5, 1.0, 6.0, -6.0
    wanted[0, 30:, 1] = 1.5 / 8, -1.0 / 8
    numbers = mxfp4.numbers(blocks, scales)
    assert numbers.dtype == jnp.bfloat16
    np.testing.assert_array_equal(numbers.astype(np.float32), wanted)


def test_every_number_and_every_scale_is_exact():
    halves = np.arange(16, dtype=np.uint8)
    blocks = np.broadcast_to(halves | halves << 4, (1, 253, 1, 16))
    scales = np.arange(253, dtype=np.uint8).reshape(1, 253, 1)  # up to 6 * 2^125
    numbers = mxfp4.numbers(blocks, scales)[0].astype(np.float64)
    wanted = np.repeat(mxfp4.NUMBERS.astype(np.float64), 2)[:, None] * 2.0 ** (np.arange(253) - 127)
    # The least is 0.5 * 2^-127, of which bfloat16 has the exact subnormal number.
    np.testing.assert_array_equal(numbers, wanted)


def packed(tmp_path, change=lambda weights: None):
    """(folder of the golden with its experts in MXFP4, in two files, their matrices by name)."""
    folder, rng = tmp_path / "packed", np.random.default_rng(0)
    shutil.copytree(recording.GOLDEN / "gpt_oss", folder)
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    weights, matrices = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for layer in range(2):
        for name, columns in (("gate_up_proj", 64), ("down_proj", 32)):
            full = EXPERTS.format(layer, name)
            weights.pop(full)
            blocks = rng.integers(256, size=(6, columns, 1, 16), dtype=np.uint8)
            scales = rng.integers(120, 126, size=(6, columns, 1), dtype=np.uint8)
            weights |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
            matrices[full] = mxfp4.numbers(blocks, scales)
        full = EXPERTS.format(layer, "gate_up_proj_bias")
        weights[full] = rng.normal(size=(6, 64)).astype(np.float32)
    change(weights)
    # Blocks and scales of a matrix may be in different files.
    parts = {name: "b.safetensors" if name.endswith("_scales") else "a.safetensors" for name in weights}
    for file in set(parts.values()):
        save_file({name: weights[name] for name in parts if parts[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    return folder, matrices


def test_a_folder_with_blocks_is_that_of_its_numbers(tmp_path):
    folder, matrices = packed(tmp_path)
    architecture, params = huggingface.load(folder)
    names = {"gate_up_proj": "expert_gate_up", "down_proj": "expert_down"}
    for layer in range(2):
        for theirs, ours in names.items():
            wanted = matrices[EXPERTS.format(layer, theirs)].astype(np.float32)
            np.testing.assert_array_equal(params["layers"]["mlp"][ours][layer], wanted)
    huggingface.save(tmp_path / "plain", architecture, params, dtype=jnp.bfloat16)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for name, matrix in matrices.items():
        np.testing.assert_array_equal(plain[name], matrix)
    tokens = jnp.asarray(recording.golden("gpt_oss")[2]["tokens"])
    assert np.isfinite(transformer.logits(architecture, params, tokens)).all()


DOWN = EXPERTS.format(1, "down_proj")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, "2 problems: .*1.*down_proj is missing; .*_blocks' is unknown"),
        ({"scales": (6, 31, 1)}, "3 problems: .*1.*down_proj is missing; .*_blocks' is unknown; .*_scales' is unknown"),
        (
            {"blocks": (6, 8, 1, 16), "scales": (6, 8, 1)},
            r"1 problems: .*1.*down_proj has shape \(6, 32, 8\), config.json asks for \(6, 32, 32\)",
        ),
        ({"scales": (6, 32, 1)}, "values of model.layers.1.mlp.experts.down_proj are NaN or infinite"),
    ],
)
def test_damaged_blocks_are_named(tmp_path, changes, message):
    def change(weights):
        for name, shape in changes.items():
            del weights[f"{DOWN}_{name}"]
            if shape is not None:
                weights[f"{DOWN}_{name}"] = np.full(shape, 255, np.uint8)

    with pytest.raises(ValueError, match=message):
        huggingface.load(packed(tmp_path, change)[0])

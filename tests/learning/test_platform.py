"""Choices that depend on the device: dtypes, kernels, micro-batches and copies, on devices that are described."""

import dataclasses

import jax.numpy as jnp
import pytest

from reinforce_ada_jax.config import (
    CollectionConfig,
    Config,
    DataConfig,
    LearningConfig,
    MeshConfig,
    ModelConfig,
    SamplingConfig,
    replaced,
)
from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.learning.learner import loss_config
from reinforce_ada_jax.learning.packing import RowLayout
from reinforce_ada_jax.learning.platform import (
    activation_bytes,
    check_parts,
    chosen_dtype,
    describe_dtype,
    gathers_once,
    micro_batches_per_program,
    micro_rows,
    resolve,
    special_attention,
    tpu_bytes,
)
from reinforce_ada_jax.policy.architecture import from_hf
from tests import standins
from tests.policy import recording


@pytest.mark.parametrize(
    ("name", "head_backend", "attention", "remat"),
    [("cpu", "scan", "blocks", "dots"), ("gpu", "scan", "cudnn", "full"), ("tpu", "pallas_tpu", "splash", "full")],
)
def test_auto_goes_by_the_platform(name, head_backend, attention, remat):
    capability = "9.0" if name == "gpu" else ""
    platform = resolve(
        name, LearningConfig(), hidden_size=4096, head_dim=128, dtype=jnp.bfloat16, capability=capability
    )
    assert (platform.head_backend, platform.attention, platform.remat) == (head_backend, attention, remat)
    assert platform.interpret == (name != "tpu")
    assert platform.head_tile == {"cpu": (1024, 1024), "gpu": (4096, 8192), "tpu": (512, 512)}[name]


@pytest.mark.parametrize(
    ("name", "asked", "chosen"),
    [
        ("cpu", {}, "float32"), ("gpu", {}, "bfloat16"), ("tpu", {}, "bfloat16"),
        ("cpu", {"compute_dtype": "bfloat16"}, "bfloat16"), ("tpu", {"compute_dtype": "float32"}, "float32"),
        ("tpu", {"numerics": "invariant"}, "float32"),
    ],
)  # fmt: skip
def test_the_precision_goes_by_the_platform(name, asked, chosen):
    assert chosen_dtype(Config(model=ModelConfig(**asked)), name).model.compute_dtype == chosen


SMOLLM2, BUILT_IN = 134_515_008, 107_392


@pytest.mark.parametrize(
    ("size", "is_faster", "changes", "chosen"),
    [
        (SMOLLM2, True, {}, "bfloat16"), (SMOLLM2, False, {}, "float32"), (BUILT_IN, True, {}, "float32"),
        (SMOLLM2, True, {"model.numerics": "invariant"}, "float32"), (SMOLLM2, True, {"lora.rank": 4}, "float32"),
    ],
)  # fmt: skip
def test_on_a_cpu_a_large_model_goes_by_the_measured_products(size, is_faster, changes, chosen, monkeypatch):
    standins.processor(monkeypatch, fast_in_bfloat16=is_faster)
    assert chosen_dtype(replaced(Config(), changes), "cpu", size).model.compute_dtype == chosen


def test_a_large_model_in_bfloat16_is_warned_of_where_a_processor_is_not_fast_in_it(monkeypatch):
    standins.processor(monkeypatch, fast_in_bfloat16=False)
    assert "\nwarning: this processor is not faster" in describe_dtype("bfloat16", "cpu", SMOLLM2)
    for dtype, name, size in (("bfloat16", "gpu", SMOLLM2), ("float32", "cpu", SMOLLM2), ("bfloat16", "cpu", BUILT_IN)):
        assert "warning" not in describe_dtype(dtype, name, size)
    standins.processor(monkeypatch, fast_in_bfloat16=True)
    assert describe_dtype("bfloat16", "cpu", SMOLLM2) == "bfloat16 in products, float32 elsewhere"


def test_settings_come_before_the_platform():
    learning = LearningConfig(attention="splash", remat="full")
    platform = resolve("cpu", learning, hidden_size=4096, head_dim=128, dtype=jnp.float32)
    assert (platform.attention, platform.remat) == ("splash", "full")
    assert platform.interpret and platform.refusal == ""


GPU = dict(name="gpu", hidden_size=4096, head_dim=128, dtype=jnp.bfloat16)


def test_gpus_without_cudnn_for_these_rows_compute_in_blocks():
    packed, alone = LearningConfig(responses_per_row=16), LearningConfig(responses_per_row=1)
    ampere = resolve(learning=packed, capability="8.0", **GPU)
    assert (ampere.attention, ampere.refusal) == ("blocks", "packed rows need compute capability 9.0, not 8.0")
    hopper, unpacked = (
        resolve(learning=packed, capability="9.0", **GPU),
        resolve(learning=alone, capability="8.0", **GPU),
    )
    assert (hopper.attention, hopper.refusal, hopper.max_segments) == ("cudnn", "", 16)
    assert (unpacked.attention, unpacked.refusal) == ("cudnn", "")
    assert ampere.describe() == (
        "learner attention blocks (not cudnn: packed rows need compute capability 9.0, not 8.0), output head scan in "
        "tiles of 4,096 x 8,192, recomputes full"
    )
    assert hopper.describe().startswith("learner attention cudnn, output head")
    chosen = resolve(learning=LearningConfig(attention="jnp"), capability="8.0", **GPU)
    assert (chosen.attention, chosen.refusal) == ("jnp", "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(capability="8.0"), "packed rows need compute capability 9.0, not 8.0"),
        (dict(name="cpu"), "the device has no cuDNN"),
        (dict(capability="9.0", special="sliding windows"), "the model has sliding windows"),
        (dict(capability="9.0", context=2), "mesh.context cuts rows"),
        (dict(dtype=jnp.float32, capability="9.0"), "cuDNN takes no float32"),
    ],
)
def test_cudnn_is_refused_where_it_cannot_compute(changes, reason):
    with pytest.raises(ValueError, match=f"learning.attention is 'cudnn', and {reason}: set it to 'auto'"):
        resolve(learning=LearningConfig(attention="cudnn"), **(GPU | changes))


@pytest.mark.parametrize(("family", "reason"), [("gpt_oss", "sinks of attention"), ("gemma3", "sliding windows")])
def test_what_cudnn_lacks_follows_from_the_model(family, reason):
    architecture, learning = recording.golden(family)[0], LearningConfig(attention="cudnn")
    # Sinks are refused in a model without a window, too.
    architecture = dataclasses.replace(architecture, window=architecture.window * (family == "gemma3"))
    settings = GPU | dict(capability="9.0", special=special_attention(architecture))
    with pytest.raises(ValueError, match=f"learning.attention is 'cudnn', and the model has {reason}"):
        resolve(learning=learning, **settings)
    chosen = resolve(learning=LearningConfig(), **settings)
    assert (chosen.attention, chosen.refusal) == ("blocks", f"the model has {reason}")
    assert special_attention(recording.golden("llama")[0]) == ""


def test_parts_of_rows_are_whole_blocks_of_splash_attention():
    splash = resolve("tpu", LearningConfig(), hidden_size=4096, head_dim=128, dtype=jnp.bfloat16, context=4)
    blocks = resolve("gpu", LearningConfig(), hidden_size=4096, head_dim=128, dtype=jnp.bfloat16, context=4)
    assert (splash.attention, blocks.attention) == ("splash", "blocks")
    mesh = make_mesh(context=4)
    config = Config(data=DataConfig(max_prompt_tokens=256), sampling=SamplingConfig(max_response_tokens=512))
    for platform, whole in ((blocks, mesh), (splash, make_mesh())):
        check_parts(platform, whole, config)
    check_parts(splash, mesh, replaced(config, {"data.max_prompt_tokens": 512}))
    with pytest.raises(ValueError, match="is 768, .* a multiple of 128 tokens: with mesh.context = 4 .* of 512"):
        check_parts(splash, mesh, config)


@pytest.mark.parametrize(
    ("copy_gib", "kind", "expected"),
    [
        (2.83, "TPU v5 lite", True),  # 18 % of 15.75 GiB are 2.835
        (2.84, "TPU v5 lite", False),
        (15.0, "TPU v5", True),
        (0.001, "cpu", False), (0.001, "NVIDIA H100 80GB HBM3", False),
    ],
)  # fmt: skip
def test_a_copy_of_the_layers_takes_at_most_18_percent_of_a_tpu(copy_gib, kind, expected):
    assert gathers_once(copy_gib * 2**30, tpu_bytes(kind)) is expected


@pytest.mark.parametrize(
    ("micro_flops", "name", "kind", "expected"),
    [
        (3e13, "tpu", "TPU v5 lite", 13),  # 2 s at 197 TFLOP/s are 3.94e14
        (3e13, "tpu", "TPU v5", 30), (3e13, "gpu", "NVIDIA A100-SXM4-80GB", 20),
        (1.6e9, "cpu", "cpu", 625), (4.6e11, "cpu", "cpu", 2), (1e15, "tpu", "TPU v5 lite", 1),
    ],
)  # fmt: skip
def test_a_program_of_an_update_takes_two_seconds_at_the_peak(micro_flops, name, kind, expected):
    assert micro_batches_per_program(micro_flops, name, kind) == expected


MODEL = ("model", "model")


@pytest.mark.parametrize(
    ("name", "micro_batches", "row_tokens", "row_shards", "token_bytes", "expected"),
    [
        ("cpu", 0, 144, 1, 1, 12),  # 1,728 tokens: 14 rows would need two empty ones
        ("cpu", 0, 16, 1, 1, 96),  # all of them have 1,536
        ("cpu", 0, 144, 8, 1, 8),  # 12 rows are not the same on 8 devices
        ("cpu", 0, 4096, 1, 1, 1), ("cpu", 0, 4096, 8, 1, 8),
        ("cpu", 0, 96, 1, 2**20, 4),  # 512 tokens have 512 MiB, 5 rows would need four empty ones
        ("cpu", 2, 128, 1, 2**20, 48), ("gpu", 0, 128, 1, 2**20, 96),
        ("tpu", 0, 128, 1, 1, 96), ("tpu", 4, 128, 1, 1, 24),
    ],
)  # fmt: skip
def test_micro_batches_of_cpus_fit_their_caches(name, micro_batches, row_tokens, row_shards, token_bytes, expected):
    config = Config(
        data=DataConfig(max_prompt_tokens=row_tokens // 2),
        sampling=SamplingConfig(max_response_tokens=row_tokens // 2),
        collection=CollectionConfig(group_size=4),
        learning=LearningConfig(prompts_per_update=24, micro_batches=micro_batches),
    )
    assert micro_rows(name, config, row_shards, token_bytes, RowLayout(16)) == expected


def test_a_micro_batch_is_more_than_a_row_where_their_number_is_prime():
    config = Config(
        data=DataConfig(max_prompt_tokens=40),
        sampling=SamplingConfig(max_response_tokens=40),
        collection=CollectionConfig(group_size=8),
        learning=LearningConfig(prompts_per_update=16),
    )
    layout = RowLayout(48, tokens=256)
    assert layout.num_rows(128, 80, 1) == 43
    assert micro_rows("cpu", config, 1, 1, layout) == 5  # two empty rows; 8 rows have 2,048 tokens, and need five


def test_activations_of_smollm2_are_those_of_its_products():
    """Seven products of a layer are kept, the result of attention, and the layer's input."""
    architecture = from_hf(
        dict(
            model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3,
        )
    )  # fmt: skip
    outputs = 576 + 192 + 192 + 576 + 1536 + 1536 + 576
    assert activation_bytes(architecture, "dots", "float32") == 30 * 4 * (outputs + 576 + 576)
    assert activation_bytes(architecture, "full", "float32") == 30 * 4 * 576


@pytest.mark.parametrize(
    ("cap", "overlap", "split", "staleness", "dtypes", "expected"),
    [
        (None, "none", 0, 1, MODEL, None), (None, "finish", 0, 1, MODEL, 2.0), (3.0, "finish", 0, 1, MODEL, 3.0),
        (None, "in_flight", 0, 1, MODEL, 2.0), (3.0, "none", 0, 1, MODEL, 3.0), (None, "none", 1, 1, MODEL, 2.0),
        (3.0, "none", 1, 1, MODEL, 3.0), (None, "none", 1, 0, MODEL, None),
        (None, "none", 0, 1, ("int8", "model"), 2.0),
        (3.0, "none", 0, 1, ("int8", "model"), 3.0), (None, "none", 0, 1, ("model", "int8"), 2.0),
    ],
)  # fmt: skip
def test_responses_of_earlier_weights_or_in_int8_have_a_capped_weight(cap, overlap, split, staleness, dtypes, expected):
    config = Config(
        sampling=SamplingConfig(kv_dtype=dtypes[0], weight_dtype=dtypes[1]),
        learning=LearningConfig(truncated_is_cap=cap, clip_low=0.1),
        collection=CollectionConfig(overlap=overlap, max_staleness=staleness),
        mesh=MeshConfig(sampler=split),
    )
    assert loss_config(config).truncated_is_cap == expected
    assert loss_config(config).clip_low == 0.1

"""Live parity with transformers, on random models made on the spot. Needs torch: `make parity`.

The same comparisons as on the goldens (tests/policy/recording.py), over more shapes; and what we save, transformers
loads without a missing or an unexpected tensor, and computes the same.
"""

import copy
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from reinforce_ada_jax.policy import huggingface, mxfp4, transformer
from tests.golden.transformers import make_golden
from tests.parity.published import from_pretrained
from tests.policy import recording

SIZES = make_golden.SIZES | dict(max_position_embeddings=512)
OLMO3_ROPE = dict(
    full_attention=dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=40, attention_factor=1.3,
        beta_fast=24.0, beta_slow=2.0, rope_theta=500000.0,
    ),
    sliding_attention=dict(rope_type="default", rope_theta=500000.0),
)  # fmt: skip
MODELS = {
    "qwen2-tied-group-of-2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-untied-no-groups": transformers.Qwen2Config(
        **SIZES | dict(num_key_value_heads=4, num_hidden_layers=3), tie_word_embeddings=False
    ),
    "qwen2-group-of-4-theta-1e6": transformers.Qwen2Config(
        **SIZES | dict(num_key_value_heads=1), rope_parameters=dict(rope_type="default", rope_theta=1e6)
    ),
    "qwen3-tied-wide-heads": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True, head_dim=32),
    "qwen3-untied-group-of-4": transformers.Qwen3Config(
        **SIZES | dict(num_key_value_heads=1), tie_word_embeddings=False, head_dim=12
    ),
    "llama-scaled-tied": transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=make_golden.LLAMA3_ROPE, head_dim=16
    ),
    "mistral-wide-heads": transformers.MistralConfig(
        **SIZES, tie_word_embeddings=False, sliding_window=None, head_dim=32
    ),
    "smollm3-untied": transformers.SmolLM3Config(
        **SIZES | dict(num_hidden_layers=5), tie_word_embeddings=False, pad_token_id=0
    ),
    "smollm3-yarn": transformers.SmolLM3Config(
        **SIZES | dict(num_hidden_layers=5),
        pad_token_id=0,
        rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, rope_theta=2e6),
    ),
    "olmo2-no-groups": transformers.Olmo2Config(**SIZES | dict(num_key_value_heads=4), pad_token_id=0),
    "mistral-window": transformers.MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=5),
    "ministral-one-of-three": transformers.MinistralConfig(
        **SIZES | dict(num_hidden_layers=3),
        head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3-every-second": transformers.Gemma3TextConfig(
        **SIZES | dict(num_hidden_layers=5),
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    ),
    "gemma3-queries-of-another-scale": transformers.Gemma3TextConfig(
        **SIZES | dict(num_hidden_layers=4),
        head_dim=16,
        query_pre_attn_scalar=21,
        sliding_window=7,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    ),
    "ministral-none-slides": transformers.MinistralConfig(
        **SIZES, head_dim=16, sliding_window=4096, layer_types=["full_attention"] * SIZES["num_hidden_layers"]
    ),
    "olmo3-yarn": transformers.Olmo3Config(
        **SIZES | dict(num_hidden_layers=4), sliding_window=7, pad_token_id=0, rope_parameters=OLMO3_ROPE
    ),
    "olmo3-tied-no-groups": transformers.Olmo3Config(
        **SIZES | dict(num_key_value_heads=4),
        tie_word_embeddings=True,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
        pad_token_id=0,
    ),
    "qwen3-yarn": transformers.Qwen3Config(
        **SIZES,
        head_dim=32,
        rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=1e6),
    ),
    "qwen3-moe-tied": transformers.Qwen3MoeConfig(
        **SIZES,
        tie_word_embeddings=True,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "qwen3-moe-one-of-16": transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_experts=16, num_experts_per_tok=1, norm_topk_prob=False
    ),
    "olmoe-group-of-2": transformers.OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2, pad_token_id=0),
    "olmoe-renormalized": transformers.OlmoeConfig(
        **SIZES | dict(num_key_value_heads=4), num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, pad_token_id=0
    ),
    "gpt-oss-five-layers": transformers.GptOssConfig(
        **SIZES | dict(num_hidden_layers=5, intermediate_size=24),
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=4,
        swiglu_limit=2.0,
        sliding_window=6,
        rope_parameters=make_golden.GPT_OSS_ROPE,
    ),
    "gpt-oss-tied-no-groups": transformers.GptOssConfig(
        **SIZES | dict(num_key_value_heads=4, intermediate_size=40),
        tie_word_embeddings=True,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=3,
        swiglu_limit=3.0,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters=dict(
            rope_type="yarn", factor=32.0, original_max_position_embeddings=32, rope_theta=150000.0, beta_fast=9.0
        ),
    ),
    # Texts of 40 tokens are beyond the original length of the second, and all are within that of the third.
    "phi3-plain-no-groups": transformers.Phi3Config(
        **SIZES | dict(num_key_value_heads=4),
        rope_parameters=dict(rope_type="default", rope_theta=250000.0),
        pad_token_id=0,
    ),
    "phi3-long": transformers.Phi3Config(
        **SIZES,
        tie_word_embeddings=True,
        rope_parameters=make_golden.PHI3_ROPE | dict(original_max_position_embeddings=32),
        pad_token_id=0,
        original_max_position_embeddings=32,
    ),
    "phi3-short-window": transformers.Phi3Config(
        **SIZES,
        sliding_window=9,
        pad_token_id=0,
        original_max_position_embeddings=128,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            partial_rotary_factor=0.5,
            short_factor=[1.25, 1.5],
            long_factor=[2.0, 3.0],
            original_max_position_embeddings=128,
        ),
    ),
    "olmo2-tied-group-of-2": transformers.Olmo2Config(**SIZES, tie_word_embeddings=True, pad_token_id=0),
    "llama-plain-untied-no-groups": transformers.LlamaConfig(
        **SIZES | dict(num_key_value_heads=4), tie_word_embeddings=False, rms_norm_eps=1e-5
    ),
}

MIN_TOKENS = 10  # different ones in each greedy text of 64


@pytest.fixture(scope="module", params=MODELS)
def models(request, tmp_path_factory):
    """(theirs, ours: (architecture, params), recording), of the first seed whose greedy tokens show something.

    No rounding decides them, and no row repeats few tokens only.
    """
    for seed in range(100, 120):
        theirs = make_golden.random_model(MODELS[request.param], seed)
        try:
            recorded = make_golden.record(theirs, seed, length=40, count=64)
        except ValueError:
            continue
        if min(len(np.unique(row)) for row in recorded["greedy"]) < MIN_TOKENS:
            continue
        folder = tmp_path_factory.mktemp("theirs")
        theirs.save_pretrained(folder)
        architecture, params = huggingface.load(folder)
        return theirs, (architecture.for_texts(40), params), recorded
    raise ValueError(f"no seed of 20 gives rows of {MIN_TOKENS} greedy tokens, 1e-3 likelier than the next")


@pytest.mark.parametrize("check", recording.CHECKS)
def test_equals_transformers(models, check):
    _, ours, recorded = models
    check(*ours, recorded)


def test_gradients_are_those_of_transformers(models, tmp_path):
    """The gradient of the mean log-probability: theirs is written as a folder of weights, and read as ours is."""
    theirs, (architecture, params), recorded = models
    tokens = recorded["tokens"]

    def loss(params):
        logprobs = jax.nn.log_softmax(transformer.logits(architecture, params, jnp.asarray(tokens))[:, :-1])
        return jnp.mean(jnp.take_along_axis(logprobs, jnp.asarray(tokens)[:, 1:, None], axis=-1))

    ours = transformer.flatten(jax.jit(jax.grad(loss))(params))
    copied, row = copy.deepcopy(theirs), torch.from_numpy(tokens).long()
    copied(row).logits[:, :-1].log_softmax(-1).gather(-1, row[:, 1:, None]).mean().backward()
    with torch.no_grad():
        for weight in copied.parameters():
            weight.copy_(weight.grad)
    copied.save_pretrained(tmp_path / "gradients")
    wanted = transformer.flatten(huggingface.load(tmp_path / "gradients")[1])
    for name, gradient in ours.items():
        largest = np.abs(wanted[name]).max()
        assert largest > 0, name
        np.testing.assert_allclose(gradient, wanted[name], rtol=1e-4, atol=1e-4 * largest, err_msg=name)


@pytest.mark.parametrize("max_shard_bytes", [5e9, 30_000])
def test_transformers_loads_what_we_save(models, tmp_path, max_shard_bytes):
    theirs, ours, recorded = models
    huggingface.save(tmp_path / "ours", *ours, max_shard_bytes=max_shard_bytes)
    again = from_pretrained(tmp_path / "ours")
    wanted = theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, wanted[name]), name
    with torch.no_grad():
        logits = again(torch.from_numpy(recorded["tokens"]).long()).logits
    np.testing.assert_array_equal(logits.numpy(), recorded["logits"])
    assert again.generation_config.eos_token_id == 2 and again.generation_config.bos_token_id == 1


def test_the_config_of_transformers_and_ours_agree(models, tmp_path):
    theirs, ours, _ = models
    huggingface.save(tmp_path / "ours", *ours)
    written = transformers.AutoConfig.from_pretrained(tmp_path / "ours").to_dict()
    wanted = theirs.config.to_dict()
    # Ours repeats, for older readers, keys that transformers 5 leaves out; what transformers wrote stands there too.
    ignored = {"transformers_version", "_name_or_path", "initializer_range", "use_cache", "pad_token_id"}
    different = {key: (written.get(key), wanted[key]) for key in wanted if written.get(key) != wanted[key]}
    assert different.keys() <= ignored, different


def test_bfloat16_there_and_back(models, tmp_path):
    theirs, (architecture, params), _ = models
    huggingface.save(tmp_path / "narrow", architecture, params, dtype=jnp.bfloat16)
    loaded = from_pretrained(tmp_path / "narrow", "auto")
    assert loaded.dtype == torch.bfloat16
    loaded.save_pretrained(tmp_path / "theirs")
    _, back = huggingface.load(tmp_path / "theirs", dtype=jnp.bfloat16)
    for name, weight in transformer.flatten(params).items():
        np.testing.assert_array_equal(transformer.flatten(back)[name], weight.astype(jnp.bfloat16), err_msg=name)
    # torch and XLA round float32 alike.
    embedding = theirs.model.embed_tokens.weight.to(torch.bfloat16).float()
    np.testing.assert_array_equal(np.asarray(back["embedding"], np.float32), embedding.detach().numpy())


def test_bfloat16_activations_round_alike(models):
    """Not bitwise (sums are ordered otherwise), but no further from float32 than transformers is, within a half."""
    theirs, (architecture, params), recorded = models
    tokens = recorded["tokens"]
    narrow = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(theirs.config), attn_implementation="eager", dtype=torch.bfloat16
    )
    narrow.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        their_error = np.abs(narrow(torch.from_numpy(tokens).long()).logits.float().numpy() - recorded["logits"])
    ours = transformer.logits(architecture, params, jnp.asarray(tokens), dtype=jnp.bfloat16)
    assert np.abs(ours - recorded["logits"]).mean() < 1.5 * their_error.mean()


def test_configurations_of_transformers_4(tmp_path):
    """The older keys, `rope_theta` and `rope_scaling`, give transformers 5 and us the same model."""
    config = MODELS["llama-scaled-tied"]
    theirs = make_golden.random_model(config, 0)
    theirs.save_pretrained(tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    old = json.loads((tmp_path / "old" / "config.json").read_text())
    scaling = old.pop("rope_parameters")
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "torch_dtype": old.pop("dtype")}
    (tmp_path / "old" / "config.json").write_text(json.dumps(old))
    assert huggingface.read_config(tmp_path / "old") == huggingface.read_config(tmp_path / "new")
    frequencies = from_pretrained(tmp_path / "old").model.rotary_emb.inv_freq
    assert torch.equal(frequencies, theirs.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_an_image_model(tmp_path, prefix):
    """Named as in the published folders of Gemma 3, and as the modules of transformers 5 are."""
    config = transformers.Gemma3Config(
        text_config=MODELS["gemma3-every-second"].to_dict(),
        vision_config=dict(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=1,
    )  # fmt: skip
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "image")
    weights = load_file(tmp_path / "image" / "model.safetensors")
    renamed = {name.replace("language_model.model.", prefix): weight for name, weight in weights.items()}
    assert sum(name.startswith(prefix) for name in renamed) > 50 and any("vision_tower" in name for name in renamed)
    save_file(renamed, tmp_path / "image" / "model.safetensors")
    architecture, params = huggingface.load(tmp_path / "image")
    tokens = np.random.default_rng(0).integers(3, 90, (2, 24)).astype(np.int32)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(transformer.logits(architecture, params, jnp.asarray(tokens)), wanted, atol=1e-4)
    huggingface.save(tmp_path / "text", architecture, params)
    again = from_pretrained(tmp_path / "text")
    assert type(again).__name__ == "Gemma3ForCausalLM"
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.from_numpy(tokens).long()).logits.numpy(), wanted, atol=1e-5)


def test_mxfp4_is_read_as_transformers_does():
    rng = np.random.default_rng(0)
    blocks = rng.integers(256, size=(3, 10, 4, 16), dtype=np.uint8)
    scales = rng.integers(1, 250, size=(3, 10, 4), dtype=np.uint8)
    wanted = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    ours = mxfp4.numbers(blocks, scales)
    assert ours.shape == wanted.shape == (3, 128, 10) and wanted.dtype == torch.bfloat16
    np.testing.assert_array_equal(ours.astype(np.float32), wanted.float().numpy())


def test_a_tied_export_has_no_head(tmp_path):
    architecture, params, _ = recording.golden("qwen2")
    huggingface.save(tmp_path / "tied", architecture, params)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    untied = dataclasses.replace(architecture, tied_embedding=False)
    huggingface.save(tmp_path / "untied", untied, params | {"head": 2 * params["embedding"].T})
    theirs = from_pretrained(tmp_path / "untied")
    assert torch.equal(theirs.lm_head.weight, 2 * theirs.model.embed_tokens.weight)

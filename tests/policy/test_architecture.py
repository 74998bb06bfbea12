"""Configurations as Qwen and Meta publish them; parameter counts as their model cards do."""

import dataclasses
import math

import pytest

from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import Architecture, RopeScaling, from_hf, to_hf

QWEN25_1P5B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 8960,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 12,
    "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
LLAMA32_3B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 24, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 32768,
}  # fmt: skip
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128012,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 65536,
    "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0,
    "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
OLMO2_1B = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "olmo2",
    "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-06,
    "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip
OLMO3_7B = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "max_position_embeddings": 65536,
    "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                     "original_max_position_embeddings": 8192, "rope_type": "yarn"},
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None, "bos_token_id": 2,
    "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size": 262144,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
OLMOE_1B_7B = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
    "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                       "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
PHI4 = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 100257,
    "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
    "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000,
    "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
# The long factors are others than those published.
LONG_FACTORS = [1.0 + 1.2 * i for i in range(48)]
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 199999,
    "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3", "num_attention_heads": 24,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
    "pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": LONG_FACTORS, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "use_cache": True,
    "vocab_size": 200064,
}  # fmt: skip
PUBLISHED = {
    "qwen2": QWEN25_1P5B, "qwen3": QWEN3_4B, "llama": LLAMA32_3B, "mistral": MISTRAL_7B, "smollm3": SMOLLM3_3B,
    "olmo2": OLMO2_1B, "olmo3": OLMO3_7B, "gemma3_text": GEMMA3_1B, "gemma3": GEMMA3_4B, "qwen3_moe": QWEN3_30B_A3B,
    "olmoe": OLMOE_1B_7B, "gpt_oss": GPT_OSS_20B, "phi4": PHI4, "phi4_mini": PHI4_MINI,
}  # fmt: skip
COUNTS = {
    "qwen2": 1543714304, "qwen3": 4022468096, "llama": 3212749824, "mistral": 7248023552, "smollm3": 3075098624,
    "olmo2": 1484916736, "olmo3": 7298011136, "gemma3_text": 999885952, "gemma3": 3880263168,
    "qwen3_moe": 30532122624, "olmoe": 6919161856, "gpt_oss": 20914757184, "phi4": 14659507200,
    "phi4_mini": 3836021760,
}  # fmt: skip


def test_llama_reads_field_by_field():
    assert from_hf(LLAMA32_3B) == Architecture(
        family="llama", vocab_size=128256, hidden_size=3072, ffn_size=8192, num_layers=28, num_heads=24,
        num_kv_heads=8, head_dim=128, max_positions=131072, norm_epsilon=1e-5, rope_theta=500000.0,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), qkv_bias=False, qk_norm=False, tied_embedding=True,
        eos_ids=(128001, 128008, 128009), bos_id=128000,
    )  # fmt: skip


def test_what_sets_the_families_apart():
    qwen2, qwen3 = from_hf(QWEN25_1P5B), from_hf(QWEN3_4B)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim, qwen2.eos_ids) == (True, False, 128, (151643,))
    # Not hidden_size / num_heads, which would be 80.
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.rope_scaling) == (False, True, 128, None)


def test_smollm3_rotates_three_layers_of_four():
    every_fourth = tuple(range(3, 36, 4))
    assert from_hf(SMOLLM3_3B).unrotated_layers == every_fourth
    listed = SMOLLM3_3B | {"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 7}
    assert from_hf(listed) == from_hf(SMOLLM3_3B)
    assert from_hf(SMOLLM3_3B).tied_embedding  # its default


@pytest.mark.parametrize("family, count", COUNTS.items())
def test_parameter_counts_are_the_published_ones(family, count):
    architecture = from_hf(PUBLISHED[family])
    assert architecture.num_parameters == count
    declared = transformer.weight_shapes(architecture).values()
    assert sum(math.prod(shape) for shape, _ in declared) == count


def test_an_untied_head_counts_the_embedding_twice():
    tied = from_hf(QWEN25_1P5B)
    assert dataclasses.replace(tied, tied_embedding=False).num_parameters - tied.num_parameters == 151936 * 1536


@pytest.mark.parametrize("family", PUBLISHED)
def test_to_hf_and_back(family):
    architecture = from_hf(PUBLISHED[family])
    written = to_hf(architecture, "bfloat16")
    assert from_hf(written) == architecture
    assert written["dtype"] == "bfloat16"
    # The keys of transformers 4 and those of 5 each suffice.
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    assert from_hf(old) == from_hf(new) == architecture


@pytest.mark.parametrize("family", ["qwen3", "phi4"])
def test_scaling_that_is_added_to_a_folder_of_transformers_5_decides(family):
    # The model cards of Qwen and SmolLM3 say to add it for longer texts. Everything else stays as it was written.
    architecture, yarn = from_hf(PUBLISHED[family]), RopeScaling(4.0, 1.0, 32.0, 8192, "yarn", 0.1 * math.log(4) + 1)
    added = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    written = to_hf(dataclasses.replace(architecture, rope_theta=12345.0), "bfloat16")
    for left_out in ((), ("rope_theta", "partial_rotary_factor")):
        kept = {key: value for key, value in written.items() if key not in left_out}
        found = from_hf(kept | {"rope_scaling": added})
        assert (found.rope_scaling, found.rope_theta) == (yarn, 12345.0)
        assert dataclasses.replace(found, rope_scaling=None, rope_theta=architecture.rope_theta) == architecture


def test_a_model_of_which_no_layer_slides_is_written_with_a_window():
    # transformers raises an error without its size, whatever the layers are.
    full = from_hf(OLMO3_7B | {"layer_types": ["full_attention"] * 32})
    written = to_hf(full, "bfloat16")
    assert (full.window, written["sliding_window"], from_hf(written)) == (0, 4096, full)


def test_gemma_slides_five_layers_of_six():
    gemma = from_hf(GEMMA3_1B)
    assert gemma.sliding_layers == tuple(layer for layer in range(26) if layer % 6 != 5)
    assert (gemma.window, gemma.sliding_theta, gemma.rope_theta, gemma.tied_embedding) == (512, 1e4, 1e6, True)
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 5
    assert from_hf(GEMMA3_1B | {"layer_types": kinds[:26], "sliding_window_pattern": 3}) == gemma
    # The count of google/gemma-3-270m.
    small = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18}
    assert from_hf(GEMMA3_1B | small).num_parameters == 268098176


def test_the_text_part_of_an_image_model():
    gemma = from_hf(GEMMA3_4B)
    assert (gemma.family, gemma.vocab_size, gemma.num_heads, gemma.num_kv_heads) == ("gemma3_text", 262208, 8, 4)
    assert (gemma.head_dim, gemma.window, gemma.sliding_theta, gemma.rope_theta) == (256, 1024, 1e4, 1e6)
    assert gemma.rope_scaling == RopeScaling(8.0, kind="linear")
    assert (gemma.eos_ids, gemma.query_scalar) == ((1, 106), None)
    # Of google/gemma-3-27b: scores are divided by the root of 5,376 / 32, not by that of the size of a head.
    wide = {
        "head_dim": 128, "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    }  # fmt: skip
    large = from_hf(GEMMA3_4B | {"text_config": GEMMA3_4B["text_config"] | wide})
    assert (large.head_dim, large.query_scalar) == (128, 168)
    assert from_hf(to_hf(large, "bfloat16")) == large


def test_olmo3_slides_three_layers_of_four():
    olmo = from_hf(OLMO3_7B)
    assert olmo.sliding_layers == tuple(layer for layer in range(32) if layer % 4 != 3)
    assert (olmo.window, olmo.norm_place, olmo.qk_norm_whole) == (4096, "after", True)
    # Sliding layers have the base of the others, without their scaling.
    assert (olmo.rope_theta, olmo.sliding_theta) == (5e5, 5e5)
    assert olmo.rope_scaling == RopeScaling(8.0, 1.0, 32.0, 8192, "yarn", 1.2079441541679836)
    default = {key: value for key, value in OLMO3_7B.items() if key != "layer_types"}
    assert from_hf(default) == olmo
    # The published factor is 0.1 ln 8 + 1, which is the default.
    short = {key: OLMO3_7B["rope_scaling"][key] for key in ("rope_type", "factor", "original_max_position_embeddings")}
    assert from_hf(OLMO3_7B | {"rope_scaling": short}) == olmo


def test_a_window_of_mistral_is_one_of_all_layers():
    mistral = from_hf(MISTRAL_7B | {"sliding_window": 4096})
    assert (mistral.window, mistral.sliding_layers, mistral.sliding_theta) == (4096, tuple(range(32)), None)
    assert from_hf(to_hf(mistral, "bfloat16")) == mistral


def test_a_window_of_ministral_is_one_of_the_layers_it_names():
    ministral = MISTRAL_7B | {"model_type": "ministral", "sliding_window": 4096}
    assert from_hf(ministral).sliding_layers == tuple(range(32))
    named = from_hf(ministral | {"layer_types": ["full_attention", *["sliding_attention"] * 3] * 8})
    assert named.sliding_layers == tuple(layer for layer in range(32) if layer % 4)
    assert from_hf(to_hf(named, "bfloat16")) == named
    assert from_hf(ministral | {"sliding_window": None}).window == 0


def test_experts_read_field_by_field():
    qwen, olmoe = from_hf(QWEN3_30B_A3B), from_hf(OLMOE_1B_7B)
    assert (qwen.num_experts, qwen.experts_per_token, qwen.expert_size, qwen.renormalizes_experts) == (
        128,
        8,
        768,
        True,
    )
    assert (olmoe.num_experts, olmoe.experts_per_token, olmoe.expert_size) == (64, 8, 1024)
    assert not olmoe.renormalizes_experts
    assert (qwen.qk_norm, qwen.qk_norm_whole, olmoe.qk_norm, olmoe.qk_norm_whole) == (True, False, True, True)
    assert (qwen.norm_place, olmoe.norm_place) == ("before", "before")
    # The 120 and 56 experts that a token does not meet have 3 matrices of 2,048 x 768 and 2,048 x 1,024 in each layer.
    assert qwen.active_parameters == 30532122624 - 48 * 120 * 3 * 2048 * 768 == 3353032704
    assert olmoe.active_parameters == 6919161856 - 16 * 56 * 3 * 2048 * 1024 == 1282017280
    assert qwen.described_size == "30,532,122,624 weights (3,353,032,704 for a token)"
    assert from_hf(QWEN3_4B).active_parameters == COUNTS["qwen3"]
    # As transformers 5 writes it.
    renamed = QWEN3_30B_A3B | {"num_local_experts": 128}
    del renamed["num_experts"]
    assert from_hf(renamed) == qwen


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_experts": None}, "num_experts = None; it must be a whole number from 1 to 4,096"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok = 65; it must be at most num_experts, 64"),
        ({"clip_qkv": 8.0}, "sets clip_qkv = 8.0"),
        ({"model_type": "qwen3_moe"}, "lacks moe_intermediate_size"),
        ({"decoder_sparse_step": 2}, "sets decoder_sparse_step = 2"),
        ({"mlp_only_layers": [0]}, "sets mlp_only_layers = "),
    ],
)
def test_what_is_refused_of_experts(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf(OLMOE_1B_7B | change)


def test_gpt_oss_reads_field_by_field():
    oss = from_hf(GPT_OSS_20B)
    assert (oss.sliding_layers, oss.window, oss.sliding_theta) == (tuple(range(0, 24, 2)), 128, None)
    assert oss.rope_scaling == RopeScaling(32.0, 1.0, 32.0, 4096, "yarn", 0.1 * math.log(32) + 1, truncates=False)
    assert (oss.qkv_bias, oss.output_bias, oss.attention_sinks, oss.tied_embedding) == (True, True, True, False)
    assert (oss.num_experts, oss.experts_per_token, oss.expert_size, oss.renormalizes_experts) == (32, 4, 2880, True)
    assert (oss.expert_limit, oss.head_dim, oss.norm_epsilon, oss.rope_theta) == (7.0, 64, 1e-5, 150000.0)
    # The 28 experts that a token does not meet have two matrices and their biases. The model card has 3.6 billion
    # active weights: these without the embedding.
    assert oss.active_parameters == 20914757184 - 24 * 28 * (3 * 2880 * 2880 + 3 * 2880) == 4187440704
    # What transformers leaves out.
    short = {key: GPT_OSS_20B[key] for key in GPT_OSS_20B.keys() - {"layer_types", "swiglu_limit", "attention_bias"}}
    assert from_hf(short) == oss
    assert from_hf(GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None}) == (
        dataclasses.replace(oss, num_layers=36, num_experts=128, sliding_layers=tuple(range(0, 36, 2)))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": False}, "sets attention_bias = False"),
        ({"swiglu_alpha": 1.0}, "sets swiglu_alpha = 1.0"),
        ({"swiglu_limit": "7"}, "swiglu_limit = '7'; it must be a number above 0"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok = 33; it must be at most num_experts, 32"),
    ],
)
def test_what_is_refused_of_gpt_oss(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf(GPT_OSS_20B | change)


def test_phi4_mini_rotates_three_quarters_of_a_head():
    phi = from_hf(PHI4_MINI)
    assert (phi.head_dim, phi.rotary_dim, phi.window, phi.sliding_layers) == (128, 96, 0, ())
    scaling = phi.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_positions) == ("longrope", 32.0, 4096)
    assert scaling.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    # The first folders of Phi-3 name it so, and Phi-3-mini-4k has a window.
    assert from_hf(PHI4_MINI | {"rope_scaling": PHI4_MINI["rope_scaling"] | {"type": "su"}}) == phi
    windowed = from_hf(PHI4 | {"sliding_window": 2047})
    assert (windowed.window, len(windowed.sliding_layers)) == (2047, 40)
    assert from_hf(to_hf(windowed, "bfloat16")) == windowed
    # A size of the model is not read among the numbers of the rotation.
    assert from_hf(PHI4_MINI | {"rope_scaling": PHI4_MINI["rope_scaling"] | {"max_position_embeddings": "x"}}) == phi


def test_the_longest_text_of_a_run_chooses_the_frequencies():
    phi = from_hf(PHI4_MINI)
    assert phi.for_texts(4096) == phi
    assert phi.for_texts(4097).rope_scaling == dataclasses.replace(phi.rope_scaling, is_long=True)
    assert to_hf(phi.for_texts(4097), "bfloat16") == to_hf(phi, "bfloat16")
    assert from_hf(PHI4).for_texts(10**6) == from_hf(PHI4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5: of heads of 128 numbers"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor = 0.01: of heads of 128 numbers"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor = 'half'; it must be a number above 0"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}}, "'longrope' but lacks long_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0]}},
            "long_factor = .*must be 48 numbers above 0",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [0] * 48, "long_factor": [1.0] * 48}},
            "short_factor = .*must be 48 numbers above 0",
        ),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings = 0; it must be a whole number"),
        (
            {"rope_scaling": PHI4_MINI["rope_scaling"] | {"original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings = 0; it must be at least 1",
        ),
        (
            {"rope_scaling": PHI4_MINI["rope_scaling"] | {"partial_rotary_factor": "0.5"}},
            "rope_scaling = .* must be of numbers above 0",
        ),
    ],
)
def test_what_is_refused_of_phi(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf(PHI4_MINI | change)


def test_no_stop_token_and_several():
    assert from_hf(QWEN3_4B | {"eos_token_id": None}).eos_ids == ()
    assert from_hf(QWEN3_4B | {"eos_token_id": [7, 8]}).eos_ids == (7, 8)
    nothing = dataclasses.replace(from_hf(QWEN3_4B), eos_ids=(), bos_id=None)
    assert from_hf(to_hf(nothing, "float32")) == nothing


def test_null_is_no_value():
    assert from_hf(GEMMA3_1B | {"rope_parameters": {"full_attention": None}}) == from_hf(GEMMA3_1B)
    nothing = {"rms_norm_eps": None, "rope_theta": None, "head_dim": None, "rope_parameters": {"rope_type": "default"}}
    found = from_hf(QWEN25_1P5B | nothing)
    assert (found.norm_epsilon, found.rope_theta, found.head_dim) == (1e-6, 10_000.0, 128)


@pytest.mark.parametrize(
    ("config", "expected"),
    [(MISTRAL_7B, (4096, 32)), (MISTRAL_7B | {"model_type": "ministral"}, (4096, 32)), (GPT_OSS_20B, (128, 12))],
    ids=["mistral", "ministral", "gpt_oss"],
)
def test_windows_that_are_left_out_are_those_of_transformers(config, expected):
    """The attributes of MistralConfig, MinistralConfig and GptOssConfig of transformers 5.23."""
    found = from_hf({name: value for name, value in config.items() if name != "sliding_window"})
    assert (found.window, len(found.sliding_layers)) == expected


def test_a_rotary_base_that_is_left_out_is_that_of_transformers():
    smollm3 = {name: value for name, value in SMOLLM3_3B.items() if name not in ("rope_theta", "rope_parameters")}
    assert from_hf(smollm3).rope_theta == 2e6


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2'; supported: qwen2, qwen3, llama, mistral, ministral, smollm3, olmo2, olmo3, ",
        ),
        ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
        ({"hidden_act": "gelu"}, "sets hidden_act = 'gelu'"),
        ({"use_sliding_window": True}, "sets use_sliding_window = True"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window = 0; it must be a whole number from 1"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar = -1; it must be a number above 0"),
        ({"final_logit_softcapping": 30.0}, "sets final_logit_softcapping = 30.0"),
        ({"model_type": "gemma3_text", "head_dim": 256, "hidden_act": "silu"}, "sets hidden_act = 'silu'"),
        (
            {"model_type": "gemma3_text", "head_dim": 256, "hidden_act": None, "layer_types": ["full_attention"]},
            "layer_types = .*36 times sliding_attention or full_attention",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1]}, "no_rope_layers = .* must be 36 numbers, 0 or 1"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0.5}, "no_rope_layer_interval = 0.5"),
        ({"mlp_bias": True}, "sets mlp_bias = True"),
        ({"attention_bias": True}, "sets attention_bias = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sets layer_types = .*sliding_attention"),
        ({"head_dim": 127}, r"heads of 127 numbers \(head_dim, .*need an even number"),
        (
            {"model_type": "llama", "head_dim": None, "num_attention_heads": 4096},
            "heads of 0 numbers .*hidden_size 2560 / num_attention_heads 4096",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rotary scaling 'longrope'.*Remove rope_scaling"),
        ({"rope_scaling": {"rope_type": []}}, r"rotary scaling \[\].*Remove rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' but lacks original_max_position_embeddings"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 8192,
                    "truncate": False,
                    "mscale": 1.0,
                }
            },
            "'yarn' with mscale, which no released model",
        ),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
                "rope_theta": 1.0,
            },
            "'yarn' with rope_theta = 1, which",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling = .* must be of numbers above 0"),
        ({"rope_parameters": {"full_attention": 5}}, "rope_parameters = .* must be of an object for each kind"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor, high_freq_factor"),
    ],
)
def test_what_is_refused(change, message):
    config = {key: value for key, value in (QWEN3_4B | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        from_hf(config)

"""Makes the goldens beside this file: tiny random transformers models, and what transformers computes with them.

Needs torch and transformers (requirements-parity.txt); the tests that read the goldens need neither. Run from the
repository's root; seeds are fixed, and the versions used are written into every recording:

    python -m tests.golden.transformers.make_golden

Each folder NAME/ holds config.json, model.safetensors (float32) and recording.npz. Every bias and norm is far from its
initial value, so that a loader that drops one is caught. A recording holds, float32 unless said otherwise:

    tokens int32[B, T]       rows of different tokens        logits [B, T, V]
    greedy int32[B, G]       greedy continuation of each row
    frequencies [H/2]        rotary, inverse
    layer_input, attention_norm, attention, feed_forward_norm, feed_forward, layer  [B, T, D]
                             in and out of the modules of the last layer
    query [B, T, N, H], key [B, T, K, H]      of that layer, rotated
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3_ROPE = dict(  # of wavelengths 6, 20, 63, ...: 6 < 32/4 stays, 20 is interpolated, those > 32/1 are stretched
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
OLMO3_ROPE = {  # of wavelengths 6, 63, 628, ... by an original length of 640: the second is interpolated
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 640,
        "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.25,
    },
}  # fmt: skip
GPT_OSS_ROPE = {  # interpolates between indices 0.62 and 3.41; rounded, these are 0 and 4
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 640,
    "beta_fast": 50.0, "beta_slow": 2.0, "truncate": False,
}  # fmt: skip
PHI3_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [1.0, 4.0, 9.0], "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-6),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=16, rms_norm_eps=1e-6),
    "llama": transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5
    ),
    "mistral": transformers.MistralConfig(
        **SIZES, tie_word_embeddings=False, head_dim=16, sliding_window=None, rms_norm_eps=1e-5
    ),
    # The first layer has no rotary positions, the last one has.
    "smollm3": transformers.SmolLM3Config(**SIZES, tie_word_embeddings=True, no_rope_layers=[0, 1], pad_token_id=0),
    "olmo2": transformers.Olmo2Config(**SIZES, tie_word_embeddings=False, rms_norm_eps=1e-6, pad_token_id=0),
    "mistral_window": transformers.MistralConfig(**SIZES, tie_word_embeddings=True, sliding_window=7),
    # The first layer slides, the last one does not; each kind has a rotary base of its own.
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=7,
        rms_norm_eps=1e-6,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=GEMMA_ROPE,
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=3, pad_token_id=0),
    "olmo3": transformers.Olmo3Config(
        **SIZES,
        tie_word_embeddings=False,
        sliding_window=7,
        rms_norm_eps=1e-6,
        pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=OLMO3_ROPE,
    ),
    # Rotated are 6 of the 8 numbers of a head, and texts are shorter than the original length.
    "phi3": transformers.Phi3Config(
        **SIZES,
        tie_word_embeddings=True,
        sliding_window=7,
        rope_parameters=PHI3_ROPE,
        pad_token_id=0,
        original_max_position_embeddings=64,
    ),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES | dict(intermediate_size=24),
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=3,
        swiglu_limit=2.5,  # beyond it are a tenth of the numbers
        sliding_window=7,
        rope_parameters=GPT_OSS_ROPE,
    ),
    # The first layer slides, the last one does not, and both have the same rotary base.
    "ministral": transformers.MinistralConfig(
        **SIZES, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
    ),
}


# Where the family's number gives two tokens that are equally likely.
SEEDS = {"smollm3": 10, "gpt_oss": 12, "phi3": 20}


def random_model(config: transformers.PreTrainedConfig, seed: int) -> transformers.PreTrainedModel:
    """A model with N(0, 1/4) biases, norms (and sinks) of 1 + N(0, 1/16), a N(0, 1/D) embedding and other matrices of
    N(0, 2.25/fan_in).

    Smaller matrices would let the embedding decide: a tied model then repeats its last token, and its greedy
    continuation shows nothing.
    """
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if name.endswith((".bias", "_proj_bias")):
                weight.copy_(0.5 * values)
            elif config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
                weight.copy_(1.5 * values * config.hidden_size**-0.5)  # [E, D, Y]: the fan-in is not the last axis
            elif weight.ndim == 1:
                weight.copy_(1 + 0.25 * values)
            else:
                weight.copy_(values * (1.0 if "embed" in name else 1.5) * weight.shape[-1] ** -0.5)
    return model.eval()


def greedy(model: transformers.PreTrainedModel, tokens: np.ndarray, count: int) -> np.ndarray:
    """int32[B, count], the likeliest continuation, by full forward passes.

    Raises:
      ValueError: two tokens come within 1e-3 of each other somewhere, so that rounding could decide.
    """
    rows = torch.from_numpy(tokens).long()
    for _ in range(count):
        best = model(rows, use_cache=False).logits[:, -1].topk(2)
        margin = (best.values[:, 0] - best.values[:, 1]).min().item()
        if margin < 1e-3:
            raise ValueError(f"The two likeliest tokens differ by {margin:.1e}: choose another seed.")
        rows = torch.cat([rows, best.indices[:, :1]], dim=1)
    return rows[:, tokens.shape[1] :].numpy().astype(np.int32)


def _record_modules(model: transformers.PreTrainedModel, recording: dict[str, np.ndarray]) -> list:
    layer = model.model.layers[-1]

    def keep(name):
        def hook(module, args, output):
            recording[name] = (output[0] if isinstance(output, tuple) else output).numpy()

        return hook

    def keep_input(module, args):
        recording["layer_input"] = args[0].numpy()

    attention_norm = getattr(layer, "input_layernorm", layer.post_attention_layernorm)
    after = getattr(layer, "post_feedforward_layernorm", layer.post_attention_layernorm)
    feed_forward_norm = getattr(layer, "pre_feedforward_layernorm", after)
    modules = {
        "attention_norm": attention_norm, "attention": layer.self_attn, "layer": layer,
        "feed_forward_norm": feed_forward_norm, "feed_forward": layer.mlp,
    }  # fmt: skip
    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    return [*hooks, layer.register_forward_pre_hook(keep_input)]


def record_forward(model: transformers.PreTrainedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Records the arrays of the module's docstring for rows of tokens, except `greedy`."""
    rotary = model.model.rotary_emb
    frequencies = rotary.full_attention_inv_freq if hasattr(rotary, "full_attention_inv_freq") else rotary.inv_freq
    recording = {"tokens": tokens, "frequencies": frequencies.numpy()}
    family = sys.modules[type(model).__module__]
    rotate = family.apply_rotary_pos_emb

    def rotate_and_keep(*args, **kwargs):
        query, key = rotate(*args, **kwargs)
        recording["query"], recording["key"] = (x.transpose(1, 2).numpy() for x in (query, key))
        return query, key

    family.apply_rotary_pos_emb = rotate_and_keep
    hooks = _record_modules(model, recording)
    with torch.no_grad():
        recording["logits"] = model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()
    for hook in hooks:
        hook.remove()
    family.apply_rotary_pos_emb = rotate
    return {name: np.ascontiguousarray(value) for name, value in recording.items()}


def record(model: transformers.PreTrainedModel, seed: int, length: int = 24, count: int = 16) -> dict[str, np.ndarray]:
    """Records the arrays of the module's docstring, for two rows of `length` random tokens."""
    tokens = np.random.default_rng(seed).integers(3, model.config.vocab_size, (2, length)).astype(np.int32)
    with torch.no_grad():
        return {**record_forward(model, tokens), "greedy": greedy(model, tokens, count)}


def main():
    for number, (name, config) in enumerate(CONFIGS.items()):
        seed = SEEDS.get(name, number)
        model = random_model(config, seed)
        model.save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink()
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        np.savez_compressed(HERE / name / "recording.npz", **record(model, seed), versions=np.array(versions))
        for file in sorted((HERE / name).iterdir()):
            print(f"{file.relative_to(HERE)}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

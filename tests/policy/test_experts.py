"""The choice of experts, their sum, and what is refused; whole models are compared in test_transformer.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.learning.update import EXPERT_METRICS
from reinforce_ada_jax.policy import experts, lora, transformer
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.sampling.engine import Engine
from tests.policy import recording
from tests.policy.adapting import random_adapters
from tests.sampling import tiny

ARCHITECTURE = from_hf(
    dict(
        model_type="olmoe", vocab_size=8, hidden_size=6, intermediate_size=4, num_hidden_layers=1, num_experts=5,
        num_attention_heads=1, num_experts_per_tok=2,
    )
)  # fmt: skip
RENORMALIZED = dataclasses.replace(ARCHITECTURE, renormalizes_experts=True)
GPT_OSS = dataclasses.replace(RENORMALIZED, expert_limit=7.0)
ragged_dot = jax.lax.ragged_dot
mixture = jax.jit(experts.mixture, static_argnums=0)


def compute(*arguments):
    return mixture(*arguments)[0]


@functools.cache
def example():
    """(x, router, gate, up, down): three rows of seven tokens."""
    rng = np.random.default_rng(0)
    shapes = (3, 7, 6), (6, 5), (5, 6, 4), (5, 6, 4), (5, 4, 6)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


@functools.cache
def recorded():
    """Two experts of each token of the example; the last token of each row has no record."""
    rng = np.random.default_rng(3)
    record = np.array([rng.permutation(5)[:2] for _ in range(21)], np.uint8).reshape(3, 7, 2)
    record[:, -1] = experts.empty_record(ARCHITECTURE, 3)
    return jnp.asarray(record)


def token_by_token(architecture, x, router, gate, up, down, record=None):
    result = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:2]):
        token = np.asarray(x[place], np.float64)
        odds = np.exp(token @ router)
        chosen = np.argsort(-odds)[: architecture.experts_per_token]
        if record is not None and place[1] < 6:
            chosen = np.asarray(record[place])
        weights = odds[chosen] / (odds[chosen] if architecture.renormalizes_experts else odds).sum()
        for expert, weight in zip(chosen, weights, strict=True):
            activation = token @ gate[expert] / (1 + np.exp(-(token @ gate[expert])))
            result[place] += weight * ((activation * (token @ up[expert])) @ down[expert])
    return result


def test_the_softmax_is_over_all_experts():
    # Odds 4 : 1 : 3 : 2 of 10. A softmax of the two largest logits alone would give 4/7 and 3/7.
    logits = jnp.log(jnp.array([[4.0, 1.0, 3.0, 2.0]]))
    weights, chosen = experts.choose(ARCHITECTURE, logits)
    np.testing.assert_array_equal(chosen, [[0, 2]])
    np.testing.assert_allclose(weights, [[0.4, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(experts.choose(RENORMALIZED, logits)[0], [[4 / 7, 3 / 7]], rtol=1e-6)


@pytest.mark.parametrize("architecture", [ARCHITECTURE, RENORMALIZED], ids=["plain", "renormalized"])
def test_the_sum_is_that_of_each_token_alone(architecture):
    np.testing.assert_allclose(compute(architecture, *example()), token_by_token(architecture, *example()), atol=2e-5)


@pytest.mark.parametrize("architecture", [ARCHITECTURE, RENORMALIZED], ids=["plain", "renormalized"])
def test_recorded_experts_have_the_weights_of_this_router(architecture):
    ours = mixture(architecture, *example(), replayed=recorded())[0]
    np.testing.assert_allclose(ours, token_by_token(architecture, *example(), record=recorded()), atol=2e-5)


def test_a_record_has_room_for_no_expert():
    for count, dtype in ((254, np.uint8), (255, np.uint16), (4096, np.uint16)):
        record = experts.empty_record(dataclasses.replace(ARCHITECTURE, num_experts=count), 1)
        assert record.dtype == dtype and (record >= count).all()


def test_the_chosen_experts_are_those_with_the_largest_logits():
    x, router, *matrices = example()
    chosen = mixture(ARCHITECTURE, x, router, *matrices)[1]
    wanted = np.argsort(-np.einsum("BTD,DE->BTE", x, router), axis=-1)[..., :2]
    np.testing.assert_array_equal(chosen, wanted)


@pytest.mark.parametrize("wrap", [functools.partial(jax.jit, static_argnums=0), lambda f: f])
def test_the_load_of_experts(wrap):
    chosen = jnp.array([[[0, 2], [2, 1], [3, 3]], [[2, 0], [1, 2], [2, 3]]])
    counted = jnp.array([[True, True, False], [True, True, False]])
    np.testing.assert_array_equal(wrap(experts.load)(5, chosen, counted), [2, 2, 4, 0, 0])


def test_metrics_of_the_load():
    # Layers of 5 experts. 8 tokens, at most 4 where 1.6 are the mean: 2.5; and 10 of 10: 5. Two and four are idle.
    metrics = experts.load_metrics(jnp.array([[2.0, 2, 4, 0, 0], [0, 10, 0, 0, 0]]))
    assert metrics["expert_load_max"] == pytest.approx((2.5 + 5) / 2)
    assert metrics["expert_idle_share"] == pytest.approx(6 / 10)
    assert metrics.keys() == set(EXPERT_METRICS)
    nothing = experts.load_metrics(jnp.zeros((2, 5)))
    assert (nothing["expert_load_max"], nothing["expert_idle_share"]) == (0, 1)


def test_no_token_is_dropped_where_all_choose_the_same_expert():
    x, router, *matrices = example()
    x = jnp.abs(x)
    router = router.at[:, 3].set(9.0)
    assert (experts.choose(ARCHITECTURE, x.reshape(-1, 6) @ router)[1][:, 0] == 3).all()
    arguments = x, router, *matrices
    np.testing.assert_allclose(compute(ARCHITECTURE, *arguments), token_by_token(ARCHITECTURE, *arguments), atol=2e-5)


def test_the_swiglu_of_gpt_oss_is_clamped():
    # By turns of gate and up. Of the gate 9 becomes 7, and -9 stays; of the others 8 becomes 7 and -8 becomes -7.
    numbers = jnp.array([[2.0, 0.5, 9.0, 8.0, -9.0, -8.0]])
    # (up + 1) gate / (1 + exp(-1.702 gate))
    wanted = 1.5 * 2 / (1 + np.exp(-3.404)), 8 * 7 / (1 + np.exp(-11.914)), -6 * -9 / (1 + np.exp(15.318))
    np.testing.assert_allclose(experts.clamped_swiglu(numbers, 7.0), [wanted], rtol=1e-6)


@functools.cache
def example_of_gpt_oss():
    """(x, router, both, None, down, biases): the example, where many numbers are clamped."""
    x, router, gate, up, down = example()
    both = jnp.stack([4 * gate, 4 * up], axis=-1).reshape(5, 6, 8)
    rng = np.random.default_rng(1)
    biases = experts.Biases(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((5,), (5, 8), (5, 6))))
    return x, router, both, None, down, biases


def test_experts_of_gpt_oss_are_those_of_each_token_alone():
    x, router, both, _, down, biases = example_of_gpt_oss()
    wanted, most = np.zeros(x.shape), 0.0
    for place in np.ndindex(x.shape[:2]):
        token = np.asarray(x[place], np.float64)
        logits = token @ router + biases.router
        chosen = np.argsort(-logits)[:2]
        for expert, weight in zip(chosen, jax.nn.softmax(logits[chosen]), strict=True):
            numbers = token @ both[expert] + biases.gate_up[expert]
            hidden = experts.clamped_swiglu(jnp.asarray(numbers, jnp.float32)[None], 7.0)[0]
            wanted[place] += weight * (hidden @ down[expert] + biases.down[expert])
            most = max(most, numbers.max())
    np.testing.assert_allclose(compute(GPT_OSS, *example_of_gpt_oss()), wanted, rtol=1e-4, atol=1e-4)
    assert most > 14


def results_and_gradients(architecture, arguments, replayed, mesh):
    """((sum, experts), gradients of a weighted sum to all but the record)."""
    compute = experts.on_devices(functools.partial(experts.mixture, architecture), None, mesh)

    def loss(arguments):
        mixed, chosen = compute(*arguments, *[None] * (6 - len(arguments)), replayed)
        return jnp.sum(mixed * jnp.cos(jnp.arange(mixed.size)).reshape(mixed.shape)), (mixed, chosen)

    (_, results), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments)
    return results, gradients


def behind_groups(x, sizes, value):
    return jnp.where((jnp.arange(len(x)) < jnp.sum(sizes))[:, None], x, value)


@jax.custom_vjp
def unwritten(rows, matrices, sizes):
    """The grouped product of a TPU where the memory behind the last group holds NaN."""
    return behind_groups(ragged_dot(rows, matrices, sizes), sizes, jnp.nan)


def unwritten_backward(arguments, slope):
    *factors, sizes = arguments
    factors = behind_groups(factors[0], sizes, 0), factors[1]
    product = functools.partial(ragged_dot, group_sizes=sizes)
    of_rows, of_matrices = jax.vjp(product, *factors)[1](behind_groups(slope, sizes, 0))
    return behind_groups(of_rows, sizes, jnp.nan), of_matrices, None


unwritten.defvjp(lambda *arguments: (unwritten(*arguments), arguments), unwritten_backward)


@pytest.mark.parametrize(
    ("architecture", "arguments", "replayed"),
    [
        pytest.param(RENORMALIZED, example(), None, id="qwen-chosen", marks=pytest.mark.slow),
        pytest.param(GPT_OSS, example_of_gpt_oss(), None, id="gpt_oss-chosen"),
        pytest.param(RENORMALIZED, example(), recorded(), id="qwen-replayed"),
        pytest.param(GPT_OSS, example_of_gpt_oss(), recorded(), id="gpt_oss-replayed", marks=pytest.mark.slow),
    ],
)
def test_five_devices_with_an_expert_each_give_the_sum_of_one(monkeypatch, architecture, arguments, replayed):
    (wanted, chosen), slopes = results_and_gradients(architecture, arguments, replayed, None)
    monkeypatch.setattr(jax.lax, "ragged_dot", unwritten)
    # Of the 42 rows, some are another device's on each.
    (mixed, same), gradients = results_and_gradients(architecture, arguments, replayed, mesh_lib.make_mesh(tensor=5))
    assert len(np.unique(chosen)) == 5
    np.testing.assert_array_equal(same, chosen)
    np.testing.assert_allclose(mixed, wanted, rtol=1e-5, atol=2e-5)
    for ours, slope in zip(jax.tree.leaves(gradients), jax.tree.leaves(slopes), strict=True):
        np.testing.assert_allclose(ours, slope, rtol=0, atol=1e-5 * np.abs(slope).max())
        assert np.abs(slope).max() > 0.1


@pytest.mark.slow  # it is about the recording
def test_the_golden_notices_a_model_without_sinks():
    architecture, params, recorded = recording.golden("gpt_oss")
    attention = params["layers"]["attention"]
    without = attention | {"sinks": jnp.full_like(attention["sinks"], -1e9)}
    params = params | {"layers": params["layers"] | {"attention": without}}
    logits = transformer.logits(architecture, params, jnp.asarray(recorded["tokens"]))
    assert np.abs(logits - recorded["logits"])[:, -1].max() > 0.1


def test_a_token_of_padding_reaches_no_other():
    x, *weights = example()
    spoiled = compute(ARCHITECTURE, x.at[1, 4:].set(jnp.nan), *weights)
    kept = np.ones((3, 7), bool)
    kept[1, 4:] = False
    np.testing.assert_allclose(spoiled[kept], compute(ARCHITECTURE, x, *weights)[kept], atol=1e-6)


@pytest.mark.parametrize("replayed", [None, recorded()], ids=["chosen", "replayed"])
def test_gradients_are_those_of_the_sum_over_all_experts(replayed):
    def dense(x, router, gate, up, down):
        probabilities = jax.nn.softmax(jnp.einsum("BTD,DE->BTE", x, router))
        least = jnp.sort(probabilities, axis=-1)[..., -2:-1]
        is_chosen = probabilities >= jnp.broadcast_to(least, probabilities.shape)
        if replayed is not None:
            is_replayed = (replayed[..., None].astype(jnp.int32) == jnp.arange(5)[None, None, None]).any(2)
            is_chosen = is_chosen.at[:, :-1].set(is_replayed[:, :-1])
        weights = jnp.where(is_chosen, probabilities, 0)
        activation = jax.nn.silu(jnp.einsum("BTD,EDX->BTEX", x, gate)) * jnp.einsum("BTD,EDX->BTEX", x, up)
        return jnp.einsum("BTEX,EXD,BTE->BTD", activation, down, weights)

    def gradients(function):
        return jax.jit(jax.grad(lambda *arguments: jnp.sum(jnp.sin(function(*arguments))), argnums=range(5)))(
            *example()
        )

    grouped = gradients(lambda *arguments: experts.mixture(ARCHITECTURE, *arguments, replayed=replayed)[0])
    for ours, wanted in zip(grouped, gradients(dense), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-4)
        assert np.abs(wanted).max() > 0.1


@pytest.mark.slow  # it is about the recording
def test_the_golden_notices_a_softmax_of_the_chosen_alone(monkeypatch):
    architecture, params, recorded = recording.golden("olmoe")

    def softmax_after(architecture, logits, replayed=None):
        largest, chosen = jax.lax.top_k(logits, architecture.experts_per_token)
        return jax.nn.softmax(largest), chosen

    monkeypatch.setattr(experts, "choose", softmax_after)
    logits = transformer.logits.__wrapped__(architecture, params, jnp.asarray(recorded["tokens"]))
    assert np.abs(logits - recorded["logits"]).max() > 0.1


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss"])
def test_router_and_sinks_are_the_same_in_learner_and_sampler(family):
    # The sampler has a copy of all weights in the dtype of activations; the learner casts its own, in float32.
    architecture, params, recorded = recording.golden(family)
    tokens = jnp.asarray(recorded["tokens"])
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    ours = transformer.logits(architecture, params, tokens, dtype=jnp.bfloat16)
    theirs = transformer.logits(
        architecture, narrow | {"head": params["head"], "embedding": params["embedding"]}, tokens, dtype=jnp.bfloat16
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "family", [*(pytest.param(family, marks=pytest.mark.slow) for family in ("olmoe", "qwen3_moe")), "gpt_oss"]
)
def test_adapters_go_on_attention_alone(family):
    architecture, params, recorded = recording.golden(family)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    chosen, tokens = lora.Lora(4, 8.0, attention), jnp.asarray(recorded["tokens"])
    policy = lora.adapted(params, random_adapters(architecture, chosen), chosen)
    logits = transformer.logits(architecture, policy, tokens)
    np.testing.assert_allclose(transformer.logits(architecture, lora.merged(policy), tokens), logits, atol=1e-4)
    assert np.abs(logits - recorded["logits"]).max() > 0.1
    message = f"experts of {family} can't have adapters on up_proj, down_proj: set lora.targets to "
    with pytest.raises(ValueError, match=f"{message}q_proj,k_proj,v_proj,o_proj"):
        lora.adapter_shapes(architecture, lora.Lora(4, 8.0, (*attention, "up_proj", "down_proj")))


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "gpt_oss"])
def test_matrices_in_int8_are_refused_before_any_weight_is_read(family):
    options = dataclasses.replace(tiny.OPTIONS, weight_dtype="int8")
    with pytest.raises(ValueError, match=f"weight_dtype is 'int8', and the experts of {family} .*set it to 'model'"):
        Engine(recording.golden(family)[0], options, mesh=mesh_lib.make_mesh())

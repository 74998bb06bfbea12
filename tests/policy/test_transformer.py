import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import RopeScaling
from tests.policy import recording

FAMILIES = recording.FAMILIES
GPT_OSS_ROPE = RopeScaling(8.0, 2.0, 50.0, 640, "yarn", 0.1 * math.log(8.0) + 1.0, truncates=False)
PHI3_ROPE = RopeScaling(
    4.0, original_positions=64, kind="longrope", attention_factor=math.sqrt(1 + math.log(4.0) / math.log(64.0)),
    short_factors=(1.0, 1.5, 2.5), long_factors=(1.0, 4.0, 9.0),
)  # fmt: skip


# Modules, layers and greedy tokens are fast of these, logits of all families.
IN_PARTS = ("qwen2", "gemma3", "gpt_oss", "olmoe")


@pytest.mark.parametrize(
    ("check", "family"),
    [
        pytest.param(
            check, family, marks=[pytest.mark.slow] * (check is not recording.check_logits and family not in IN_PARTS)
        )
        for check in recording.CHECKS
        for family in FAMILIES
    ],
)
def test_equals_transformers(family, check):
    check(*recording.golden(family))


@pytest.mark.slow  # it is about the recordings, and test_equals_transformers about the program
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", dict(rope_scaling=None)),
        ("smollm3", dict(unrotated_layers=())),
        ("gemma3", dict(sliding_theta=None)),
        ("gemma3", dict(sliding_layers=(1,))),
        ("gemma3", dict(window=8)),
        ("gemma3", dict(query_scalar=8)),
        ("olmo3", dict(rope_scaling=None)),
        ("olmo3", dict(sliding_theta=None)),
        ("olmo3", dict(sliding_layers=(0, 1))),
        ("mistral_window", dict(window=6)),
        ("mistral_window", dict(window=8)),
        ("ministral", dict(window=6)),
        ("ministral", dict(sliding_layers=(0, 1))),
        ("qwen3_moe", dict(renormalizes_experts=False)),
        ("olmoe", dict(renormalizes_experts=True)),
        ("qwen3_moe", dict(experts_per_token=3)),
        ("phi3", dict(rotary_dim=None, rope_scaling=None)),
        ("phi3", dict(rope_scaling=dataclasses.replace(PHI3_ROPE, is_long=True))),
        ("phi3", dict(rope_scaling=dataclasses.replace(PHI3_ROPE, attention_factor=1.0))),
        ("phi3", dict(window=8)),
        ("gpt_oss", dict(window=6)),
        ("gpt_oss", dict(window=8)),
        ("gpt_oss", dict(sliding_layers=(1,))),
        ("gpt_oss", dict(renormalizes_experts=False)),
        ("gpt_oss", dict(expert_limit=7.0)),
        ("gpt_oss", dict(rope_scaling=None)),
        ("gpt_oss", dict(rope_scaling=dataclasses.replace(GPT_OSS_ROPE, truncates=True))),
        ("gpt_oss", dict(rope_scaling=dataclasses.replace(GPT_OSS_ROPE, attention_factor=1.0))),
    ],
)
def test_the_golden_notices_what_sets_families_apart(family, changes):
    architecture, params, recorded = recording.golden(family)
    changed = dataclasses.replace(architecture, **changes)
    difference = transformer.logits(changed, params, jnp.asarray(recorded["tokens"])) - recorded["logits"]
    assert jnp.abs(difference[:, -1]).max() > 0.1


def test_the_scaling_of_the_golden_is_the_one_that_is_changed():
    assert recording.golden("gpt_oss")[0].rope_scaling == GPT_OSS_ROPE
    assert recording.golden("phi3")[0].rope_scaling == PHI3_ROPE


def test_layers_that_do_not_rotate_are_not_scaled_either():
    # YaRN also multiplies queries and keys of a layer that rotates. transformers leaves other layers as they are.
    architecture, params, recorded = recording.golden("smollm3")
    unrotated = dataclasses.replace(architecture, unrotated_layers=tuple(range(architecture.num_layers)))
    scaled = dataclasses.replace(unrotated, rope_scaling=RopeScaling(4.0, 1.0, 32.0, 32, "yarn", 1.5))
    logits = [transformer.logits(each, params, jnp.asarray(recorded["tokens"])) for each in (unrotated, scaled)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_golden_notices_every_weight(family):
    architecture, params, recorded = recording.golden(family)
    flat = transformer.flatten(params)
    for name in flat:
        one = name.endswith("norm") and not architecture.is_gemma
        initial = jnp.ones_like(flat[name]) if one else jnp.zeros_like(flat[name])
        changed = transformer.nest(flat | {name: initial})
        difference = transformer.logits(architecture, changed, jnp.asarray(recorded["tokens"])) - recorded["logits"]
        # Softmax is blind to what a key bias adds to all keys alike; the rotation leaves some of it to be seen.
        assert jnp.abs(difference).max() > 1e-2, name


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing_before_it(family):
    architecture, params, recorded = recording.golden(family)
    tokens = jnp.asarray(recorded["tokens"])

    def padded_logits(length: int, padding: int) -> jax.Array:
        short = jnp.pad(tokens[:, :length], [(0, 0), (0, 24 - length)], constant_values=padding)
        return transformer.logits(architecture, params, short)

    # Programs of one shape, here that of the recorded logits, round alike on every processor.
    whole = padded_logits(24, 5)
    np.testing.assert_array_equal(padded_logits(19, 6)[:, :19], whole[:, :19])
    np.testing.assert_array_equal(padded_logits(9, 7)[:, :9], whole[:, :9])
    np.testing.assert_allclose(whole, recorded["logits"], rtol=1e-4, atol=1e-4)


def test_a_token_sees_itself_and_what_is_before_it():
    architecture, params, recorded = recording.golden("qwen3")
    tokens = jnp.asarray(recorded["tokens"])
    other = tokens.at[0, 10].set((tokens[0, 10] + 1) % architecture.vocab_size)
    difference = transformer.logits(architecture, params, other) - transformer.logits(architecture, params, tokens)
    changed = np.abs(difference).max(axis=-1)
    np.testing.assert_array_equal(changed[0, :10], 0.0)
    assert (changed[0, 10:] > 1e-3).all()
    np.testing.assert_array_equal(changed[1], 0.0)


def gradients(architecture, params, tokens, *, remat):
    def loss(params):
        model = transformer.merge(architecture, params)
        hidden = transformer.hidden_states(model, tokens, execution=transformer.Execution(jnp.float32, remat=remat))
        return jnp.mean(transformer.head_logits(model, hidden) ** 2)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("remat", transformer.REMAT)
def test_remat_changes_nothing(remat):
    architecture, params, recorded = recording.golden("qwen2")
    tokens = jnp.asarray(recorded["tokens"])
    plain, recomputed = (gradients(architecture, params, tokens, remat=remat) for remat in (None, remat))
    np.testing.assert_allclose(plain[0], recomputed[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain[1], recomputed[1])
    assert all(jnp.abs(gradient).max() > 0 for gradient in jax.tree.leaves(plain[1]))


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.slow] * (family not in IN_PARTS)) for family in FAMILIES]
)
def test_jit_equals_eager(family):
    architecture, params, recorded = recording.golden(family)
    tokens = jnp.asarray(recorded["tokens"])
    model = transformer.merge(architecture, params)
    eager = transformer.head_logits(
        model, transformer.hidden_states(model, tokens, execution=transformer.Execution(jnp.float32))
    )
    np.testing.assert_allclose(transformer.logits(architecture, params, tokens), eager, rtol=1e-5, atol=1e-5)


def test_bfloat16_activations_stay_near_and_logits_are_float32():
    architecture, params, recorded = recording.golden("qwen2")
    rough = transformer.logits(architecture, params, jnp.asarray(recorded["tokens"]), dtype=jnp.bfloat16)
    assert rough.dtype == jnp.float32
    difference = np.abs(rough - recorded["logits"])
    assert 0 < difference.mean() < 0.05


def test_a_tied_head_is_the_embedding_transposed():
    architecture, params, recorded = recording.golden("qwen2")
    untied = dataclasses.replace(architecture, tied_embedding=False)
    tokens = jnp.asarray(recorded["tokens"])
    same = transformer.logits(untied, params | {"head": params["embedding"].T}, tokens)
    np.testing.assert_allclose(same, transformer.logits(architecture, params, tokens), rtol=1e-5, atol=1e-5)
    assert "head" not in transformer.weight_shapes(architecture)
    assert transformer.weight_shapes(untied)["head"] == ((32, 96), ("embed", "vocab"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_declares_its_shape_and_known_axes(family):
    architecture = recording.golden(family)[0]
    declared = transformer.weight_shapes(architecture)
    made = transformer.flatten(jax.eval_shape(lambda: transformer.init(architecture, jax.random.key(0))))
    assert {name: shape for name, (shape, _) in declared.items()} == {name: x.shape for name, x in made.items()}
    for name, (shape, axes) in declared.items():
        assert len(axes) == len(shape) and set(axes) <= mesh_lib.LOGICAL_TO_MESH.keys(), name
        assert (axes[0] == "layers") == name.startswith("layers."), name
    assert sum(x.size for x in made.values()) == architecture.num_parameters


def test_nest_and_flatten_are_inverse():
    flat = {"a": 1, "b.c": 2, "b.d.e": 3}
    assert transformer.nest(flat) == {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    assert transformer.flatten(transformer.nest(flat)) == flat


def test_merge_copies_nothing():
    architecture, params, _ = recording.golden("qwen2")
    assert transformer.merge(architecture, params).embedding[...] is params["embedding"]


def test_init_on_a_mesh_is_sharded_and_the_same():
    architecture = recording.golden("qwen3")[0]
    mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
    params = transformer.init(architecture, jax.random.key(3), mesh)
    query = params["layers"]["attention"]["query"]
    assert query.sharding == mesh_lib.sharding(mesh, ("layers", "embed", "heads", "head"))
    assert query.addressable_shards[0].data.shape == (2, 16, 2, 16)
    alone = transformer.init(architecture, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, params, alone)


@pytest.mark.parametrize(
    "size, message",
    [
        (dict(tensor=4), r"key: axis 'kv_heads' of size 2 cannot be split over mesh.tensor = 4.*a divisor of 2"),
        (dict(fsdp=3), r"axis 'embed' of size 32 cannot be split over mesh.fsdp = 3: choose mesh.fsdp as a divisor"),
        (dict(fsdp=2, context=3), r"'embed' of size 32 cannot be split over mesh.fsdp \* mesh.context = 6: choose"),
    ],
)
def test_an_axis_that_does_not_divide_is_named(size, message):
    with pytest.raises(ValueError, match=message):
        transformer.param_shardings(recording.golden("qwen2")[0], mesh_lib.make_mesh(**size))


def test_experts_that_devices_cannot_share_are_named():
    with pytest.raises(ValueError, match=r"'experts' of size 5 cannot be split over mesh.tensor = 2: .*divisor of 5"):
        transformer.param_shardings(recording.golden("olmoe")[0], mesh_lib.make_mesh(tensor=2))

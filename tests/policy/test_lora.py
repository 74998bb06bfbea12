import dataclasses
import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config, LoraConfig, values
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import adapter_files, huggingface, lora, tensor_table, transformer
from reinforce_ada_jax.policy.layers import Adapted, RowAdapted, RowAdapters, project
from tests.policy import recording
from tests.policy.adapting import ALL, random_adapters

merged = jax.jit(lora.merged, static_argnames="dtype")
model_logits = jax.jit(transformer.logits, static_argnums=0)


@functools.cache
def example(family="qwen2", targets=tuple(lora.TARGETS)):
    """(architecture, base, adapters, what they are, tokens)"""
    architecture, base, recorded = recording.golden(family)
    chosen = lora.Lora(4, 8.0, targets)
    return architecture, base, random_adapters(architecture, chosen), chosen, jnp.asarray(recorded["tokens"])


# ---- the product -------------------------------------------------------------------------------------------------


def test_the_product_by_hand():
    # x W = (1, 2); x A = 1 + 2 = 3, times B (30, 60), times 1/2 (15, 30).
    adapted = Adapted(jnp.eye(2), jnp.ones((2, 1)), jnp.array([[10.0, 20.0]]), scaling=0.5)
    x = jnp.array([[[1.0, 2.0]]])
    np.testing.assert_array_equal(project(x, adapted), [[[16.0, 32.0]]])
    np.testing.assert_array_equal(project(x, jnp.eye(2)), x)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [pytest.param((5,), (2, 3), marks=pytest.mark.slow), ((2, 3), (5,)), ((5,), (6,))]
)
def test_the_product_is_that_of_the_merged_weight(inputs, outputs):
    rng = np.random.default_rng(0)
    x, w, a, b = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((7, 1, *inputs), (*inputs, *outputs), (*inputs, 4), (4, *outputs))
    )
    whole = w + 0.5 * jnp.tensordot(a, b, axes=1)
    np.testing.assert_allclose(
        project(x, Adapted(w, a, b, 0.5), len(inputs)), project(x, whole, len(inputs)), rtol=1e-4
    )


# ---- in the decoder ----------------------------------------------------------------------------------------------


SLOW_FAMILIES = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("qwen3", "llama", "mistral", "mistral_window", "smollm3", "olmo2", "olmo3", "gemma3", "phi3")
]


# The test below has a projection of qwen3.
@pytest.mark.parametrize("family", ["qwen2", *SLOW_FAMILIES])
def test_merged_weights_have_the_logits_of_unmerged_ones(family):
    architecture, base, adapters, chosen, tokens = example(family)
    policy = lora.adapted(base, adapters, chosen)
    unmerged = model_logits(architecture, policy, tokens)
    np.testing.assert_allclose(model_logits(architecture, merged(policy), tokens), unmerged, atol=1e-4)
    assert np.abs(np.subtract(unmerged, model_logits(architecture, base, tokens))).max() > 0.1


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=[pytest.mark.slow] * (name != "o_proj")) for name in lora.TARGETS]
)
def test_each_target_alone_is_adapted(target):
    architecture, base, adapters, chosen, tokens = example("qwen3", (target,))
    weight = lora.TARGETS[target]
    assert list(transformer.flatten(adapters)) == [f"{weight}.a", f"{weight}.b"]
    whole, flat = merged(lora.adapted(base, adapters, chosen)), transformer.flatten(base)
    assert [name for name, x in transformer.flatten(whole).items() if np.not_equal(x, flat[name]).any()] == [weight]
    model = functools.partial(model_logits, architecture)
    unmerged = model(lora.adapted(base, adapters, chosen), tokens)
    np.testing.assert_allclose(model(whole, tokens), unmerged, atol=1e-4)
    assert np.abs(np.subtract(unmerged, model(base, tokens))).max() > 1e-3


def test_new_adapters_change_no_bit():
    architecture, base, _, chosen, tokens = example()
    policy = lora.adapted(base, lora.init(architecture, chosen, jax.random.key(5)), chosen)
    logits = model_logits(architecture, base, tokens)
    np.testing.assert_array_equal(model_logits(architecture, policy, tokens), logits)
    jax.tree.map(np.testing.assert_array_equal, merged(policy), base)


def test_the_gradient_beside_the_weights_is_that_through_the_merged_ones():
    architecture, base, adapters, chosen, tokens = example()

    def loss(adapters, whole):
        policy = lora.adapted(base, adapters, chosen)
        return jnp.mean(transformer.logits(architecture, merged(policy) if whole else policy, tokens) ** 2)

    beside, through = (jax.jit(jax.grad(functools.partial(loss, whole=whole)))(adapters) for whole in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), beside, through)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(beside))


# ---- what adapters are -------------------------------------------------------------------------------------------


def test_targets_are_those_of_the_configuration_and_of_hugging_face():
    assert values.PROJECTIONS == tuple(lora.TARGETS)
    for target, weight in lora.TARGETS.items():
        assert tensor_table.TABLE[weight][1].endswith(f".{target}.weight")


def test_settings():
    """Settings become rank, scale and targets of adapters."""

    def made(**settings):
        return lora.make(LoraConfig(alpha=32.0, **settings))

    assert made(rank=0, targets=("all-linear",)) is None
    assert made(rank=8, targets=("all-linear",)) == lora.Lora(8, 32.0, tuple(lora.TARGETS))
    some = made(rank=8, targets=("v_proj", "q_proj"))
    assert some.targets == ("q_proj", "v_proj") and some.scaling == 4.0


def test_shapes_follow_the_weights():
    architecture = example()[0]
    shapes = lora.adapter_shapes(architecture, ALL)
    # [L, D, N, H] = [2, 32, 4, 8] and [L, F, D] = [2, 48, 32]
    assert shapes["layers.attention.query.a"] == ((2, 32, 4), ("layers", "embed", None))
    assert shapes["layers.attention.query.b"] == ((2, 4, 4, 8), ("layers", None, "heads", "head"))
    assert shapes["layers.attention.output.a"] == ((2, 4, 8, 4), ("layers", "heads", "head", None))
    assert shapes["layers.attention.output.b"] == ((2, 4, 32), ("layers", None, "embed"))
    assert shapes["layers.mlp.down.a"] == ((2, 48, 4), ("layers", "mlp", None))
    # r (in + out) each: query and output 32 + 32, key and value 32 + 16, the three of the feed-forward 32 + 48.
    assert lora.num_parameters(architecture, ALL) == 2 * 4 * (2 * 64 + 2 * 48 + 3 * 80)


def test_initial_values():
    """Adapters begin as no change: one factor is random, the other 0."""
    architecture = example()[0]
    wide = lora.Lora(64, 1.0, tuple(lora.TARGETS))
    flat = transformer.flatten(lora.init(architecture, wide, jax.random.key(0)))
    for name, x in flat.items():
        if name.endswith(".b"):
            assert not x.any(), name
            continue
        bound = math.prod(x.shape[1:-1]) ** -0.5
        assert 0.98 * bound < np.abs(x).max() <= bound, name
        np.testing.assert_allclose(x.std(), bound / math.sqrt(3), rtol=0.05, err_msg=name)
    gate, up = (flat[f"layers.mlp.{name}.a"] for name in ("gate", "up"))
    assert (gate != up).mean() > 0.99 and (gate[0] != gate[1]).mean() > 0.99
    alone = lora.init(architecture, dataclasses.replace(wide, targets=("up_proj",)), jax.random.key(0))
    np.testing.assert_array_equal(alone["layers"]["mlp"]["up"]["a"], up)


def test_on_a_mesh_they_are_split_as_their_weights_are():
    architecture, base, adapters, chosen, tokens = example()
    mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
    made = lora.init(architecture, chosen, jax.random.key(0), mesh)
    jax.tree.map(np.testing.assert_array_equal, made, lora.init(architecture, chosen, jax.random.key(0)))
    query = made["layers"]["attention"]["query"]
    assert query["a"].sharding.shard_shape((2, 32, 4)) == (2, 16, 4)
    assert query["b"].sharding.shard_shape((2, 4, 4, 8)) == (2, 4, 2, 8)
    spread = lora.adapted(
        jax.device_put(base, transformer.param_shardings(architecture, mesh)),
        jax.device_put(adapters, lora.shardings(architecture, chosen, mesh)),
        chosen,
    )
    expected = model_logits(architecture, lora.adapted(base, adapters, chosen), tokens)
    np.testing.assert_allclose(model_logits(architecture, spread, tokens), expected, rtol=1e-5, atol=1e-5)
    shardings = transformer.param_shardings(architecture, mesh)
    together = jax.jit(lora.merged, out_shardings=shardings)(spread)
    alone = merged(lora.adapted(base, adapters, chosen))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), together, alone)


def test_merging_keeps_the_precision_asked_for():
    _, base, adapters, chosen, _ = example()
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    policy = lora.adapted(narrow, adapters, chosen)
    for dtype, expected in ((None, jnp.bfloat16), (jnp.float32, jnp.float32)):
        assert {leaf.dtype for leaf in jax.tree.leaves(merged(policy, dtype))} == {jnp.dtype(expected)}
    # The sum is made before it is rounded: what is added is small, and would be lost twice.
    gate, change = (tree["layers"]["mlp"]["gate"] for tree in (narrow, adapters))
    exact = np.asarray(gate, np.float64) + 2.0 * np.einsum("LDr,LrF->LDF", *(np.float64(change[x]) for x in "ab"))
    wide = merged(policy, jnp.float32)["layers"]["mlp"]["gate"]
    np.testing.assert_allclose(wide, exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(merged(policy)["layers"]["mlp"]["gate"], wide.astype(jnp.bfloat16))


def test_merging_plain_weights_is_a_cast():
    base = example()[1]
    assert all(a is b for a, b in zip(jax.tree.leaves(lora.merged(base)), jax.tree.leaves(base), strict=True))
    assert {leaf.dtype for leaf in jax.tree.leaves(merged(base, jnp.bfloat16))} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora.targets": ("q_proj", "lm_head")}, "it must name one or more of all-linear, q_proj"),
        ({"lora.targets": ()}, r"lora.targets is \(\); it must name one or more of all-linear"),
        ({"lora.rank": -1}, "lora.rank is -1; it must not be negative"),
        ({"lora.rank": 4, "lora.alpha": 0.0}, "lora.alpha is 0.0; it must be above 0"),
        ({"lora.rank": 4, "lora.alpha": -2.0}, "lora.alpha is -2.0; it must be above 0"),
    ],
)
def test_settings_that_are_refused(changes, message):
    named = {"model.path": "somewhere", "data.prompts": "some.jsonl"}
    with pytest.raises(ValueError, match=message):
        config_lib.check(config_lib.replaced(Config(), named | changes))


def test_the_configuration_comes_back_from_its_file():
    config = Config(lora=LoraConfig(rank=4, targets=("q_proj", "v_proj")))
    again = config_lib.from_json(config_lib.to_json(config))
    assert again == config and type(again.lora.targets) is tuple


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_peft_s_layout(family, tmp_path):
    # In Hugging Face's layout, W [out, in], peft computes W + alpha / r * lora_B @ lora_A. That must be what we save
    # merged: only the names and the two layouts can be wrong.
    architecture, base, adapters, chosen, _ = example(family)
    huggingface.save(tmp_path / "merged", architecture, merged(lora.adapted(base, adapters, chosen)))
    adapter_files.save(tmp_path / "adapter", architecture, adapters, chosen, base=recording.GOLDEN / family)
    after = load_file(tmp_path / "merged" / "model.safetensors")
    before = load_file(recording.GOLDEN / family / "model.safetensors")
    tensors = load_file(tmp_path / "adapter" / adapter_files.WEIGHTS)
    assert len(tensors) == 2 * 7 * architecture.num_layers
    changed = 0
    for name, weight in before.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in tensors:
            np.testing.assert_array_equal(after[name], weight)
            continue
        a, b = tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"]
        assert a.shape == (4, weight.shape[1]) and b.shape == (weight.shape[0], 4)
        np.testing.assert_allclose(after[name], weight + 2.0 * b @ a, rtol=1e-5, atol=1e-6, err_msg=name)
        changed += 1
    assert changed == 7 * architecture.num_layers
    config = json.loads((tmp_path / "adapter" / adapter_files.CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8.0, list(lora.TARGETS))
    assert config["base_model_name_or_path"] == str(recording.GOLDEN / family)
    rights = {file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}
    assert len(rights) == 1  # the weights were readable for their owner alone


def test_a_folder_in_use_is_refused(tmp_path):
    architecture, _, adapters, chosen, _ = example()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        adapter_files.save(tmp_path / "used", architecture, adapters, chosen, base=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["used"]


def test_a_base_is_known_by_its_fingerprint(tmp_path):
    folder = shutil.copytree(recording.GOLDEN / "qwen2", tmp_path / "elsewhere")
    recorded = adapter_files.fingerprint(recording.GOLDEN / "qwen2")
    adapter_files.check_base(folder, recorded)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="is not the model that these adapters were trained on"):
        adapter_files.check_base(folder, recorded)
    assert adapter_files.fingerprint(recording.GOLDEN / "qwen3") != recorded


# ---- adapters side by side ---------------------------------------------------------------------------------------


def test_each_row_has_its_own_adapter_of_a_bank_or_none():
    architecture, base, first, chosen, tokens = example()
    second_size = lora.Lora(2, 6.0, ("q_proj", "down_proj"))
    second = random_adapters(architecture, second_size, seed=1)
    base = jax.device_put(base, transformer.param_shardings(architecture, mesh_lib.make_mesh()))
    bank = lora.bank(base, architecture, lora.Lora(4, 1.0, tuple(lora.TARGETS)), 3, jnp.float32)
    bank = lora.put_into_bank(bank, first, chosen, 0)
    bank = lora.put_into_bank(bank, first, chosen, 2)  # another one takes its place
    bank = lora.put_into_bank(bank, second, second_size, 2)
    tokens = jnp.broadcast_to(tokens[:1], (4, tokens.shape[1]))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    def last_hidden(params, adapter):
        model = transformer.merge(architecture, params)
        execution = transformer.Execution(jnp.float32)
        attend = transformer.of_rows(transformer.causal_attend)
        return transformer.run(model, tokens, positions, attend, execution=execution, adapter=adapter)[0][:, -1]

    rows = np.asarray(last_hidden(bank, np.array([2, -1, 0, 1])))
    alone = [
        np.asarray(last_hidden(params, None))[0]
        for params in (lora.adapted(base, second, second_size), base, lora.adapted(base, first, chosen), base)
    ]
    np.testing.assert_allclose(rows, np.stack(alone), atol=1e-5)
    assert np.abs(np.subtract(*rows[:2])).max() > 0.1
    # What other rows use changes no bit of a row.
    np.testing.assert_array_equal(rows[2], np.asarray(last_hidden(bank, np.zeros(4, int)))[2])


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_an_adapter_that_is_not_finite_reaches_its_own_rows_alone(broken):
    # Three adapters of rank 1 from 2 numbers to 2 heads of 1; the middle one is broken.
    a = np.array([[[1.0], [0]], [[broken], [1]], [[0], [1]]], np.float32)
    b = np.array([[[[1.0], [2]]], [[[broken], [1]]], [[[3], [4]]]], np.float32)
    weight = RowAdapted(jnp.zeros((2, 2, 1)), jnp.asarray(a), jnp.asarray(b), None)
    rows = RowAdapters(jnp.array([0, 1, 2, -1]), jnp.arange(3), jnp.int32(3))
    found = project(jnp.array([[[5.0, 7.0]]] * 4), dataclasses.replace(weight, rows=rows))[:, 0, :, 0]
    np.testing.assert_array_equal(found[np.array([0, 2, 3])], [[5, 10], [21, 28], [0, 0]])
    assert not np.isfinite(found[1]).any()


def test_a_bank_has_room_for_what_it_was_made_for():
    architecture, base, adapters, chosen, _ = example()
    base = jax.device_put(base, transformer.param_shardings(architecture, mesh_lib.make_mesh()))
    small = lora.bank(base, architecture, lora.Lora(2, 1.0, tuple(lora.TARGETS)), 1, jnp.float32)
    with pytest.raises(ValueError, match=r"an adapter has rank 4, and there is room for 2 at most\."):
        lora.put_into_bank(small, adapters, chosen, 0)
    narrow = lora.bank(base, architecture, lora.Lora(4, 1.0, ("q_proj",)), 1, jnp.float32)
    with pytest.raises(ValueError, match=r"no room for adapters of layers\.attention\.key\.a"):
        lora.put_into_bank(narrow, adapters, chosen, 0)
    # What is refused donates nothing: a server goes on with the bank that it has.
    assert not any(x.is_deleted() for x in jax.tree.leaves((small, narrow)))


def test_what_is_written_is_read_again_bit_for_bit(tmp_path):
    architecture, _, adapters, chosen, _ = example()
    adapter_files.save(tmp_path / "adapter", architecture, adapters, chosen, base=tmp_path)
    again, matrices = adapter_files.load(tmp_path / "adapter", architecture)
    assert again == chosen
    jax.tree.map(np.testing.assert_array_equal, transformer.nest(matrices), adapters)
    (tmp_path / "adapter" / adapter_files.CONFIG).write_text('{"r": 4}')
    with pytest.raises(ValueError, match="is not of adapters that this program writes"):
        adapter_files.load(tmp_path / "adapter", architecture)

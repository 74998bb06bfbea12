"""The engine as the owner of layouts and programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.config import Config, MeshConfig, check, least_pages, replaced
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import lora, transformer
from reinforce_ada_jax.policy.quantization import SUMMED_AXES
from reinforce_ada_jax.sampling.engine import Engine, buckets
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import Prefix, SamplingParams
from reinforce_ada_jax.training import components
from reinforce_ada_jax.training.components import engine_options
from tests.compiled_collectives import by_loop
from tests.policy.adapting import ALL, random_adapters
from tests.sampling import tiny

GREEDY = SamplingParams(8, temperature=0.0)
NOTHING = Prefix(*np.zeros((4, 1)))  # never read


def tiny_engine(mesh=None, **changes):
    """An engine that is never asked to decode."""
    return Engine(
        tiny.ARCHITECTURE, dataclasses.replace(tiny.OPTIONS, pages=14, **changes), mesh=mesh or mesh_lib.make_mesh()
    )


def pointers(tree):
    return [shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


# ---- options -----------------------------------------------------------------------------------------------------


def test_options_are_those_of_the_configuration():
    config = replaced(Config(), {
        "seed": 5, "model.compute_dtype": "float32", "data.max_prompt_tokens": 17, "sampling.slots": 4,
        "sampling.window": 2, "sampling.page_size": 4, "sampling.max_response_tokens": 12,
    })  # fmt: skip
    options = engine_options(config, tiny.ARCHITECTURE, (3, 7))
    pages = 4 * 8 + 5 * 5 + 1
    assert options == dataclasses.replace(
        tiny.OPTIONS, slots=4, window=2, open_prompts=5, seed=5, pages=pages, prefill_tokens=256
    )
    # On a GPU, where decoding has a copy of the weights anyway, layers are apart.
    for dtype, attention, apart in (
        ("bfloat16", "pallas_gpu", True), ("float32", "pallas_gpu", False), ("bfloat16", "jnp", False),
    ):  # fmt: skip
        of_gpu = replaced(config, {"model.compute_dtype": dtype, "sampling.attention": attention})
        assert engine_options(of_gpu, tiny.ARCHITECTURE, (3, 7)).apart == apart
    larger = dataclasses.replace(tiny.ARCHITECTURE, vocab_size=20_000)
    assert [engine_options(config, model, (3, 7)).widths for model in (tiny.ARCHITECTURE, larger)] == [(4,), (4, 2, 1)]
    barrier = replaced(config, {"collection.barrier": True, "collection.prompts_per_iteration": 8})
    assert engine_options(barrier, tiny.ARCHITECTURE, (3, 7)).open_prompts == 8
    # The state holds the numbers that are no part of the program.
    state = Engine(tiny.ARCHITECTURE, options, mesh=mesh_lib.make_mesh()).init_decode_state()
    assert (int(state.seed), state.terms.stop_ids.tolist()) == (5, [[3, 7]] * options.open_prompts)
    # An evaluation with longer responses is decoded by the same engine.
    longer = replaced(config, {"evaluation.benchmarks": ("a.jsonl",), "evaluation.max_response_tokens": 20})
    assert engine_options(longer, tiny.ARCHITECTURE, (3, 7)).max_response_tokens == 20


def test_only_a_training_has_layers_apart(monkeypatch):
    """Others may read weights in the type of decoding, and would hold them twice."""
    config = replaced(Config(), {
        "model.path": "package:cipher", "model.compute_dtype": "bfloat16",
        "data.max_prompt_tokens": 8, "sampling.max_response_tokens": 8, "sampling.page_size": 8,
    })  # fmt: skip
    monkeypatch.setattr(components, "choose_backend", lambda *_: "pallas_gpu")
    folder = components.model_folder(config.model.path)
    for strategy, apart in ((tiny.strategies.fixed(2), True), (None, False)):
        assert components.build(config, folder, strategy).engine.options.apart == apart


def test_the_fewest_pages_are_those_of_the_scarce_engine():
    config = replaced(Config(), {
        "model.path": "m", "data.prompts": "p", "data.max_prompt_tokens": 17, "sampling.page_size": 4,
        "sampling.max_response_tokens": 12, "sampling.pages": 14,
    })  # fmt: skip
    check(config)
    assert least_pages(config) == tiny.SCARCE["pages"]


def test_buckets():
    """Rows have lengths of powers of two, as many as the longest needs."""
    assert [buckets(longest) for longest in (1, 16, 17, 64)] == [[16], [16], [16, 32], [16, 32, 64]]


@pytest.mark.parametrize("kv_dtype, number, scale", [("model", 4, 0), ("int8", 1, 4)])
def test_the_cache_is_split_over_heads(kv_dtype, number, scale):
    engine = tiny_engine(mesh_lib.make_mesh(fsdp=2, tensor=2), kv_dtype=kv_dtype)
    # Keys and values, layers, heads, pages, tokens; 8 numbers.
    assert engine.cache_bytes == 2 * 2 * 2 * 14 * 4 * (8 * number + scale)
    state = engine.init_decode_state()
    pages = jax.tree.leaves(state.pools)
    assert sum(page.nbytes for page in pages) == 2 * engine.cache_bytes  # two replicas
    assert mesh_lib.shard_bytes(pages) == engine.cache_bytes // 2


# ---- one set of weights ------------------------------------------------------------------------------------------


def test_decoding_reads_the_learners_own_buffers():
    engine, params = tiny_engine(), tiny.params()
    before = len(jax.live_arrays())
    weights = engine.decode_weights(params)
    assert weights is params
    assert len(jax.live_arrays()) == before


def test_tensor_parallel_weights_are_read_as_they_are():
    mesh = mesh_lib.make_mesh(tensor=2)
    params = tiny.params_on(mesh)
    assert tiny_engine(mesh).decode_weights(params) is params


def test_another_dtype_is_one_copy():
    """On a CPU matrices are the bits of bfloat16, and all else is float32."""
    params = tiny.params()
    engine, leaves = tiny_engine(dtype="bfloat16"), len(jax.tree.leaves(params))
    before = len(jax.live_arrays())
    weights = engine.decode_weights(params)
    assert len(jax.live_arrays()) == before + leaves
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("uint16"), jnp.dtype("float32")}
    assert not set(pointers(weights)) & set(pointers(params))
    assert engine.decode_weights(weights) is weights


@pytest.mark.parametrize("split", [False, True])
def test_weights_of_layers_as_arrays_of_their_own_are_one_copy(split):
    """GPUs decode so in trainings. Matrices in int8 and weights beside adapters stay stacked."""
    learner, mesh = mesh_lib.make_mesh(tensor=2), None
    if split:
        learner, mesh = mesh_lib.split_meshes(MeshConfig(tensor=2, sampler=2))
    options = dataclasses.replace(tiny.OPTIONS, pages=14, dtype="float16", apart=True)
    engine = Engine(tiny.ARCHITECTURE, options, mesh=mesh or learner, learner_mesh=learner if split else None)
    params = tiny.params_on(learner)
    weights = engine.decode_weights(params)
    assert (
        engine.decodes_from(weights) and not engine.decodes_from(params) and engine.decode_weights(weights) is weights
    )
    up = weights["layers"]["mlp"]["up"].arrays
    assert [x.sharding.shard_shape(x.shape) for x in up] == [(32, 32)] * 2  # half of 64 columns
    for number, own in enumerate(up):
        np.testing.assert_array_equal(own, params["layers"]["mlp"]["up"][number].astype("float16"))
    np.testing.assert_array_equal(weights["embedding"], params["embedding"].astype("float16"))
    assert not tiny_engine(apart=True, weight_dtype="int8").options.apart
    assert not tiny_engine(apart=True, adapters=ALL).options.apart


def test_matrices_in_int8_are_one_copy():
    mesh = mesh_lib.make_mesh(fsdp=2, tensor=2)
    engine, params = tiny_engine(mesh, weight_dtype="int8"), tiny.params_on(mesh)
    rollouts = Rollouts(engine)
    weights = rollouts.decode_weights(params)
    # 2 devices share a tensor: 2 layers of query and output 32 x 32, key and value 32 x 16, MLP 3 x 32 x 64, and the
    # embedding and head 24 x 32, a byte each. Scales for the outputs of each: 4 bytes, those along `tensor` shared.
    matrices = (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 2 * 24 * 32) // 2
    scales = 4 * (2 * (32 // 2 + 32 + 2 * 16 // 2 + 2 * 64 // 2 + 32) + 2 * 24 // 2)
    norms_and_biases = 4 * (2 * (2 * 32 + (32 + 2 * 16) // 2) + 32)
    assert rollouts.reshard.bytes == matrices + scales + norms_and_biases
    assert engine.decodes_from(weights) and engine.decode_weights(weights) is weights
    assert not engine.decodes_from(params)
    # A sampler of its own: the same numbers, from the learner's devices to others.
    learner, sampler = mesh_lib.split_meshes(MeshConfig(fsdp=2, tensor=2, sampler=4))
    options = dataclasses.replace(tiny.OPTIONS, weight_dtype="int8")
    engine = Engine(tiny.ARCHITECTURE, options, mesh=sampler, learner_mesh=learner)
    handed_over = engine.decode_weights(tiny.params_on(learner))
    jax.tree.map(np.testing.assert_array_equal, handed_over, weights)
    assert engine.decodes_from(handed_over)


def test_a_sampler_with_devices_of_its_own_gets_a_copy():
    learner, sampler = mesh_lib.split_meshes(MeshConfig(context=2, tensor=2, sampler=4))
    assert [device.id for mesh in (learner, sampler) for device in mesh.devices.flat] == [*range(8)]
    assert dict(sampler.shape) == {"data": 2, "fsdp": 1, "context": 1, "tensor": 2}
    engine = Engine(tiny.ARCHITECTURE, tiny.OPTIONS, mesh=sampler, learner_mesh=learner)
    params = transformer.init(tiny.ARCHITECTURE, jax.random.key(0), learner)
    assert not engine.decodes_from(params)
    weights = engine.decode_weights(params)
    jax.tree.map(np.testing.assert_array_equal, weights, params)
    for made, expected in zip(jax.tree.leaves(weights), jax.tree.leaves(engine.abstract_weights()), strict=True):
        assert made.sharding.is_equivalent_to(expected.sharding, made.ndim)
    assert engine.replicas == 2
    # What was handed over once is read as it is.
    assert engine.decodes_from(weights) and engine.decode_weights(weights) is weights


def test_devices_that_are_too_few_for_two_sides():
    with pytest.raises(ValueError, match=r"mesh.tensor \+ mesh.sampler = 4 \+ 8 = 12, but there are 8 devices"):
        mesh_lib.split_meshes(MeshConfig(data=4, sampler=8))


def test_what_the_hand_over_took_is_counted():
    rollouts, took = Rollouts(tiny_engine(dtype="bfloat16")), []
    for params in (tiny.params(), rollouts.engine.decode_weights(tiny.params())):
        rollouts.sampler(params, stream=0, sampling=GREEDY)
        took.append(rollouts.reshard)
    words = {name: leaf.size for name, leaf in transformer.flatten(tiny.params()).items()}
    halved = sum(size for name, size in words.items() if name in SUMMED_AXES)
    assert [reshard.bytes for reshard in took] == [4 * sum(words.values()) - 2 * halved, 0]
    assert min(one.seconds for one in took) > 0
    # Split over `fsdp` for learning, whole on each device for decoding.
    mesh = mesh_lib.make_mesh(fsdp=4)
    rollouts = Rollouts(tiny_engine(mesh))
    rollouts.sampler(tiny.params_on(mesh), stream=0, sampling=GREEDY)
    assert rollouts.reshard.bytes == 4 * sum(words.values())


def test_decode_weights_are_split_over_tensor_only():
    mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
    params = tiny.params_on(mesh)
    weights = transformer.flatten(tiny_engine(mesh).decode_weights(params))
    for name, leaf in transformer.flatten(params).items():
        axes = [axis if axis == "tensor" else None for axis in leaf.sharding.spec]
        assert weights[name].sharding.is_equivalent_to(
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)), leaf.ndim
        )
        np.testing.assert_array_equal(weights[name], leaf)
    # D and N of the query: [L, D, N, H] of 2, 32, 4, 8.
    query = "layers.attention.query"
    assert transformer.flatten(params)[query].sharding.shard_shape((2, 32, 4, 8)) == (2, 16, 2, 8)
    assert weights[query].sharding.shard_shape((2, 32, 4, 8)) == (2, 32, 2, 8)


def test_weights_are_gathered_layer_by_layer():
    """All at once they would be in memory twice: in the arrays that were gathered, and in the result."""
    mesh = mesh_lib.make_mesh(fsdp=4)
    params = tiny.params_on(mesh)
    layers = transformer.flatten(params["layers"])
    split = sum(not leaf.sharding.is_fully_replicated for leaf in layers.values())
    found = by_loop(tiny_engine(mesh).lower_cast(params).compile().as_text())
    gathers = [len(nesting) for nesting, kinds in found.items() for kind in kinds if kind == "all-gather"]
    others = sum(not params[name].sharding.is_fully_replicated for name in params if name != "layers")
    assert split > 0 and gathers.count(1) == split and gathers.count(0) <= others


def test_adapters_are_merged_on_their_way():
    mesh, adapters = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2), random_adapters(tiny.ARCHITECTURE)
    placed = jax.device_put(adapters, lora.shardings(tiny.ARCHITECTURE, ALL, mesh))
    engine, base = tiny_engine(mesh), tiny.params_on(mesh)
    weights = engine.decode_weights(lora.adapted(base, placed, ALL))
    plain = engine.decode_weights(base)
    same = jax.tree.map(lambda w, other: w.sharding.is_equivalent_to(other.sharding, w.ndim), weights, plain)
    assert all(jax.tree.leaves(same))
    merged = lora.merged(lora.adapted(tiny.params(), adapters, ALL))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), weights, merged)
    # They are decoding's own from then on.
    assert engine.decode_weights(weights) is weights


def small_policy(mesh):
    """A base in bfloat16 under adapters as after a few updates: their product is a thousandth of the weights."""
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params_on(mesh))
    flat = transformer.flatten(random_adapters(tiny.ARCHITECTURE))
    adapters = transformer.nest({name: 0.003 * x if name.endswith(".b") else x for name, x in flat.items()})
    return lora.adapted(base, jax.device_put(adapters, lora.shardings(tiny.ARCHITECTURE, ALL, mesh)), ALL)


@pytest.mark.parametrize("weight_dtype", ["model", "int8"])
def test_the_sampler_s_log_probabilities_change_by_what_the_policy_s_do(weight_dtype):
    # W + scaling * A B, rounded to bfloat16, has 0.37 of the policy's change; rounded to int8, 0.43, and noise of 2.6
    # times its size.
    mesh = mesh_lib.make_mesh()
    engine = tiny_engine(dtype="bfloat16", weight_dtype=weight_dtype, adapters=ALL)
    policy = small_policy(mesh)
    base, adapters = lora.split(policy)
    nothing = lora.adapted(base, jax.tree.map(jnp.zeros_like, adapters), ALL)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (8, 32)), jnp.int32)

    def logprobs(weights):
        # In float32, so that only what became of the weights counts.
        return jax.nn.log_softmax(transformer.logits(tiny.ARCHITECTURE, weights, tokens))

    wanted = logprobs(policy) - logprobs(nothing)
    sampled = logprobs(engine.decode_weights(policy)) - logprobs(engine.decode_weights(nothing))
    assert float(jnp.vdot(sampled, wanted) / jnp.vdot(wanted, wanted)) == pytest.approx(1, abs=0.02)
    # Nothing else is in it, either.
    assert float(jnp.linalg.norm(sampled - wanted) / jnp.linalg.norm(wanted)) < 0.05


def test_of_a_base_that_is_laid_out_for_decoding_the_adapters_alone_are_copied():
    mesh = mesh_lib.make_mesh(tensor=2)
    engine, policy = tiny_engine(mesh, dtype="bfloat16", adapters=ALL), small_policy(mesh)
    rollouts, (base, adapters) = Rollouts(engine), lora.split(policy)
    # In float32, the type of activations on a CPU, nothing is copied: the learner computes with the same arrays.
    assert rollouts.decode_weights(policy) is policy and not rollouts.reshard.bytes
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), adapters)
    policy = lora.adapted(base, narrow, ALL)
    weights = rollouts.decode_weights(policy)
    decoded_base, decoded = lora.split(weights)
    assert pointers(decoded_base) == pointers(base)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.float32)), decoded, narrow)
    assert rollouts.reshard.bytes == mesh_lib.shard_bytes(decoded) == 2 * mesh_lib.shard_bytes(narrow)
    copied = engine.abstract_copy(policy)
    assert [x.shape for x in jax.tree.leaves(copied)] == [x.shape for x in jax.tree.leaves(decoded)]
    assert engine.decode_weights(weights) is weights


@pytest.mark.parametrize("weight_dtype", [pytest.param("model", marks=pytest.mark.slow), "int8"])
def test_adapters_beside_their_base_are_split_over_tensor_only(weight_dtype):
    mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
    engine = tiny_engine(mesh, dtype="bfloat16", weight_dtype=weight_dtype, adapters=ALL)
    weights, expected = engine.decode_weights(small_policy(mesh)), engine.abstract_weights()
    assert jax.tree.structure(weights) == jax.tree.structure(expected)
    for made, shape in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
        assert (made.shape, made.dtype) == (shape.shape, shape.dtype)
        assert made.sharding.is_equivalent_to(shape.sharding, made.ndim)
    query = weights["layers"]["attention"]["query"]
    assert query.a.sharding.shard_shape((2, 32, 4)) == (2, 32, 4)
    assert query.b.sharding.shard_shape((2, 4, 4, 8)) == (2, 4, 2, 8)
    base = lora.split(small_policy(mesh))[0]
    if weight_dtype == "model":
        base = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), base)
    else:
        base = tiny_engine(mesh, dtype="bfloat16", weight_dtype=weight_dtype).decode_weights(base)
    jax.tree.map(np.testing.assert_array_equal, lora.split(weights)[0], base)


@pytest.mark.parametrize("changes, is_apart", [
    ({"model.compute_dtype": "bfloat16"}, True),
    ({"model.compute_dtype": "float32"}, False),
    ({"model.compute_dtype": "float32", "sampling.weight_dtype": "int8"}, True),
])  # fmt: skip
def test_adapters_are_decoded_beside_weights_that_are_narrower_than_float32(changes, is_apart):
    config = replaced(Config(), {"lora.rank": 4, "lora.alpha": 8.0, **changes})
    assert engine_options(config, tiny.ARCHITECTURE, (3,)).adapters == (ALL if is_apart else None)
    assert engine_options(replaced(config, {"lora.rank": 0}), tiny.ARCHITECTURE, (3,)).adapters is None


def test_pages_are_split_by_kv_heads():
    # [K, L * pages, page_size, H]
    state = tiny_engine(mesh_lib.make_mesh(tensor=2)).init_decode_state()
    assert state.pools[0].sharding.shard_shape(state.pools[0].shape) == (1, 2 * 14, 4, 8)


def test_every_replica_has_slots_and_pages_of_its_own():
    engine = tiny_engine(mesh_lib.make_mesh(data=2, fsdp=2, tensor=2))
    state = engine.init_decode_state()
    assert engine.replicas == 4 and state.pools[0].shape == (4, 2, 2 * 14, 4, 8)
    assert state.pools[0].sharding.shard_shape(state.pools[0].shape) == (1, 1, 2 * 14, 4, 8)
    assert state.slots.active.sharding.shard_shape(state.slots.active.shape) == (1, 8)
    with pytest.raises(ValueError, match="one by one in one replica, and there are 4"):
        engine.insert(state, NOTHING, 0, np.zeros(4, np.uint32), GREEDY)


def test_slots_are_not_filled_one_by_one_from_a_pool_too_small_for_all():
    # 8 slots of 8 pages, 14 pages: pages would be allocated twice.
    with pytest.raises(ValueError, match="8 slots of 8 pages do not fit into a pool of 14"):
        tiny_engine().insert(tiny_engine().init_decode_state(), NOTHING, 0, np.zeros(4, np.uint32), GREEDY)

"""The engine as the owner of layouts and programs, and as JetStream's engine."""

import asyncio
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reinforce_ada_jax
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.config import defaults, least_pages, validate
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import huggingface, lora, transformer
from reinforce_ada_jax.sampling.engine import Engine, buckets
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving import jetstream
from reinforce_ada_jax.training.components import engine_options
from reinforce_ada_jax.types import Prompt
from tests.policy.adapting import ALL, random_adapters
from tests.sampling import tiny

CIPHER = pathlib.Path(reinforce_ada_jax.__file__).parent / "assets" / "cipher"
GREEDY = SamplingParams(8, temperature=0.0)
LIMIT = 8  # a word of 6 letters and its end, and one to spare


def tiny_engine(mesh=None, **changes):
    """An engine that is never asked to decode."""
    return Engine(
        tiny.ARCHITECTURE, dataclasses.replace(tiny.OPTIONS, pages=14, **changes), mesh=mesh or mesh_lib.make_mesh()
    )


def pointers(tree):
    return [shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


# ---- options -----------------------------------------------------------------------------------------------------


def test_options_are_those_of_the_configuration():
    config = defaults()
    config.seed, config.model.compute_dtype, config.data.max_prompt_tokens = 5, "float32", 17
    config.sampling.update(dict(slots=4, window=2, page_size=4, prefill_rows=2, max_response_tokens=12))
    options = engine_options(config, (3, 7))
    expected = dataclasses.replace(tiny.OPTIONS, slots=4, window=2, open_prompts=5, seed=5, pages=4 * 8 + 5 * 5 + 1)
    assert options == expected
    config.collection.barrier, config.collection.prompts_per_iteration = True, 8
    assert engine_options(config, (3, 7)).open_prompts == 8
    # The state holds the numbers that are no part of the program.
    state = Engine(tiny.ARCHITECTURE, options, mesh=mesh_lib.make_mesh()).init_decode_state()
    assert (int(state.seed), state.stop_ids.tolist()) == (5, [3, 7])
    # An evaluation with longer responses is decoded by the same engine.
    config.evaluation.update(dict(benchmarks=("a.jsonl",), max_response_tokens=20))
    assert engine_options(config, (3, 7)).max_response_tokens == 20


def test_the_fewest_pages_are_those_of_the_scarce_engine():
    config = defaults()
    config.model.path, config.data.prompts, config.data.max_prompt_tokens = "m", "p", 17
    config.sampling.update(dict(page_size=4, max_response_tokens=12, pages=14))
    validate(config)
    assert least_pages(config) == tiny.SCARCE["pages"]


def test_buckets():
    assert [buckets(longest) for longest in (1, 16, 17, 64)] == [[16], [16], [16, 32], [16, 32, 64]]


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
    params = tiny.params()
    engine, leaves = tiny_engine(dtype="bfloat16"), len(jax.tree.leaves(params))
    before = len(jax.live_arrays())
    weights = engine.decode_weights(params)
    assert len(jax.live_arrays()) == before + leaves
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    assert not set(pointers(weights)) & set(pointers(params))
    assert engine.decode_weights(weights) is weights


def test_what_the_hand_over_took_is_counted():
    rollouts, took = Rollouts(tiny_engine(dtype="bfloat16")), []
    for params in (tiny.params(), rollouts.engine.decode_weights(tiny.params())):
        rollouts.sampler(params, stream=0, sampling=GREEDY)
        took.append(rollouts.reshard)
    words = sum(leaf.size for leaf in jax.tree.leaves(tiny.params()))
    assert [reshard.bytes for reshard in took] == [2 * words, 0]
    assert took[0].seconds > took[1].seconds > 0
    # Split over `fsdp` for learning, whole on each device for decoding.
    mesh = mesh_lib.make_mesh(fsdp=4)
    rollouts = Rollouts(tiny_engine(mesh))
    rollouts.sampler(tiny.params_on(mesh), stream=0, sampling=GREEDY)
    assert rollouts.reshard.bytes == 4 * words


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


def test_pages_are_split_by_kv_heads():
    # [K, L * pages, page_size, H]
    state = tiny_engine(mesh_lib.make_mesh(tensor=2)).init_decode_state()
    assert state.key_pages.sharding.shard_shape(state.key_pages.shape) == (1, 2 * 14, 4, 8)


def test_every_replica_has_slots_and_pages_of_its_own():
    engine = tiny_engine(mesh_lib.make_mesh(data=2, fsdp=2, tensor=2))
    state = engine.init_decode_state()
    assert engine.replicas == 4 and state.key_pages.shape == (4, 2, 2 * 14, 4, 8)
    assert state.key_pages.sharding.shard_shape(state.key_pages.shape) == (1, 1, 2 * 14, 4, 8)
    assert state.slots.active.sharding.shard_shape(state.slots.active.shape) == (1, 8)
    with pytest.raises(ValueError, match="feeds one replica, and there are 4"):
        engine.insert(None, None, 0)


# ---- JetStream ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """The packaged model behind a greedy engine of 3 slots, with problems and what a plain forward pass answers."""

    engine: Engine
    params: dict
    texts: list[str]
    prompts: list[np.ndarray]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def served():
    architecture, params = huggingface.load(CIPHER)
    tokenizer = Tokenizer.load(CIPHER)
    config = defaults()
    config.model.compute_dtype, config.data.max_prompt_tokens = "float32", 8
    config.sampling.update(dict(slots=3, window=4, page_size=4, prefill_rows=1, max_response_tokens=LIMIT))
    options = engine_options(config, tokenizer.stop_ids)
    engine = Engine(architecture, options, mesh=mesh_lib.make_mesh(), tokenizer=tokenizer, served=GREEDY)
    texts = [problem["problem"] for problem in cipher.problems("heldout")[:8]]
    prompts = [tokenizer.encode(text) for text in texts]
    rows, answers = np.zeros((8, 16), np.int32), [[] for _ in texts]
    rows[:, :8] = prompts
    for place in range(8, 8 + LIMIT):
        best = np.argmax(transformer.logits(architecture, params, rows)[:, place - 1], axis=-1)
        rows[:, place : place + 1] = best[:, None]
        for answer, token in zip(answers, best, strict=True):
            if not set(answer) & set(tokenizer.stop_ids):
                answer.append(int(token))
    return Served(engine, params, texts, prompts, answers)


def step(served, state):
    """One `generate`; {slot: token} of those that were active."""
    state, result = served.engine.generate(served.params, state)
    data = {slot: result.convert_to_numpy().get_result_at_slot(slot) for slot in range(3)}
    return state, {slot: int(one.tokens[0, 0]) for slot, one in data.items() if one.valid[0, 0]}


def steps(served, state, count):
    """So many of them; {slot: tokens}."""
    answers = {slot: [] for slot in range(3)}
    for _ in range(count):
        state, tokens = step(served, state)
        for slot, token in tokens.items():
            answers[slot].append(token)
    return state, answers


def insert(served, state, problem, slot):
    """As JetStream's orchestrator: it deletes the prefix as soon as it is inserted."""
    padded = np.zeros(16, np.int32)
    padded[:8] = served.prompts[problem]
    prefix = served.engine.prefill(params=served.params, padded_tokens=padded, true_length=8)
    state = served.engine.insert(prefix, state, slot=slot)
    jax.tree.map(lambda leaf: leaf.delete(), prefix)
    return state


def generate_all(served, state, problems):
    """Answers to `problems`, each in the first slot that is free."""
    waiting, running, answers = list(problems), {}, {problem: [] for problem in problems}
    while waiting or running:
        for slot in range(3):
            if slot not in running and waiting:
                running[slot] = waiting.pop(0)
                state = insert(served, state, running[slot], slot)
        state, tokens = step(served, state)
        for slot, token in tokens.items():
            answers[running[slot]].append(token)
        running = {slot: problem for slot, problem in running.items() if state.slots.active[slot]}
    return state, answers


def test_the_window_decodes_what_the_full_forward_pass_does(served):
    prompts = [Prompt(text, text, "", tokens) for text, tokens in zip(served.texts, served.prompts, strict=True)]
    sample_fn = Rollouts(served.engine).sampler(served.params, stream=0, sampling=GREEDY)
    pools = collect(prompts, sample_fn, tiny.verdicts, strategies.fixed(2))
    for pool, answer in zip(pools, served.answers, strict=True):
        assert [response.tokens.tolist() for response in pool.responses] == [answer, answer]
    assert len({len(answer) for answer in served.answers}) > 2


def test_prefill_insert_and_generate_do_too(served):
    state, answers = generate_all(served, served.engine.init_decode_state(), range(8))
    assert [answers[problem] for problem in range(8)] == served.answers
    tiny.assert_idle(state, served.engine.options.pages)


def test_a_slot_can_be_taken_from_a_running_response(served):
    """As the orchestrator does when a client's own limit is reached before the engine's; slot 1 decodes on."""
    state = insert(served, served.engine.init_decode_state(), 0, 0)
    state = insert(served, state, 1, 1)
    state, begun = steps(served, state, 2)
    state, again = steps(served, insert(served, state, 2, 0), 2)
    state, rest = steps(served, insert(served, state, 2, 0), LIMIT)
    first, third = served.answers[0], served.answers[2]
    assert [begun[0], again[0], rest[0]] == [first[:2], third[:2], third]
    assert begun[1] + again[1] + rest[1] == served.answers[1]
    tiny.assert_idle(state, served.engine.options.pages)


def test_inserting_forever_uses_up_no_pages(served):
    state = served.engine.init_decode_state()
    everything, keys = int(state.pool.available), set()
    for _ in range(20):
        state = insert(served, state, 0, 1)
        # 16 tokens at most, in pages of 4.
        assert int(state.pool.available) == everything - 4
        keys.add(tuple(state.slots.key[1].tolist()))
    assert state.slots.active.tolist() == [False, True, False]
    assert len(keys) == 20  # and no two of them would sample alike


def test_result_tokens_count_the_generated(served):
    state = insert(served, served.engine.init_decode_state(), 0, 2)
    lengths = []
    for _ in served.answers[0]:
        state, result = served.engine.generate(served.params, state)
        lengths.append(int(result.get_result_at_slot(2).lengths[0]))
    assert lengths == list(range(1, len(lengths) + 1))
    assert step(served, state)[1] == {}  # ended, so nothing in it is valid


def test_what_cannot_be_served_is_refused(served):
    prefill = served.engine.prefill
    with pytest.raises(ValueError, match="a prompt has 9 tokens, the engine takes 1 to 8"):
        prefill(params=served.params, padded_tokens=np.zeros(16, np.int32), true_length=9)
    with pytest.raises(ValueError, match="existing prefix is not supported"):
        prefill(params=served.params, existing_prefix=1, padded_tokens=np.zeros(16, np.int32), true_length=1)
    # 8 slots of 8 pages, 14 pages: an orchestrator would hand pages out twice.
    with pytest.raises(ValueError, match="8 slots of 8 pages do not fit into a pool of 14"):
        tiny_engine().insert(None, None, 0)


def test_served_tokenizer_pads_to_a_bucket(served):
    tokenizer = served.engine.build_tokenizer(None)
    padded, length = tokenizer.encode(served.texts[0], max_prefill_length=served.engine.max_prefill_length)
    assert (len(padded), length) == (16, 8)
    np.testing.assert_array_equal(padded[:8], served.prompts[0])
    assert not {tokenizer.bos_id} & set(range(served.engine.architecture.vocab_size))
    # 17 tokens with BOS do not fit; the length says so, and `prefill` refuses.
    assert tokenizer.encode("." * 16, max_prefill_length=16)[1] == 17
    assert tokenizer.stop_tokens == {2}


def test_jetstreams_orchestrator_answers_the_same(served):
    """Its own threads; 8 clients at once for 3 slots; text in and text out, then 2 tokens only, then tokens."""
    orchestrator = jetstream.orchestrator()
    from jetstream.core.proto import jetstream_pb2  # noqa: PLC0415  (found once the orchestrator is)

    engine = served.engine
    driver = orchestrator.Driver([engine], [engine], [served.params], [served.params])
    server = orchestrator.LLMOrchestrator(driver)

    async def ask(**content):
        request = jetstream_pb2.DecodeRequest(**content)
        samples = [response.stream_content.samples[0] async for response in server.Decode(request)]
        return "".join(sample.text for sample in samples), [id for sample in samples for id in sample.token_ids]

    async def ask_all():
        try:
            return [
                await asyncio.gather(*[ask(text_content=dict(text=text), max_tokens=LIMIT) for text in served.texts]),
                await asyncio.gather(*[ask(text_content=dict(text=text), max_tokens=2) for text in served.texts]),
                await ask(token_content=dict(token_ids=served.prompts[0].tolist()), max_tokens=LIMIT),
            ]
        finally:
            # Before this loop closes: the driver's threads call back into it, and a failing one kills the process.
            driver.stop()

    whole, short, by_tokens = asyncio.run(ask_all())
    stop = served.engine.options.stop_ids
    for (text, tokens), (_, first_two), answer in zip(whole, short, served.answers, strict=True):
        expected = [token for token in answer if token not in stop]  # JetStream leaves stop tokens out
        assert tokens == expected and first_two == expected[:2]
        assert text == served.engine.tokenizer.decode(np.array(answer))
    # A client that sends tokens gets tokens. JetStream puts a BOS before its own, which would be the second.
    assert by_tokens == ("", whole[0][1])

"""An engine under JetStream's interface, and JetStream's own orchestrator over it."""

import asyncio
import dataclasses
import pathlib

import jax
import numpy as np
import pytest

import reinforce_ada_jax
from reinforce_ada_jax.collection import strategies
from reinforce_ada_jax.collection.collect import collect
from reinforce_ada_jax.config import Config, replaced
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving import jetstream
from reinforce_ada_jax.serving.jetstream.engine import JetStreamEngine
from reinforce_ada_jax.training.components import engine_options
from reinforce_ada_jax.types import Prompt
from tests.sampling import tiny

CIPHER = pathlib.Path(reinforce_ada_jax.__file__).parent / "assets" / "cipher"
GREEDY = SamplingParams(8, temperature=0.0)
LIMIT = 8  # a word of 6 letters and its end, and one to spare


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """The packaged model behind a greedy engine of 3 slots, with problems and what a plain forward pass answers."""

    engine: JetStreamEngine
    params: dict
    texts: list[str]
    prompts: list[np.ndarray]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def served():
    architecture, params = huggingface.load(CIPHER)
    tokenizer = Tokenizer.load(CIPHER)
    config = replaced(Config(), {
        "model.compute_dtype": "float32", "data.max_prompt_tokens": 8, "sampling.slots": 3, "sampling.window": 4,
        "sampling.page_size": 4, "sampling.max_response_tokens": LIMIT,
    })  # fmt: skip
    options = engine_options(config, architecture, tokenizer.stop_ids)
    engine = JetStreamEngine(Engine(architecture, options, mesh=mesh_lib.make_mesh()), tokenizer, GREEDY)
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
    """Makes `count` steps; returns {slot: tokens}."""
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
    sample_fn = Rollouts(served.engine.engine).sampler(served.params, stream=0, sampling=GREEDY)
    pools = collect(prompts, sample_fn, tiny.verdicts, strategies.fixed(2))
    for pool, answer in zip(pools, served.answers, strict=True):
        assert [response.tokens.tolist() for response in pool.responses] == [answer, answer]
    assert len({len(answer) for answer in served.answers}) > 2


def test_prefill_insert_and_generate_do_too(served):
    state, answers = generate_all(served, served.engine.init_decode_state(), range(8))
    assert [answers[problem] for problem in range(8)] == served.answers
    tiny.assert_idle(state, served.engine.engine.options.pages)


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
    tiny.assert_idle(state, served.engine.engine.options.pages)


def test_inserting_forever_uses_up_no_pages(served):
    state = served.engine.init_decode_state()
    everything, keys = int(state.pool.available), set()
    for _ in range(20):
        state = insert(served, state, 0, 1)
        # 16 tokens at most, in pages of 4.
        assert int(state.pool.available) == everything - 4
        keys.add(tuple(state.slots.requests.key[1].tolist()))
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
    with pytest.raises(ValueError, match="a prompt has 9 tokens, and the engine takes 1 to 8"):
        prefill(params=served.params, padded_tokens=np.zeros(16, np.int32), true_length=9)
    with pytest.raises(ValueError, match="existing prefix is not supported"):
        prefill(params=served.params, existing_prefix=1, padded_tokens=np.zeros(16, np.int32), true_length=1)


def test_served_tokenizer_pads_to_a_bucket(served):
    tokenizer = served.engine.build_tokenizer(None)
    padded, length = tokenizer.encode(served.texts[0], max_prefill_length=served.engine.max_prefill_length)
    assert (len(padded), length) == (16, 8)
    np.testing.assert_array_equal(padded[:8], served.prompts[0])
    assert not {tokenizer.bos_id} & set(range(served.engine.engine.architecture.vocab_size))
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
    stop = served.engine.engine.options.stop_ids
    for (text, tokens), (_, first_two), answer in zip(whole, short, served.answers, strict=True):
        expected = [token for token in answer if token not in stop]  # JetStream leaves stop tokens out
        assert tokens == expected and first_two == expected[:2]
        assert text == served.engine.tokenizer.decode(np.array(answer))
    # A client that sends tokens gets tokens. JetStream puts a BOS before its own, which would be the second.
    assert by_tokens == ("", whole[0][1])

"""The engine's log-probabilities of its own tokens are those of a full forward pass, for what families alone have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.sampling.engine import Engine, enough_pages
from reinforce_ada_jax.sampling.rollouts import Rollouts
from tests.policy import recording
from tests.sampling import test_routes, tiny

# What the engine does itself: attention of two kinds with windows, norms at another place. The layers are those of the
# learner (test_transformer.py). test_rollouts.py has weights over `tensor`, and test_experts.py experts over it. The
# weights of its layers are arrays of their own, as in slow tests below.
FAST = [("gemma3", 1, "invariant")]
# Mistral is a Llama, and OLMo 3 an OLMo 2 whose layers slide as those of Gemma 3 do. test_rings.py has Mistral with a
# window; the tests below have Qwen3-MoE and gpt-oss on other numbers of devices.
SLOW = [
    ("smollm3", 1, "jnp"), ("olmoe", 1, "invariant"), ("olmo2", 2, "jnp"), ("gemma3", 1, "jnp"),
    ("mistral", 1, "jnp"), ("mistral_window", 1, "jnp"), ("olmo2", 1, "jnp"), ("gemma3", 2, "jnp"),
    ("olmo3", 1, "invariant"), ("olmo3", 2, "jnp"), ("qwen3_moe", 1, "jnp"), ("qwen3_moe", 2, "jnp"),
    ("olmoe", 1, "jnp"), ("gpt_oss", 1, "jnp"), ("gpt_oss", 1, "invariant"), ("gpt_oss", 2, "jnp"),
    ("phi3", 1, "jnp"), ("phi3", 2, "invariant"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "tensor", "attention"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_the_engine_agrees_with_a_full_forward_pass(family, tensor, attention):
    check_logprobs(family, tensor, attention=attention, apart=(family, tensor, attention) in FAST)


@pytest.mark.slow  # the fast one of the tests above has the numbers
@pytest.mark.parametrize(("family", "tensor"), [("gemma3", 2), ("qwen3_moe", 1), ("gpt_oss", 1)])
def test_so_it_does_where_weights_of_layers_are_arrays_of_their_own(family, tensor):
    assert_apart(check_logprobs(family, tensor, apart=True))


def assert_apart(engine):
    """No instruction takes the weights of a layer out of those of all layers."""
    stacked = Engine(engine.architecture, dataclasses.replace(engine.options, apart=False), mesh=engine.mesh)
    shape = "x".join(map(str, transformer.weight_shapes(engine.architecture)["layers.attention.query"][0]))

    def takes_a_layers_part(engine):
        lines = engine.programs()["decode window"]().as_text().splitlines()
        return any("dynamic_slice" in line and f"tensor<{shape}xf32>" in line for line in lines)

    assert takes_a_layers_part(stacked) and not takes_a_layers_part(engine)


@pytest.mark.slow  # test_experts.py has devices that split experts, test_routes.py an engine with experts
@pytest.mark.parametrize(("family", "apart"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_eight_devices_that_split_experts_draw_the_likeliest_tokens_of_one(family, apart):
    engine = check_logprobs(family, 2, replicas=4, temperature=0.0, apart=apart)
    if apart:
        assert_apart(engine)


def check_logprobs(family, tensor, *, replicas=1, temperature=1.0, **changes):
    architecture, params, _ = recording.golden(family)
    mesh = mesh_lib.make_mesh(fsdp=replicas, tensor=tensor)
    has_experts = architecture.num_experts > 0
    options = dataclasses.replace(tiny.OPTIONS, slots=4, records_experts=has_experts, **changes)
    options = dataclasses.replace(options, pages=enough_pages(options))
    engine = Engine(architecture, options, mesh=mesh)
    rollouts = Rollouts(engine)
    placed = jax.device_put(params, transformer.param_shardings(architecture, mesh))
    prompts = tiny.PROMPTS[2:4]
    pools = tiny.collect_pools(
        rollouts, tiny.strategies.fixed(3), prompts=prompts, params=placed, temperature=temperature
    )
    drawn, rows = tiny.in_rows(pools)
    logprobs = np.asarray(
        jax.nn.log_softmax(jax.jit(functools.partial(transformer.logits, architecture))(params, rows))
    )
    for row, (places, response) in enumerate(drawn):
        np.testing.assert_allclose(response.logprobs, logprobs[row][places], rtol=0, atol=1e-4)
        if temperature == 0:
            np.testing.assert_array_equal(response.tokens, logprobs[row][places[0]].argmax(-1))
    if has_experts:
        test_routes.check(architecture, params, pools)
    return engine


@pytest.mark.slow  # test_rounded.py has a model of such weights beside the learner's; test_prepare.py draws by one
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_on_a_cpu_an_engine_in_bfloat16_agrees_with_the_learner(family):
    """Both round what they multiply, and nothing else; a loop that carries weights in bfloat16 would widen them."""
    architecture, params, _ = recording.golden(family)
    options = dataclasses.replace(tiny.OPTIONS, slots=4, dtype="bfloat16")
    options = dataclasses.replace(options, pages=enough_pages(options))
    mesh = mesh_lib.make_mesh()
    engine = Engine(architecture, options, mesh=mesh)
    pools = tiny.collect_pools(Rollouts(engine), tiny.strategies.fixed(3), prompts=tiny.PROMPTS[2:4], params=params)
    model = transformer.merge(architecture, params)

    drawn, rows = tiny.in_rows(pools)

    def logprobs(rounds):
        hidden = transformer.hidden_states(model, rows, execution=transformer.Execution(jnp.float32, rounds))
        return np.asarray(jax.nn.log_softmax(transformer.head_logits(model, hidden)))

    learners, exact, gaps, changes = logprobs(True), logprobs(False), [], []
    for row, (places, response) in enumerate(drawn):
        gaps.extend(np.abs(response.logprobs - learners[row][places]))
        changes.extend(np.abs(learners[row][places] - exact[row][places]))
    assert np.mean(gaps) < 0.3 * np.mean(changes)
    compiled = engine.programs()["decode window"]().compile().as_text()
    up = ",".join(map(str, params["layers"]["mlp"]["up"].shape))
    assert f"u16[{up}]" in compiled and f"f32[{up}]" not in compiled

"""Against the plain formulas over whole logits, in values and in gradients to hidden states and head."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import loss
from reinforce_ada_jax.distributed import mesh as mesh_lib
from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.learning import loss as loss_lib
from reinforce_ada_jax.learning.fused_logprobs import token_logprobs
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.learning.token_losses import LossConfig

TEMPERATURE = 1.3
PLAIN = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=2.0, aggregation="token-mean")
EVERYTHING = dataclasses.replace(
    PLAIN, aggregation="seq-mean-token-mean", truncated_is_cap=1.5, kl_coefficient=0.1, entropy_coefficient=0.05
)


def make_case(rows, length, columns, num_words, *, tied=True, dtype=jnp.float32, seed=0):
    """(hidden, head, per-token arrays): logits of about +-3, ratios on both sides of every clip, a row of padding."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(rows, length, columns))
    head = rng.normal(size=(num_words, columns) if tied else (columns, num_words)) * 3 / math.sqrt(columns)
    mask = np.arange(length) < rng.integers(1, length + 1, size=(rows, 1))
    mask[-1] = False
    hidden, head = jnp.asarray(hidden, dtype), jnp.asarray(head, dtype)
    targets = jnp.asarray(rng.integers(num_words, size=(rows, length)), jnp.int32)
    logits = np.asarray(hidden, np.float32) @ (np.asarray(head, np.float32).T if tied else np.asarray(head, np.float32))
    logits /= TEMPERATURE
    picked = np.take_along_axis(logits, np.asarray(targets)[..., None], axis=-1)[..., 0]
    logprobs = picked - np.log(np.exp(logits).sum(axis=-1))
    # Steps of 1/8 away from the clips' edges, so that rounding puts no token on the other side of one.
    gap, other, reference = rng.choice([-1.0, -0.375, -0.125, 0.0, 0.125, 0.375, 1.0], size=(3, rows, length))
    return hidden, head, dict(
        targets=targets,
        old_logprobs=jnp.asarray(logprobs - gap, jnp.float32),
        behaviour_logprobs=jnp.asarray(logprobs - gap - other, jnp.float32),
        reference_logprobs=jnp.asarray(logprobs - reference, jnp.float32),
        advantages=jnp.asarray(np.repeat(rng.uniform(-1, 1, size=(rows, 1)), length, axis=1), jnp.float32),
        mask=jnp.asarray(mask),
    )  # fmt: skip


def plain_statistics(hidden, head, targets, *, temperature, tied):
    """By whole logits."""
    equation = "...D,VD->...V" if tied else "...D,DV->...V"
    logits = jnp.einsum(equation, hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    logprobs = jax.nn.log_softmax(logits / temperature)
    picked = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    return picked, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def plain_loss(hidden, head, arrays, counts=None, *, config, tied):
    """The same loss from whole logits, each term by its tested formula."""
    mask, aggregation = arrays["mask"], config.aggregation
    logprobs, entropy = plain_statistics(hidden, head, arrays["targets"], temperature=TEMPERATURE, tied=tied)
    loss, metrics = loss_lib.clipped_policy_loss(
        logprobs,
        arrays["old_logprobs"],
        arrays["advantages"],
        mask,
        behaviour_logprobs=arrays["behaviour_logprobs"],
        **{
            name: getattr(config, name)
            for name in ("clip_low", "clip_high", "dual_clip", "aggregation", "truncated_is_cap", "ratio")
        },
    )
    mean = functools.partial(loss_lib.aggregate, mask=mask, counts=loss_lib.denominators(mask))
    kl = loss_lib.kl_estimate(logprobs, arrays["reference_logprobs"], config.kl_kind)
    loss = loss - config.entropy_coefficient * mean(entropy, aggregation=aggregation)
    loss = loss + config.kl_coefficient * mean(kl, aggregation=aggregation)
    metrics |= {"entropy": mean(entropy, aggregation="token-mean"), "kl": mean(kl, aggregation="token-mean")}
    return loss, metrics


def fused_loss(hidden, head, arrays, counts=None, *, config, **head_settings):
    """As the learner computes it: log-probabilities without whole logits, then the loss."""
    arrays = dict(arrays)
    head_config = HeadConfig(TEMPERATURE, **head_settings)
    logprobs, entropy = token_logprobs(head_config, hidden, head, arrays.pop("targets"))
    return loss_lib.policy_loss(config, logprobs, entropy, loss_lib.SampledTokens(**arrays), counts=counts)


@functools.lru_cache
def compiled(loss, settings):
    return jax.jit(jax.value_and_grad(functools.partial(loss, **dict(settings)), argnums=(0, 1), has_aux=True))


def with_gradients(loss, hidden, head, arrays, counts=None, *, config=EVERYTHING, **settings):
    """((loss, metrics), (d_hidden, d_head)), compiled once for the same settings and shapes."""
    return compiled(loss, tuple(sorted((settings | {"config": config}).items())))(hidden, head, arrays, counts)


def assert_near(ours, wanted, tolerance=1e-5):
    """Within `tolerance` of the largest value of each array."""

    def compare(ours, wanted):
        assert ours.shape == wanted.shape and ours.dtype == wanted.dtype
        ours, wanted = (np.asarray(x, np.float32) for x in (ours, wanted))
        np.testing.assert_allclose(ours, wanted, atol=tolerance * max(1e-6, np.abs(wanted).max()), rtol=0)

    jax.tree.map(compare, ours, wanted)


# ---- statistics --------------------------------------------------------------------------------------------------


def test_literal_statistics():
    # Logits ln(1, 2, 1): probabilities 1/4, 1/2, 1/4, entropy 1.5 ln 2; at temperature 1/2 1/6, 4/6, 1/6. Tiles of two
    # words, so that the second has one word and no maximum of its own.
    hidden, head = jnp.ones((1, 1)), jnp.log(jnp.array([[1.0, 2.0, 1.0]]))
    target = jnp.array([1])

    def statistics(temperature):
        return token_logprobs(HeadConfig(temperature, tied=False, tile=(1, 2)), hidden, head, target)

    np.testing.assert_allclose(statistics(temperature=1.0), [[np.log(0.5)], [1.5 * np.log(2)]], rtol=1e-6)
    halved = 2 / 6 * np.log(6) + 4 / 6 * np.log(1.5)
    np.testing.assert_allclose(statistics(temperature=0.5), [[np.log(4 / 6)], [halved]], rtol=1e-6)


def test_log_probabilities_near_zero_are_those_of_float64():
    # The first logit is 100 or more and 8 above the next: its log-probability is -3.4e-4. Rounded as a number of the
    # logit's size it would be off by up to 4e-6; what is left is the rounding of the sum of exponentials, 1.0003.
    top = np.float32(np.linspace(100, 130, 64))
    logits = np.stack([top, top - np.float32(8), top - np.float32(12), top - np.float32(14)], axis=1)
    exact = logits.astype(np.float64)
    exact -= np.logaddexp.reduce(exact, axis=1, keepdims=True)

    @jax.jit
    def logprob(row, target):
        return token_logprobs(HeadConfig(1.0, tied=True, tile=(1, 2)), jnp.ones((1, 1)), row[:, None], target[None])[0]

    found = np.reshape([logprob(row, target) for row in logits for target in np.arange(2, dtype=np.int32)], (64, 2))
    np.testing.assert_allclose(found[:, 0], exact[:, 0], rtol=0, atol=1.2e-7)
    np.testing.assert_allclose(found[:, 1], exact[:, 1], rtol=2e-7)


def test_literal_gradients():
    # As above. d logprob / dz = 1[v = 1] - p = (-1/4, 1/2, -1/4); d entropy / dz = -p (log p + H), with log p + H =
    # ln 2 * (-2 + 1.5, -1 + 1.5, -2 + 1.5): ln 2 * (1/8, -1/4, 1/8). The hidden state is 1, so d_head is dz itself.
    hidden, head = jnp.ones((1, 1)), jnp.log(jnp.array([[1.0, 2.0, 1.0]]))

    def output(head, which):
        return token_logprobs(HeadConfig(1.0, tied=False, tile=(1, 2)), hidden, head, jnp.array([1]))[which][0]

    np.testing.assert_allclose(jax.grad(output)(head, 0), [[-0.25, 0.5, -0.25]], atol=1e-6)
    np.testing.assert_allclose(jax.grad(output)(head, 1), np.log(2) * np.array([[0.125, -0.25, 0.125]]), atol=1e-6)


@pytest.mark.parametrize("tile, tied", [
    ((1, 7), True), ((5, 32), False), pytest.param((4, 96), True, marks=pytest.mark.slow), ((30, 100), False),
], ids=str)  # fmt: skip
def test_tile_sizes_agree(tile, tied):
    # 10 rows and 96 words: dividing, leaving a rest, and beyond both.
    hidden, head, arrays = make_case(2, 5, 16, 96, tied=tied)
    weights = jax.random.normal(jax.random.key(3), (2, 2, 5))

    def weighted(function, hidden, head):
        logprob, entropy = function(hidden, head, arrays["targets"], temperature=0.7, tied=tied)
        return jnp.sum(weights[0] * logprob) + jnp.sum(weights[1] * entropy), (logprob, entropy)

    def tiled(hidden, head, targets, *, temperature, tied):
        return token_logprobs(HeadConfig(temperature, tied, tile=tile), hidden, head, targets)

    ours, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(weighted, function), argnums=(0, 1), has_aux=True))(hidden, head)
        for function in (tiled, plain_statistics)
    )
    assert_near(ours, wanted)


def test_large_and_equal_logits_stay_finite():
    # One word takes it all, at 1e4: entropy 0; or none does: ln 4. exp of one logit alone is inf in float32.
    head = jnp.array([[1e4, 0.0, -1e4, 0.0], [0.0, 0.0, 0.0, 0.0]])

    def both(head):
        return token_logprobs(HeadConfig(1.0, tied=False, tile=(2, 3)), jnp.eye(2), head, jnp.array([0, 3]))

    np.testing.assert_allclose(both(head), [[0.0, -np.log(4)], [0.0, np.log(4)]], atol=1e-6)
    assert np.isfinite(jax.jit(jax.jacrev(both))(head)).all()


def test_a_float32_head_beside_bfloat16_states_keeps_its_dtype():
    hidden, head, arrays = make_case(2, 5, 16, 96)
    hidden = hidden.astype(jnp.bfloat16)

    @functools.partial(jax.jit, static_argnames="cast")
    def slopes(hidden, head, cast):
        def total(hidden, head):
            head = head.astype(jnp.bfloat16) if cast else head
            outputs = token_logprobs(HeadConfig(1.0, tied=True, tile=(16, 96)), hidden, head, arrays["targets"])
            return sum(x.sum() for x in outputs)

        return jax.grad(total, argnums=(0, 1))(hidden, head)

    (d_hidden, d_head), (same, rounded) = slopes(hidden, head, cast=False), slopes(hidden, head, cast=True)
    assert d_hidden.dtype == jnp.bfloat16 and d_head.dtype == jnp.float32
    np.testing.assert_array_equal(d_hidden, same)  # the products are the same
    np.testing.assert_array_equal(d_head.astype(jnp.bfloat16), rounded)
    assert (d_head != rounded).any()  # but nothing is rounded on the way to a float32 head


# ---- the loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, tied", [
    pytest.param(PLAIN, False, marks=pytest.mark.slow),
    (EVERYTHING, True),
    pytest.param(EVERYTHING, False, marks=pytest.mark.slow),
    (dataclasses.replace(EVERYTHING, aggregation="seq-mean-token-sum", ratio="sequence", kl_kind="k2"), True),
], ids=["plain", "every term, tied", "every term", "by sequence"])  # fmt: skip
def test_equals_the_naive_loss(config, tied):
    case = make_case(6, 20, 16, 512, tied=tied)
    ours = with_gradients(fused_loss, *case, config=config, tied=tied, tile=(32, 200))
    assert_near(ours, with_gradients(plain_loss, *case, config=config, tied=tied))
    assert 0 < ours[0][1]["clip_fraction"] < 1


def test_in_bfloat16():
    """Loss and gradients in bfloat16 are those of float32, to rounding."""
    case = make_case(6, 20, 16, 512, dtype=jnp.bfloat16)
    ours = with_gradients(fused_loss, *case, tied=True, tile=(32, 200))
    assert ours[1][0].dtype == ours[1][1].dtype == jnp.bfloat16
    whole = jax.tree.map(lambda x: x.astype(jnp.float32), case[:2])
    (loss, metrics), slopes = with_gradients(plain_loss, *whole, case[2], tied=True)
    assert_near(ours, ((loss, metrics), jax.tree.map(lambda x: x.astype(jnp.bfloat16), slopes)), 2e-2)


@pytest.mark.parametrize(
    "dtype, tolerance",
    [(jnp.float32, 1e-5), pytest.param(jnp.bfloat16, 2e-2, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_the_whole_vocabulary_of_a_published_model_has_the_plain_gradients(dtype, tolerance):
    case = make_case(3, 4, 8, 151_936, dtype=dtype)
    ours = with_gradients(fused_loss, *case, tied=True, tile=(8, 50_000))
    assert_near(ours, with_gradients(plain_loss, *case, tied=True), tolerance)


def test_jit_equals_eager():
    hidden, head, arrays = make_case(4, 6, 8, 64)

    def total(hidden, head):
        outputs = token_logprobs(HeadConfig(1.3, tied=True, tile=(24, 40)), hidden, head, arrays["targets"])
        return sum(x.sum() for x in outputs)

    slopes = jax.value_and_grad(total, argnums=(0, 1))
    assert_near(jax.jit(slopes)(hidden, head), slopes(hidden, head))


def test_micro_batches_sum_to_the_minibatch():
    case = make_case(4, 6, 8, 64)
    whole = with_gradients(fused_loss, *case, tied=True, tile=(8, 40))
    counts = loss_lib.denominators(case[2]["mask"])
    parts = []
    for start in (0, 2):
        hidden, arrays = jax.tree.map(lambda x, start=start: np.asarray(x)[start : start + 2], (case[0], case[2]))
        (loss, metrics), (d_hidden, d_head) = with_gradients(
            fused_loss, hidden, case[1], arrays, counts, tied=True, tile=(8, 40)
        )
        parts.append(((loss, metrics), (d_hidden, d_head)))
    (loss, metrics), d_head = jax.tree.map(np.add, *((value, slopes[1]) for value, slopes in parts))
    assert_near(((loss, metrics), d_head), (whole[0], whole[1][1]))
    assert_near(np.concatenate([slopes[0] for _, slopes in parts]), whole[1][0])


def test_nothing_under_the_mask_matters():
    hidden, head, arrays = make_case(4, 6, 8, 64)
    per_token = ("old_logprobs", "behaviour_logprobs", "reference_logprobs", "advantages")
    spoiled = arrays | {name: jnp.where(arrays["mask"], arrays[name], jnp.nan) for name in per_token}
    spoiled["targets"] = jnp.where(arrays["mask"], arrays["targets"], -1)
    clean, ours = (
        with_gradients(fused_loss, hidden, head, given, tied=True, tile=(8, 40)) for given in (arrays, spoiled)
    )
    jax.tree.map(np.testing.assert_array_equal, clean, ours)
    np.testing.assert_array_equal(ours[1][0][~np.asarray(arrays["mask"])], 0.0)
    assert (np.abs(ours[1][0][np.asarray(arrays["mask"])]).max(axis=-1) > 0).any()


def test_no_token_at_all_gives_zeros():
    hidden, head, arrays = make_case(4, 6, 8, 64)
    arrays["mask"] = jnp.zeros_like(arrays["mask"])
    ours = with_gradients(fused_loss, hidden, head, arrays, tied=True, tile=(8, 40))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0.0), ours)


def test_only_hidden_and_head_are_differentiated():
    hidden, head, arrays = make_case(4, 6, 8, 64)
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def loss(floats):
        return fused_loss(hidden, head, arrays | floats, config=EVERYTHING, tied=True, tile=(8, 40))[0]

    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0.0), jax.jit(jax.grad(loss))(floats))


def test_packed_equals_unpacked():
    # Four rows one after the other, with rubbish between, in one row: each token brings its own response's numbers.
    hidden, head, arrays = make_case(4, 6, 8, 64)
    settings = dict(tied=True, tile=(8, 40), config=dataclasses.replace(EVERYTHING, aggregation="token-mean"))
    packed = jax.tree.map(lambda x: np.reshape(x, (1, -1, *x.shape[2:])), (hidden, arrays))
    wanted, slopes = with_gradients(fused_loss, hidden, head, arrays, **settings)
    ours, (d_hidden, d_head) = with_gradients(fused_loss, packed[0], head, packed[1], **settings)
    assert_near((ours, (np.reshape(d_hidden, hidden.shape), d_head)), (wanted, slopes))


# ---- over several devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes, tied, num_words, dtype, tolerance", [
    pytest.param(dict(tensor=8), True, 512, jnp.float32, 1e-5, marks=pytest.mark.slow),
    pytest.param(dict(data=2, fsdp=2, tensor=2), True, 512, jnp.float32, 1e-5, marks=pytest.mark.slow),
    pytest.param(dict(fsdp=4, tensor=2), False, 512, jnp.float32, 1e-5, marks=pytest.mark.slow),
    (dict(data=2, tensor=4), True, 151_936, jnp.float32, 1e-5),
    pytest.param(dict(data=2, fsdp=2, tensor=2), True, 512, jnp.bfloat16, 2e-2, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_one_device_equals_eight(axes, tied, num_words, dtype, tolerance):
    length, tile = (10, (8, 64)) if num_words == 512 else (2, (4, 19_000))
    hidden, head, arrays = make_case(4, length, 8, num_words, tied=tied)
    hidden = hidden.astype(dtype)  # beside a float32 head, which is gathered in bfloat16
    wanted = with_gradients(fused_loss, hidden, head, arrays, tied=tied, tile=tile)
    mesh = make_mesh(**axes)

    def put(x, *names):
        return jax.device_put(x, mesh_lib.sharding(mesh, names))

    head_axes = ("vocab", "embed") if tied else ("embed", "vocab")  # as the learner's weights are laid out
    ours = with_gradients(
        fused_loss, put(hidden, "rows"), put(head, *head_axes), jax.tree.map(lambda x: put(x, "rows"), arrays),
        tied=tied, mesh=mesh, tile=tile,
    )  # fmt: skip
    assert_near(ours, wanted, tolerance)
    assert ours[1][0].sharding.is_equivalent_to(mesh_lib.sharding(mesh, ("rows",)), 3)
    assert ours[1][1].sharding.is_equivalent_to(mesh_lib.sharding(mesh, head_axes), 2)


# ---- memory, input -----------------------------------------------------------------------------------------------


def largest_array(loss, tied, dtype):
    hidden, head, arrays = make_case(4, 64, 16, 1024, tied=tied, dtype=dtype)
    function = jax.jit(jax.grad(lambda *inputs: loss(*inputs, config=EVERYTHING, tied=tied)[0], argnums=(0, 1)))
    compiled = function.lower(hidden, head, arrays).compile()
    shapes = re.findall(r"(?:f32|bf16|s32|pred)\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize("tied, dtype", [(True, jnp.bfloat16), (False, jnp.float32)], ids=str)
def test_logits_of_all_words_for_all_tokens_never_exist(tied, dtype):
    tokens, words, columns = 4 * 64, 1024, 16
    assert largest_array(plain_loss, tied, dtype) >= tokens * words
    fused = largest_array(functools.partial(fused_loss, tile=(64, 128)), tied, dtype)
    assert fused == words * columns  # the head; tiles have 64 * 128


@pytest.mark.parametrize("loss, least, most", [(plain_loss, 9e9, 1e11), (fused_loss, 0, 0.1e9)], ids=["naive", "fused"])
def test_what_the_compiler_plans_for_a_published_vocabulary(loss, least, most):
    # 16 * 1024 tokens of 151,936 words: 9.96 GB of float32 logits. The naive loss has several such arrays at once.
    tokens, words, columns = (16, 1024), 151_936, 256
    arrays = jax.eval_shape(lambda: make_shapes(tokens))
    hidden, head = (jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in ((*tokens, columns), (words, columns)))
    program = compiled(loss, tuple(sorted(dict(tied=True, config=EVERYTHING).items())))
    assert least < program.lower(hidden, head, arrays, None).compile().memory_analysis().temp_size_in_bytes < most


def make_shapes(tokens):
    names = ("old_logprobs", "behaviour_logprobs", "reference_logprobs", "advantages")
    return dict.fromkeys(names, jnp.zeros(tokens)) | dict(
        targets=jnp.zeros(tokens, jnp.int32), mask=jnp.zeros(tokens, bool)
    )


@pytest.mark.slow
def test_the_benchmark():
    """The fused loss needs less memory than logits take, with the same value."""
    sizes = dict(rows=4, length=256, words=8192, columns=32)
    result = loss.measure(**sizes, repeat=1)
    logits = 4 * 4 * 256 * 8192
    for name, least, most in (("naive", logits, np.inf), ("chunked", logits / 4, np.inf), ("fused", 0, logits / 2)):
        assert least < result[name]["temporary_bytes"] < most
        assert result[name]["loss"] == pytest.approx(result["naive"]["loss"], rel=1e-5)
    assert result["seconds_ratio"] > 0 and result["temporary_bytes_ratio"] < 0.5


@pytest.mark.parametrize("name, parts", [
    ("reference_logprobs", ["kl_coefficient is 0.1, but there are no reference_logprobs"]),
    ("behaviour_logprobs", ["truncated_is_cap needs behaviour_logprobs"]),
])  # fmt: skip
def test_missing_arrays(name, parts):
    """An array that a setting needs is named."""
    hidden, head, arrays = make_case(2, 5, 8, 64)
    with pytest.raises(ValueError) as raised:
        jax.eval_shape(lambda: fused_loss(hidden, head, arrays | {name: None}, config=EVERYTHING, tied=True))
    for part in parts:
        assert part in str(raised.value)

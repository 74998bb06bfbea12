"""Counting against numbers made by hand and against a compiler, and the plan made of it."""

import dataclasses

import pytest

from reinforce_ada_jax.config import replaced, resolve
from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.planning import plan, programs, roofline
from reinforce_ada_jax.planning.compilation import ProgramResult
from reinforce_ada_jax.planning.plan import Deployment, Statistics
from reinforce_ada_jax.planning.roofline import CHIPS, GIB, BatchLayout, Chip, ProgramCost
from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.policy.presets import PUBLISHED
from reinforce_ada_jax.sampling.state import EngineOptions, kv_token_bytes
from tests.running import CONFIGS, load, tiny

SIZES = dict(
    model_type="qwen2", vocab_size=10, hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
TIED, UNTIED = (from_hf(SIZES | {"tie_word_embeddings": tied}) for tied in (True, False))
OPTIONS = EngineOptions(
    slots=3, window=4, page_size=4, pages=9, open_prompts=3, prefill_tokens=8, max_prompt_tokens=8,
    max_response_tokens=8, stop_ids=(0,), seed=0, dtype="bfloat16", attention="jnp",
)  # fmt: skip
# Two micro-batches of 4 rows of 3 + 5 tokens. 2 x 2 devices.
LAYOUT = BatchLayout(
    micro_batches=2, micro_rows=4, row_tokens=8, head_tokens=5, row_shards=2, weight_shards=2, tensor_shards=2,
    itemsize=2,
)  # fmt: skip


# ---- counting ----------------------------------------------------------------------------------------------------


def test_token_bytes():
    """Bytes of a cached token, with the padding and the scales of each kind."""
    assert kv_token_bytes(TIED, "bfloat16") == 16  # 2 (keys and values) * 2 layers * 1 head * 2 columns * 2 B
    assert kv_token_bytes(TIED, "bfloat16", "pallas_tpu") == 2 * 2 * 1 * 128 * 2
    assert kv_token_bytes(TIED, "float32", "pallas_tpu") == 2 * 2 * 1 * 128 * 4
    # In int8 each head of each token has a scale of 4 bytes.
    assert kv_token_bytes(TIED, "float32", kv_dtype="int8") == 2 * 2 * 1 * (2 + 4)
    assert kv_token_bytes(TIED, "bfloat16", "pallas_tpu", "int8") == 2 * 2 * 1 * (128 + 4)


# A layer's matrices: query and output 4 * 4 each, key and value 4 * 2 each, three of 4 * 6: 120 weights. Head: 40.
# Beside them a layer has 8 biases and two norms of 4, and there is a last norm of 4: 316 weights, 356 where untied.
@pytest.mark.parametrize("architecture, weights", [(TIED, 316), (UNTIED, 356)])
def test_decode_step(architecture, weights):
    """Operations and bytes of a decode step, on one device and two."""
    assert architecture.num_parameters == weights
    flops = 3 * (2 * (2 * 120 + 40) + 4 * 5 * 4 * 2)  # slots; matrices; 5 tokens, 4 columns of queries, 2 layers
    bytes_ = 316 * 2 + 3 * 5 * 16  # weights (an untied embedding is looked up, not read), the tokens of three slots
    assert roofline.decode_step(architecture, OPTIONS, 1, 5) == ProgramCost(flops, bytes_) == ProgramCost(2160, 872)
    assert roofline.decode_step(architecture, OPTIONS, 2, 5) == ProgramCost(1080, 436)
    int8 = dataclasses.replace(OPTIONS, kv_dtype="int8", weight_dtype="int8")
    assert roofline.decode_step(architecture, int8, 1, 5) == ProgramCost(2160, 316 + 3 * 5 * 24)


def test_prefill_chunk():
    """Operations and bytes of a chunk of prompts."""
    flops = 8 * (2 * 2 * 120 + 4 * 4 * 4 * 2)  # 8 tokens, each of which meets 4
    bytes_ = 2 * 120 * 2 + 8 * 16  # no head, no embedding
    assert roofline.prefill_chunk(TIED, OPTIONS, 1, 4) == ProgramCost(flops, bytes_) == ProgramCost(4864, 608)
    assert roofline.prefill_chunk(UNTIED, OPTIONS, 2, 4) == ProgramCost(2432, 304)
    int8 = dataclasses.replace(OPTIONS, kv_dtype="int8", weight_dtype="int8")
    assert roofline.prefill_chunk(TIED, int8, 1, 4) == ProgramCost(4864, 2 * 120 + 8 * 24)


def test_of_experts_a_token_meets_its_own():
    # A layer: 48 weights of attention, a router of 4 * 5, five experts of three matrices of 4 * 3. A token meets two.
    experts = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=3, head_dim=2, tie_word_embeddings=True)
    architecture = from_hf(SIZES | experts | {"model_type": "qwen3_moe"})
    assert (architecture.layer_weights(), architecture.layer_weights(active=True)) == (248, 140)
    flops = 3 * (2 * (2 * 140 + 40) + 4 * 5 * 4 * 2)
    bytes_ = architecture.num_parameters * 2 + 3 * 5 * 16  # all experts
    assert roofline.decode_step(architecture, OPTIONS, 1, 5) == ProgramCost(flops, bytes_)
    assert roofline.prefill_chunk(architecture, OPTIONS, 1, 4) == ProgramCost(
        8 * (2 * 2 * 140 + 4 * 4 * 4 * 2), 2 * 248 * 2 + 8 * 16
    )
    row = 2 * (2 * 8 * 140 + 512) + 400
    assert roofline.learner_call(architecture, LAYOUT, update=False) == ProgramCost(2 * row, 2 * 2 * 248 * 2 / 2)


def test_decoding_beside_adapters():
    # Rank 1 on queries and down: of two layers 4 + 4 and 6 + 4 weights each, 36 in all, in bfloat16 also over int8.
    adapted = dataclasses.replace(OPTIONS, adapters=lora.Lora(1, 1.0, ("q_proj", "down_proj")))
    assert roofline.decode_step(TIED, adapted, 1, 5) == ProgramCost(2160 + 3 * 2 * 36, 872 + 2 * 36)
    int8 = dataclasses.replace(adapted, kv_dtype="int8", weight_dtype="int8")
    assert roofline.decode_step(TIED, int8, 1, 5) == ProgramCost(2376, 316 + 3 * 5 * 24 + 72)
    assert roofline.prefill_chunk(TIED, adapted, 1, 4) == ProgramCost(4864 + 8 * 2 * 36, 608 + 72)


def test_learner_call():
    # A row: 2 layers of 2 * 8 * 120 and, for causal attention, 2 * 4 * 8 * 8; the head at 5 positions, 2 * 40 each. Of
    # 8 rows on 4 devices 2 each. A layer's 120 weights, 2 B, are read in each of two micro-batches, halved by `tensor`.
    row = 2 * (1920 + 512) + 400
    assert roofline.learner_call(TIED, LAYOUT, update=False) == ProgramCost(2 * row, 2 * 2 * 120 * 2 / 2)
    assert roofline.learner_call(TIED, LAYOUT, update=True) == ProgramCost(2 * 3 * row, 2 * 2 * 360 * 2 / 2)


def test_learner_call_of_adapters():
    # Ten weights a layer. Those under them, and the head, have no gradient: two passes in place of three.
    adapted = dataclasses.replace(LAYOUT, adapter_weights=10)
    row = 2 * (1920 + 160 + 512) + 400
    assert roofline.learner_call(TIED, adapted, update=False) == ProgramCost(2 * row, 2 * 2 * 130 * 2 / 2)
    row = 2 * (2 * 1920 + 3 * 160 + 3 * 512) + 2 * 400
    assert roofline.learner_call(TIED, adapted, update=True) == ProgramCost(2 * row, 2 * 2 * 270 * 2 / 2)
    # 7 arrays of 4 B, of 316 weights or of 20, on 4 devices.
    assert roofline.optimizer_call(TIED, LAYOUT) == ProgramCost(0, 7 * 316)
    assert roofline.optimizer_call(TIED, adapted) == ProgramCost(0, 7 * 20)


@pytest.mark.parametrize("rank", [pytest.param(8, marks=pytest.mark.slow), 0])
def test_no_device_repeats_the_work_of_another(rank):
    """By the compiler's count. Were it left to the compiler where activations live, eight devices would do 1.26 times
    as much to score and 1.23 times as much to update: attention over all rows on every device."""
    sizes = SIZES | dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_key_value_heads=2)
    config = tiny(**{
        "data.max_prompt_tokens": 64, "sampling.max_response_tokens": 64, "learning.kl_coefficient": 0.1,
        "learning.prompts_per_update": 8, "learning.micro_batches": 4, "collection.prompts_per_iteration": 8,
        "learning.remat": "full", "learning.attention": "jnp", "lora.rank": rank,
    })  # fmt: skip
    flops = {}
    for size, axes in ((1, {}), (8, dict(fsdp=4, tensor=2))):
        run = programs.abstract_run(config, from_hf(sizes), OPTIONS, make_mesh(**axes))
        compiled = {program.name: program.lower().compile() for program in programs.learner_programs(run)}
        flops[size] = {name: compiled[name].cost_analysis()["flops"] for name in ("score", "update")}
    for name, alone in flops[1].items():
        assert 8 * flops[8][name] == pytest.approx(alone, rel=0.1)


def test_roofline():
    """The slower of bandwidth and compute bounds the time."""
    chip = Chip(hbm_bytes=1, bandwidth=10.0, flops=100.0)
    assert roofline.roofline(ProgramCost(flops=100, bytes=20), chip) == (2.0, "bandwidth")
    assert roofline.roofline(ProgramCost(flops=300, bytes=20), chip) == (3.0, "compute")


def test_the_roofline_of_the_1p5b_model_on_one_v5e_chip():
    # shared/PLATFORM.md: weights 3.09 GB (3.8 ms) and 28,672 B a token (2.3 ms at 64 * 1,024): about 10.5k tokens/s.
    architecture = from_hf(PUBLISHED["Qwen2.5-Math-1.5B"])
    options = dataclasses.replace(OPTIONS, slots=64, attention="pallas_tpu")
    assert kv_token_bytes(architecture, options.dtype, options.attention) == 28_672
    work = roofline.decode_step(architecture, options, 1, 1024)
    assert work.bytes == 3_087_428_608 + 1_879_048_192
    seconds, bound = roofline.roofline(work, CHIPS["v5e"])
    assert bound == "bandwidth" and 64 / seconds == pytest.approx(10_554, rel=1e-3)


# ---- the plan ----------------------------------------------------------------------------------------------------


def result(name, peak, beside, seconds=1.0):
    return ProgramResult(
        program=name, hbm_peak_bytes=int(peak * GIB), hbm_beside_bytes=int(beside * GIB), hbm_limit_bytes=10 * GIB,
        flops=0.0, bytes=0.0, fits=peak + beside <= 10, over_bytes=0, least_seconds=seconds,
    )  # fmt: skip


RESULTS = [result("decode window of 4", 5, 2), result("score", 1, 3, 0.5), result("update", 4, 4, 2.0)]


def test_what_fits_beside_everything():
    # The update is fullest: 2 GiB are left, of a page of 4 tokens of 16 B on one device.
    assert plan.spare_bytes(RESULTS) == 2 * GIB
    run = Deployment(tiny(), TIED, OPTIONS, CHIPS["v5e"])
    assert plan.pages_that_fit(run, 2 * GIB) == 9 + 2 * GIB // 64
    # table 4 pages (16 tokens), a prompt 2: 4 + 2 a slot; 65 pages and the one that is never handed out: 10 slots. With
    # two open prompts for each slot 8 a slot: 8 slots.
    assert (OPTIONS.table_width, OPTIONS.prompt_width) == (4, 2)
    assert plan.slots_that_fit(run, (66 - 9) * 64) == 10
    more_prompts = dataclasses.replace(run, options=dataclasses.replace(OPTIONS, open_prompts=6))
    assert plan.slots_that_fit(more_prompts, (66 - 9) * 64) == 8
    assert plan.slots_that_fit(run, -14 * 64) == 0


def test_rings_leave_more_room():
    """One of two layers slides and sees 2 tokens: a slot's ring has 2 pages of 4 tokens, a prompt's all of its 2."""
    sliding = dataclasses.replace(TIED, window=2, sliding_layers=(0,))
    run = Deployment(tiny(), sliding, dataclasses.replace(OPTIONS, ring_window=2), CHIPS["v5e"])
    assert plan.pages_that_fit(run, 6 * 32) == 9 + 6  # a page of one layer has 32 bytes
    # The pool has 9 pages, the rings 1 + 3 * 2 + 3 * 2. Of these 22 two are never handed out. 6 and 4 a slot.
    assert plan.slots_that_fit(run, (2 + 5 * 10 - 22) * 32) == 5
    assert plan.slots_that_fit(run, (2 + 5 * 10 - 23) * 32) == 4


def test_phases():
    """Seconds of each phase of an iteration, by hand."""
    config = tiny(**{
        "collection.prompts_per_iteration": 64, "learning.prompts_per_update": 32, "mesh.fsdp": 2,
    })  # fmt: skip
    chip = Chip(hbm_bytes=1, bandwidth=10.0, flops=1e9)
    seconds = plan.phases(Deployment(config, TIED, OPTIONS, chip), RESULTS, Statistics(4, 2, 3.0))
    # 64 * 3 responses of 2 tokens in 6 slots; a turn reads 632 B of weights and 3 * 5 tokens of 16 B.
    assert seconds["decode"] == pytest.approx(64 * 3 * 2 / 6 * 87.2)
    # 64 prompts of 4 tokens in 2 replicas, 8 tokens a chunk: 480 B of weights, 8 tokens of 16 B.
    assert seconds["prefill"] == pytest.approx(16 * (480 + 128) / 10)
    assert (seconds["reshard"], seconds["score"], seconds["update"]) == (0.0, 1.0, 4.0)  # two updates


def test_policy_and_reference_are_scored():
    """Seconds of scoring: of the policy with several updates an iteration, of the reference with a KL term."""
    for prompts, coefficient, seconds in ((64, 0.0, 1.0), (64, 0.1, 2.0), (32, 0.1, 0.5)):  # an update has 32 prompts
        config = tiny(**{"collection.prompts_per_iteration": prompts, "learning.kl_coefficient": coefficient})
        run = Deployment(config, TIED, OPTIONS, CHIPS["v5e"])
        assert plan.phases(run, RESULTS, Statistics(4, 2, 3.0))["score"] == seconds


def test_packed_responses_take_a_part_of_the_time():
    # 4 + 2 of 16 positions: at best 6 / 16 of the rows, and with two to a row a half of them.
    chip = Chip(hbm_bytes=1, bandwidth=10.0, flops=1e9)
    for per_row, share in ((1, 1.0), (2, 0.5), (16, 0.375)):
        config = tiny(**{"collection.prompts_per_iteration": 64, "learning.responses_per_row": per_row})
        seconds = plan.phases(Deployment(config, TIED, OPTIONS, chip), RESULTS, Statistics(4, 2, 3.0))
        assert (seconds["score"], seconds["update"]) == (2 * 0.5 * share, 2 * 2.0 * share)


def test_a_prompt_has_at_least_its_first_round():
    for strategy, draws in (("grpo", 4), ("balance", 8), ("estimate", 8)):
        changes = {"collection.strategy": strategy, "collection.group_size": 4, "collection.samples_per_round": 8}
        assert plan.statistics(tiny(**changes)).draws == draws
    assert plan.statistics(tiny(**changes), draws=3.0).draws == 3.0
    # Minibatches are padded to the 32 draws that estimate may keep.
    assert plan.statistics(tiny(**changes)).filled == 8 / 32


def test_no_response_fills_more_than_its_row():
    # Rows of 16 tokens, beside prompts of a mean length for models of their own size.
    config = tiny(**{"data.max_prompt_tokens": 8, "sampling.max_response_tokens": 8})
    assert plan.packed_share(config, Statistics(150, 4.0, draws=0.0)) == 1.0


def deployed(config, options=OPTIONS) -> Deployment:
    return Deployment(config, TIED, options, CHIPS["v5e"])


def test_remedies():
    """A program that does not fit has settings with which it would."""
    config = resolve(load(CONFIGS / "qwen_1p5b.py").get_config())
    assert plan.remedies(deployed(config), RESULTS, GIB) == []
    too_big = [*RESULTS[:2], result("update", 7, 4)]
    lines = plan.remedies(deployed(config), too_big, 3 * GIB)
    assert any("learning.micro_batches = 128 (now 64)" in line for line in lines)
    assert "mesh.fsdp = 8 (now 4)" in lines[-1] and "3.00 of 10.00 GiB" in lines[-1]
    config = replaced(config, {"learning.micro_batches": 128})  # a row a device
    assert not any("micro_batches" in line for line in plan.remedies(deployed(config), too_big, 3 * GIB))
    many = dataclasses.replace(OPTIONS, pages=2**26, slots=2**20, open_prompts=5 * 2**18)  # 32 B on each of two devices
    lines = plan.remedies(deployed(config, many), [result("decode window of 4", 9, 2)], GIB)
    pages, fit = 2**26 - 2**25, (2**25 - 1) * 2 // 13
    assert lines[0].startswith(f"sampling.slots = {fit} (now 1048576) with sampling.pages = {pages:,}")


def test_chips_are_named():
    assert roofline.chip_of("v5e:2x4") is CHIPS["v5e"]

"""Collectives, kernels and the bytes between chips, read from pieces of compiled programs and counted by hand."""

import dataclasses

import pytest

from reinforce_ada_jax.planning import collectives, latency
from reinforce_ada_jax.planning.latency import Starts
from tests.planning.test_roofline import ADAPTED, LAYOUT, TIED

# As libtpu writes it: a loop of 3 turns in a loop that data ends, a collective spread over two fusions, the ways to
# name groups, and one collective outside.
HLO = """\
HloModule jit__update

%fused.1 (p: bf16[4]) -> bf16[8] {
  ROOT %all-gather.1 = bf16[8,2]{1,0:T(8,128)} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
}

%fused.2 (p: bf16[4]) -> bf16[8] {
  ROOT %all-gather.2 = bf16[8,2]{1,0:T(8,128)} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
}

%inner_condition (p: s32[]) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%p, %constant.1), direction=LT
}

%inner_body (p: s32[]) -> s32[] {
  %a = bf16[8,2] fusion(%p), kind=kLoop, calls=%fused.1
  %b = bf16[8,2] fusion(%p), kind=kLoop, calls=%fused.2
  %permute = (f32[5]{0}, f32[5]{0}, u32[], u32[]) collective-permute-start(%b), channel_id=8
}

%outer_condition (p: s32[]) -> pred[] {
  ROOT %lt.2 = pred[] compare(%p, %q), direction=LT
}

%outer_body (p: s32[]) -> s32[] {
  %while.1 = s32[] while(%p), condition=%inner_condition, body=%inner_body
  %sum = (f32[6]{0}, f32[]{:T(128)}) all-reduce(%x, %y), channel_id=9, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%a
}

ENTRY %main (p: s32[]) -> s32[] {
  %while.2 = s32[] while(%p), condition=%outer_condition, body=%outer_body
  %scatter = f32[3]{0} reduce-scatter(%z), channel_id=10, replica_groups=mesh['a'=4,'b'=2] {'b','a'}, dimensions={0}
}
"""


def test_learner_sent():
    # Two micro-batches. Half of 240 layer weights and of the head's 40 pass a link, 2 B, halved by `tensor`.
    # 2 rows a device of 8 tokens, 4 columns, 2 B: 128 B, as much of which passes when it is summed over two.
    assert collectives.learner_sent_bytes(TIED, LAYOUT, update=False) == 2 * (120 + 20 + 2 * 2 * 128)
    assert collectives.learner_sent_bytes(TIED, LAYOUT, update=True) == 2 * (3 * 120 + 4 * 20 + 5 * 2 * 128)
    assert collectives.learner_summed_bytes(TIED, LAYOUT, update=True) == 2 * 5 * 2 * 128
    # Gathered once: of the layers only gradients pass in a micro-batch, and the copy before it.
    once = dataclasses.replace(LAYOUT, gathers_once=True)
    assert collectives.learner_sent_bytes(TIED, once, update=False) == 120 + 2 * (20 + 2 * 2 * 128)
    assert collectives.learner_sent_bytes(TIED, once, update=True) == 120 + 2 * (120 + 4 * 20 + 5 * 2 * 128)
    # 10 of 20 adapters' weights 3 times, their gradients among them; of weights and head there are none. 3 sums more.
    assert collectives.learner_sent_bytes(TIED, ADAPTED, update=False) == 2 * (120 + 10 + 20 + 2 * 2 * 128)
    assert collectives.learner_sent_bytes(TIED, ADAPTED, update=True) == 2 * (2 * 120 + 3 * 10 + 2 * 20 + 8 * 2 * 128)


def test_decode_sent():
    # Two devices, 3 slots: the embedding's row and twice each layer's output, 4 columns of 2 B; 8 B; a candidate, 12 B.
    assert collectives.decode_sent_bytes(TIED, 3, 2, 2) == 3 * ((1 + 2 * TIED.num_layers) * 4 * 2 + 8 + 12)
    # Four: 1.5 times the sums, and three candidates.
    assert collectives.decode_sent_bytes(TIED, 3, 4, 2) == 3 * (1.5 * (5 * 4 * 2 + 8) + 36)
    assert collectives.decode_sent_bytes(TIED, 3, 1, 2) == 0


def test_sent_bytes():
    # Inner: 32 B gathered over 4, of which 24 pass a link; 20 B to the neighbour; 3 times 44. With 28 B summed over 4,
    # twice 21: 174 a turn. Outside: 12 B come out of each of 8, so that 84 pass.
    found = collectives.traffic(HLO, trip_count=5)
    assert found.sent_bytes == 5 * (3 * 44 + 42) + 84 == 954
    assert found.collectives == {"all-gather": 1, "collective-permute": 1, "all-reduce": 1, "reduce-scatter": 1}
    assert collectives.traffic(HLO, trip_count=None).sent_bytes == 174 + 84
    assert collectives.traffic("", trip_count=1) == (0.0, {}, Starts())


def test_starts():
    # Inner: two fusions and the start of a permutation; with the sum 3 * 3 + 1 kernels a turn. Outside: one. The gather
    # in the fusions and the permutation overlap with products. The sum has 2 * 3 hops over 4 chips, the scatter 7.
    assert collectives.traffic(HLO, trip_count=5).starts == Starts(51, 6, 37, awaited_bytes=5 * 42 + 84)
    # Of a conditional's branches all are counted; a copy in the background and the mark of a buffer are no kernels.
    begin = "%outer_body (p: s32[]) -> s32[] {\n"
    more = '  %c = (f32[2], f32[2], u32[]) copy-start(%p)\n  %d = f32[2] custom-call(), custom_call_target="Buffer"\n'
    more += '  %k = f32[2] custom-call(%p), custom_call_target="tpu_custom_call"\n'
    assert collectives.traffic(HLO.replace(begin, begin + more), trip_count=5).starts.kernels == 51 + 5


# As XLA's CUDA compiler writes it: starts that name operands before results, joined collectives, one that is awaited at
# once, a known number of turns, a number that the host reads, libraries' kernels, and kernels behind a call.
CUDA = """\
HloModule jit__accumulated

%fused_compare (p: s32[]) -> pred[] {
  %constant.1 = s32[] constant(3)
  ROOT %lt = pred[] compare(%p, %constant.1), direction=LT
}

%layer_condition (p: s32[]) -> pred[] {
  ROOT %less = pred[] fusion(%p), kind=kLoop, calls=%fused_compare
}

%graph (p: bf16[4]) -> bf16[4] {
  %product = bf16[4]{0} custom-call(%p), custom_call_target="__cublas$gemm"
  ROOT %c = bf16[4]{0} copy(%product)
}

%layer_body (p: s32[]) -> s32[] {
  %gather = ((bf16[4]{0}, bf16[2,3]{1,0}), (bf16[16]{0}, bf16[8,3]{1,0})) all-gather-start(%a, %b), channel_id=1, \
replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={0}, backend_config={"is_sync":false}
  %slice = bf16[4]{0} fusion(%p), kind=kCustom, calls=%fused_slice
  %scatter = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%s), channel_id=2, replica_groups=[2,4]<=[8], \
dimensions={0}, backend_config={"is_sync":true}
  %scattered = f32[2]{0} reduce-scatter-done(%scatter)
  %gathered = (bf16[16]{0}, bf16[8,3]{1,0}) all-gather-done(%gather)
  %attention = (bf16[4]{0}, u8[0]{0}) custom-call(%gathered), custom_call_target="__cudnn$fmhaSoftmax"
  %view = bf16[4]{0} bitcast(%attention)
  ROOT %called = bf16[4]{0} call(%view), to_apply=%graph
}

%batch_condition (p: s32[]) -> pred[] {
  ROOT %more = pred[] fusion(%p), kind=kLoop, calls=%fused_compare
}

%batch_body (p: s32[]) -> s32[] {
  %while.1 = s32[] while(%p), condition=%layer_condition, body=%layer_body, \
backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}
  %sum = f32[5]{0} all-reduce-start(%x), channel_id=3, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add, \
backend_config={"is_sync":false}
  %moved = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%y), channel_id=4, \
source_target_pairs={{0,1},{1,0}}, backend_config={"is_sync":false}
}

ENTRY %main (p: s32[]) -> s32[] {
  %while.2 = s32[] while(%p), condition=%batch_condition, body=%batch_body
  %turned = ((bf16[8,2]{1,0}), bf16[8,2]{1,0}) all-to-all-start(%z), channel_id=5, replica_groups=[1,8]<=[8], \
dimensions={0}, backend_config={"is_sync":false}
}
"""


def test_traffic_of_a_cuda_program():
    # A layer: 32 + 48 B gathered over 4, 60 of which pass a link; 8 B are left of each of 4, 24 pass. 7 layers: 588.
    # Twice 15 of 20 B summed over 4, and 24 to the neighbour: 642 a turn. Outside: 7 / 8 of 32 B.
    found = collectives.traffic(CUDA, 5, "gpu")
    assert found.sent_bytes == 5 * 642 + 28
    assert found.collectives == {
        "all-gather": 1, "reduce-scatter": 1, "all-reduce": 1, "collective-permute": 1, "all-to-all": 1,
    }  # fmt: skip
    # A layer begins two collectives, the slice, attention, and two kernels behind the call: 7 * 6 + 2 a turn. Only the
    # scatter is awaited at once, of 3 hops. The host reads the condition before 5 turns, and once more.
    assert found.starts == Starts(5 * 44 + 1, collectives=35, hops=105, host_reads=6, awaited_bytes=35 * 24)
    assert collectives.traffic(CUDA, 5).starts.host_reads == 0


def test_latency():
    # 85 kernels and 31 a layer. 2 sums a layer and 3 more over two chips, 2 hops each, and a gather of one hop:
    # 953 + 60 * 5 + 119 us.
    assert latency.decode_step(28, 2, 7e6, "tpu") == Starts(953, 60, 119, awaited_bytes=7e6)
    assert latency.decode_step(28, 2, 7e6, "tpu").seconds("tpu") == pytest.approx(1372e-6)
    assert latency.decode_step(28, 1, 0, "tpu") == Starts(953, 0, 0)
    # A GPU: 129 kernels, 25 a layer, 59 sums and a gather. One sum is waited for, and 8 numbers for the host:
    # 889 + 6.6 + 6 * 0.6 + 8 * 5.75 us over four.
    assert latency.decode_step(28, 4, 7e6, "gpu") == Starts(889, 1, 6, 8)
    assert latency.decode_step(28, 4, 7e6, "gpu").seconds("gpu") == pytest.approx(945.2e-6)
    assert latency.decode_step(28, 1, 0, "gpu") == Starts(829, 0, 0, 8)
    # Two micro-batches of one layer: 100 kernels, 26 forwards and 125 backwards, 2 sums forwards and 3 backwards.
    assert LAYOUT.tensor_shards == 2 and LAYOUT.micro_batches == 2
    assert latency.learner_call(1, LAYOUT, 9.0, update=True) == Starts(2 * 251, 10, 20, awaited_bytes=9)
    assert latency.learner_call(1, LAYOUT, 9.0, update=False) == Starts(2 * 126, 4, 8, awaited_bytes=9)


def test_collectives_by_loop():
    body = "%outer_body (p: s32[]) -> s32[] {\n"
    branch = (
        "%sorted (p: s32[]) -> s32[] {\n  %c = f32[2] all-to-all(%p), channel_id=3, replica_groups=[1,2]<=[2]\n}\n\n"
    )
    chosen = "  %i = s32[] conditional(%p), branch_computations={%sorted, %other}\n"
    assert collectives.by_loop(HLO.replace(body, branch + body + chosen)) == {
        ("outer_body", "sorted"): ["all-to-all"],
        ("outer_body", "inner_body"): ["all-gather", "collective-permute"],
        ("outer_body",): ["all-reduce"],
        (): ["reduce-scatter"],
    }

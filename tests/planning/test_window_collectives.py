"""Collectives of one token, read from a compiled decode window where libtpu is installed."""

import ast
import importlib.util

import pytest

from tests.compiled_collectives import by_loop
from tests.running import environment, run_python

# The window of a model of two layers on four chips: two replicas of two chips.
PROGRAM = """
from reinforce_ada_jax.planning import compilation
from tests.compiled_collectives import by_loop
devices = compilation.topology_devices("v5e:2x2")
from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.state import EngineOptions
architecture = from_hf(dict(
    model_type="qwen2", vocab_size=16384, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2,
))
options = EngineOptions(
    slots=2, window=4, page_size=16, pages=40, open_prompts=2, prefill_tokens=16, max_prompt_tokens=32,
    max_response_tokens=32, stop_ids=(0,), seed=0, dtype="bfloat16", attention="pallas_tpu", tail=(2,),
)
engine = Engine(architecture, options, mesh=make_mesh(fsdp=2, tensor=2, devices=devices))
text = engine.programs()["decode window"]().compile().as_text()
print([(len(nesting), kinds) for nesting, kinds in by_loop(text).items()])
"""
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed")


@needs_libtpu
def test_collectives_of_a_token():
    result = run_python("-c", PROGRAM, env=environment(""))
    assert result.returncode == 0, result.stderr
    found = ast.literal_eval(result.stdout.splitlines()[-1])
    # In a branch for top-k and top-p, which training does not take, a vocabulary is sorted.
    found = [(depth, kinds) for depth, kinds in found if "all-to-all" not in kinds]
    # The loop over layers is inside of a pass over rows, inside of the loop over tokens. There are three passes: of a
    # chunk of prompts, of both slots and of one. Attention's output and the MLP's are summed, nothing else.
    assert [kinds for depth, kinds in found if depth == 3] == [["all-reduce"] * 2] * 3
    # Outside of that loop, a few numbers for each slot: in every pass the embedding's rows, and in those of slots the
    # head's largest logit and their sum; then the devices' candidates for the sampled token, in one transfer. In a
    # branch for temperature 0 there are the largest log-probability, its index and its value.
    others = [kind for depth, kinds in found if depth < 3 for kind in kinds]
    assert sorted(others) == ["all-gather"] + ["all-reduce"] * (3 + 2 * 2 + 3)
    assert "all-gather" in dict(found)[1]
    assert {depth for depth, _ in found} == {1, 2, 3}


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


def test_collectives_by_loop():
    body = "%outer_body (p: s32[]) -> s32[] {\n"
    branch = (
        "%sorted (p: s32[]) -> s32[] {\n  %c = f32[2] all-to-all(%p), channel_id=3, replica_groups=[1,2]<=[2]\n}\n\n"
    )
    chosen = "  %i = s32[] conditional(%p), branch_computations={%sorted, %other}\n"
    assert by_loop(HLO.replace(body, branch + body + chosen)) == {
        ("outer_body", "sorted"): ["all-to-all"],
        ("outer_body", "inner_body"): ["all-gather", "collective-permute"],
        ("outer_body",): ["all-reduce"],
        (): ["reduce-scatter"],
    }

"""Collectives of one token, read from a compiled decode window where libtpu is installed."""

import ast
import importlib.util
import subprocess
import sys

import pytest

from tests.running import ROOT, environment

# The window of a model of two layers on four chips: two replicas of two chips.
PROGRAM = """
from reinforce_ada_jax.planning import collectives, compilation
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
print([(len(nesting), kinds) for nesting, kinds in collectives.by_loop(text).items()])
"""
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed")


@needs_libtpu
def test_collectives_of_a_token():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment(""), capture_output=True, text=True, check=False
    )
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

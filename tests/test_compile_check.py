"""Counting against numbers made by hand, messages, and, where libtpu is installed, the real compiler."""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from reinforce_ada_jax import command, compile_check
from reinforce_ada_jax.compile_check import CHIPS, GIB, Program, Work
from reinforce_ada_jax.mesh import make_mesh
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.policy.published import PUBLISHED
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.sampling.state import EngineOptions, PrefillBatch
from tests.running import CONFIGS, ROOT, environment, load, tiny
from tests.sampling import tiny as tiny_engine

SIZES = dict(
    model_type="qwen2", vocab_size=10, hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
TIED, UNTIED = (from_hf(SIZES | {"tie_word_embeddings": tied}) for tied in (True, False))
OPTIONS = EngineOptions(
    slots=3, window=4, page_size=4, pages=9, open_prompts=3, prefill_rows=2, max_prompt_tokens=8, max_response_tokens=8,
    stop_ids=(0,), seed=0, dtype="bfloat16", attention="jnp",
)  # fmt: skip


# ---- counting ----------------------------------------------------------------------------------------------------


def test_token_bytes():
    assert compile_check.token_bytes(TIED, OPTIONS) == 16  # 2 (keys and values) * 2 layers * 1 head * 2 columns * 2 B
    wide = dataclasses.replace(OPTIONS, attention="pallas_tpu")
    assert compile_check.token_bytes(TIED, wide) == 2 * 2 * 1 * 128 * 2
    assert compile_check.token_bytes(TIED, dataclasses.replace(wide, dtype="float32")) == 2 * 2 * 1 * 128 * 4


# A layer's matrices: query and output 4 * 4 each, key and value 4 * 2 each, three of 4 * 6: 120 weights. Head: 40.
# Beside them a layer has 8 biases and two norms of 4, and there is a last norm of 4: 316 weights, 356 where untied.
@pytest.mark.parametrize("architecture, weights", [(TIED, 316), (UNTIED, 356)])
def test_decode_turn(architecture, weights):
    assert architecture.num_parameters == weights
    flops = 3 * (2 * (2 * 120 + 40) + 4 * 5 * 4 * 2)  # slots; matrices; 5 tokens, 4 columns of queries, 2 layers
    bytes_ = 316 * 2 + 3 * 5 * 16  # weights (an untied embedding is looked up, not read), the tokens of three slots
    assert compile_check.decode_turn(architecture, OPTIONS, 1, 5) == Work(flops, bytes_) == Work(2160, 872)
    assert compile_check.decode_turn(architecture, OPTIONS, 2, 5) == Work(1080, 436)


def test_prefill_call():
    flops = 2 * 8 * (2 * 2 * 120 + 4 * 8 * 4 * 2)  # 2 rows of 8 tokens, each of which meets 8
    bytes_ = 2 * 120 * 2 + 2 * 8 * 16  # no head, no embedding
    assert compile_check.prefill_call(TIED, OPTIONS, 1, 8) == Work(flops, bytes_) == Work(11776, 736)
    assert compile_check.prefill_call(UNTIED, OPTIONS, 2, 8) == Work(5888, 368)


def test_roofline():
    chip = compile_check.Chip(hbm_bytes=1, bandwidth=10.0, flops=100.0)
    assert compile_check.roofline(Work(flops=100, bytes=20), chip) == (2.0, "bandwidth")
    assert compile_check.roofline(Work(flops=300, bytes=20), chip) == (3.0, "compute")


def test_the_roofline_of_the_1p5b_model_on_one_v5e_chip():
    # shared/PLATFORM.md: weights 3.09 GB (3.8 ms) and 28,672 B a token (2.3 ms at 64 * 1,024): about 10.5k tokens/s.
    architecture = from_hf(PUBLISHED["Qwen2.5-Math-1.5B"])
    options = dataclasses.replace(OPTIONS, slots=64, attention="pallas_tpu")
    assert compile_check.token_bytes(architecture, options) == 28_672
    work = compile_check.decode_turn(architecture, options, 1, 1024)
    assert work.bytes == 3_087_428_608 + 1_879_048_192
    seconds, bound = compile_check.roofline(work, CHIPS["v5e"])
    assert bound == "bandwidth" and 64 / seconds == pytest.approx(10_554, rel=1e-3)


def test_learner_bytes():
    # A layer: 136 matrix weights over 4 devices, 12 biases over `tensor`, 8 of norms over `fsdp`; embedding 40 over 4,
    # last norm 4 over `fsdp`: 2 * (34 + 6 + 4) + 10 + 2 = 100 float32 numbers a device, and two moments of each.
    architecture = from_hf(SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True})
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    assert compile_check.learner_bytes(architecture, tiny(), mesh) == (400, 800)


# As the models' cards have them.
PARAMETERS = {
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
}


def test_published_sizes():
    assert {name: from_hf(sizes).num_parameters for name, sizes in PUBLISHED.items()} == PARAMETERS


def test_every_configuration_names_a_model_whose_sizes_are_known():
    paths = [load(file).get_config().model.path for file in sorted(CONFIGS.glob("*.py"))]
    assert len(paths) >= 5
    for path in paths:
        compile_check.find_architecture(path, None)


# ---- programs ----------------------------------------------------------------------------------------------------


def test_programs_take_just_what_rollouts_hand_over(monkeypatch):
    rollouts = tiny_engine.rollouts(slots=4)
    engine, calls = rollouts.engine, {}
    programs = compile_check.engine_programs(engine, tiny(), 10)
    assert [program.name for program in programs] == ["decode window of 4", "prefill 2 x 16", "prefill 2 x 32"]
    lowered = [program.lower() for program in programs]

    def record(program, *arguments):
        work = arguments[2]
        key = f"prefill 2 x {work.tokens.shape[1]}" if isinstance(work, PrefillBatch) else "decode window of 4"
        calls[key] = shapes(arguments)
        return program(*arguments)

    for name in ("_decode_window", "_open_prompts"):
        monkeypatch.setattr(engine, name, functools.partial(record, getattr(engine, name)))
    tiny_engine.draw(rollouts, draws=1)
    assert calls == {p.name: shapes(low.args_info[0]) for p, low in zip(programs, lowered, strict=True)}
    for low in lowered:
        donated = [info.donated for info in jax.tree.leaves(low.args_info[0][1])]
        assert all(donated)  # else the whole cache would be there twice


def shapes(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (jnp.shape(leaf), jnp.dtype(leaf.dtype)) for path, leaf in leaves}


@pytest.mark.parametrize("axes, dtype, copies", [
    (dict(tensor=2), "float32", 2),  # decoding reads the learner's own arrays: its two moments stand beside
    (dict(fsdp=2), "float32", 3),
    (dict(tensor=2), "bfloat16", 3),
])  # fmt: skip
def test_what_stands_beside_decoding(axes, dtype, copies):
    options = dataclasses.replace(OPTIONS, dtype=dtype)
    architecture, mesh = from_hf(SIZES | {"num_key_value_heads": 2}), make_mesh(**axes)
    programs = compile_check.engine_programs(Engine(architecture, options, mesh=mesh), tiny(), 10)
    weights, _ = compile_check.learner_bytes(architecture, tiny(), mesh)
    assert {program.beside_bytes for program in programs} == {copies * weights}


def program_that(outcome):
    """A program of (arguments, temporaries, peak) in GiB, or one that raises."""

    def lower():
        if isinstance(outcome, Exception):
            raise outcome
        sizes = dict(zip(("argument_size", "temp_size", "peak_memory"), outcome, strict=True))
        memory = types.SimpleNamespace(**{f"{name}_in_bytes": int(size * GIB) for name, size in sizes.items()})
        compiled = types.SimpleNamespace(memory_analysis=lambda: memory)
        return types.SimpleNamespace(compile=lambda: compiled)

    return Program("decode", lower, Work(flops=197e12, bytes=819e9 * 2), "turn", beside_bytes=2 * GIB)


OOM = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (27.14G) exceeds available HBM (15.75G). HLO module: jit_decode_window.\nSee https://openxla.org"
)
SMEM = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Allocation (size=1064960) would exceed memory (size=1048576)")


@pytest.mark.parametrize(
    "outcome, peak, over, fits",
    [
        ((8, 1, 9), 9, 0, True),
        ((13, 0.5, 13.75), 13.75, 0, True),  # 13.75 + 2 beside: just the limit
        ((13, 1, 14), 14, 0.25, False),
        (OOM, 27.14, 27.14 + 2 - 15.75, False),
        (SMEM, None, 0, False),
    ],
    ids=["fits", "just fits", "too big beside the learner", "HBM", "another memory"],
)
def test_compile_program(outcome, peak, over, fits):
    result = compile_check.compile_program(program_that(outcome), CHIPS["v5e"])
    assert result["fits"] is fits
    assert result["hbm_limit_bytes"] == 15.75 * GIB and result["hbm_beside_bytes"] == 2 * GIB
    assert result["hbm_peak_bytes"] == (None if peak is None else int(peak * GIB))
    assert result["over_bytes"] == pytest.approx(over * GIB, abs=2)
    assert (result["least_seconds"], result["bound"]) == (2.0, "bandwidth")
    line = compile_check.row(result)
    assert ("yes" in line) is fits and ("NO" in line) is not fits
    if over:
        assert f"NO: {over:.2f} GiB over" in line
    json.dumps(result)


def test_an_error_of_another_kind_is_no_lack_of_memory():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_check.compile_program(program_that(jax.errors.JaxRuntimeError("INTERNAL: a bug")), CHIPS["v5e"])


# ---- input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (dict(topology="h100:8"), ["'h100:8'", "v4, v5e, v5p, v6e, tpu7x", "v5e:2x4"]),
        (dict(topology="v5e"), ["'v5e'", "CHIP:SHAPE"]),
        (dict(model="no/such/folder"), ["no/such/folder", "not a folder"]),
        (dict(path="models/Other-9B"), ["models/Other-9B", "'Other-9B'", "Qwen2.5-Math-1.5B", "--model=DIR"]),
        (dict(attention="pallas_gpu"), ["sampling.attention", "pallas_gpu", "auto, pallas_tpu or jnp"]),
        (dict(mean_context=17), ["--mean_context is 17", "1 to 16"]),
        (dict(slots=0), ["sampling.slots is 0"]),
        (dict(file="no/such/folder/results.json"), ["--json=no/such/folder/results.json", "does not exist"]),
        (dict(), ["needs its compiler", "pip install libtpu"]),
    ],
    ids=str,
)
def test_bad_input(capsys, monkeypatch, arguments, parts):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else found(name))
    keys = {"path": "model.path", "attention": "sampling.attention", "slots": "sampling.slots"}
    config = tiny(**{keys[name]: value for name, value in arguments.items() if name in keys})
    defaults = dict(topology="v5e:2x4", model=None, mean_context=None, file=None)
    rest = defaults | {name: value for name, value in arguments.items() if name in defaults}
    with pytest.raises(SystemExit) as ended:
        compile_check.main(config, **rest)
    assert ended.value.code == command.BAD_INPUT
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ")
    for part in parts:
        assert part in shown.err


# ---- with the compiler -------------------------------------------------------------------------------------------

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed")
# Heads of 128, as TPU pages have them.
SMALL = SIZES | dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_key_value_heads=2)


def run(tmp_path, *arguments):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    options = ["--config=configs/tiny.py", "--config.model.compute_dtype=bfloat16", f"--model={tmp_path}"]
    return subprocess.run(
        [sys.executable, "-m", "reinforce_ada_jax.compile_check", *options, *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip


@needs_libtpu
@pytest.mark.parametrize("topology, tensor", [("v5e:2x2", 2), ("v6e:1x1", 1)])
def test_what_fits(tmp_path, topology, tensor):
    file = tmp_path / "results.json"
    sizes = f"--config.mesh.tensor={tensor}", "--config.sampling.pages=20000"
    result = run(tmp_path, f"--topology={topology}", f"--json={file}", *sizes)
    assert result.returncode == 0, result.stderr
    window, prefill = json.loads(file.read_text())
    assert (window["program"], prefill["program"]) == ("decode window of 16", "prefill 32 x 16")
    cache = 20_000 * 8 * 2 * 2 * 2 * 128 * 2 // tensor  # pages, tokens, keys and values, layers, heads, columns, bytes
    for outcome in (window, prefill):
        assert outcome["fits"] and outcome["reason"] is None
        assert cache < outcome["hbm_argument_bytes"] < outcome["hbm_peak_bytes"] < outcome["hbm_limit_bytes"]
        assert outcome["hbm_temporary_bytes"] < cache / 20  # the cache is updated in place; half of it are keys
    assert "pallas_tpu" in result.stdout


@needs_libtpu
def test_what_does_not_fit(tmp_path):
    result = run(tmp_path, "--topology=v5e:1x1", "--config.sampling.pages=2000000")
    assert result.returncode == command.STOPPED, result.stderr
    assert "NO: " in result.stdout and "GiB over" in result.stdout and "CompileTimeHbmOom" in result.stdout


@needs_libtpu
@pytest.mark.parametrize("arguments, parts", [
    (["--topology=v5e:3x7"], ["--topology=v5e:3x7", "not divisible"]),
    (["--topology=v5e:2x2", "--config.mesh.fsdp=8"], ["there are 4 devices", "mesh.fsdp"]),
    (["--topology=v5e:2x2", "--config.mesh.tensor=4"], ["kv_heads", "mesh.tensor = 4"]),
])  # fmt: skip
def test_a_slice_that_cannot_be(tmp_path, arguments, parts):
    result = run(tmp_path, *arguments)
    assert result.returncode == command.BAD_INPUT and result.stdout == ""
    for part in parts:
        assert part in result.stderr

"""Counting against numbers made by hand, messages, and, where libtpu is installed, the real compiler."""

import dataclasses
import importlib.util
import json
import types

import jax
import jax.numpy as jnp
import pytest

from reinforce_ada_jax import cli, compile_check
from reinforce_ada_jax.distributed.mesh import make_mesh, shard_bytes
from reinforce_ada_jax.learning.batch import make_batch
from reinforce_ada_jax.planning import compilation, report
from reinforce_ada_jax.planning import programs as programs_lib
from reinforce_ada_jax.planning.programs import AbstractRun, Program
from reinforce_ada_jax.planning.roofline import CHIPS, GIB, ProgramCost
from reinforce_ada_jax.policy import huggingface, lora
from reinforce_ada_jax.policy.architecture import from_hf
from reinforce_ada_jax.policy.presets import PUBLISHED
from reinforce_ada_jax.policy.transformer import init
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.training import components as components_lib
from tests import standins
from tests.planning.test_roofline import OPTIONS, SIZES
from tests.policy import ggufs
from tests.running import CONFIGS, environment, load, refused, run_python, tiny
from tests.sampling import tiny as tiny_engine

# As the models' cards have them.
PARAMETERS = {
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen3-30B-A3B": 30_532_122_624,
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Allows mixed dtypes: jax's own attention mixes them when it is lowered in bfloat16 for a TPU."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_published_sizes():
    """Models have the numbers of weights that were published."""
    assert {name: from_hf(sizes).num_parameters for name, sizes in PUBLISHED.items()} == PARAMETERS


def test_every_configuration_names_a_model_whose_sizes_are_known():
    make_their_own = (
        "word_problems", "game", "calculator", "smollm2_sft", "smollm2_char_count", "smollm2_sums", "maze_sft", "maze",
        "reasoning_gym", "instruct",
    )  # fmt: skip
    files = [file for file in sorted(CONFIGS.glob("*.py")) if file.stem not in make_their_own]
    paths = [load(file).get_config().model.path for file in files]
    assert len(paths) >= 5
    for path in paths:
        report.find_architecture(path, None)


def test_a_gguf_file_is_a_model_as_its_folder_is(tmp_path):
    file = ggufs.write(tmp_path / "model.gguf", "qwen2")
    architecture, source = report.find_architecture(str(file), None)
    assert architecture == huggingface.read_config(tmp_path) and source == str(file)


# ---- programs ----------------------------------------------------------------------------------------------------


def test_programs_take_just_what_rollouts_hand_over(monkeypatch):
    rollouts = Rollouts(tiny_engine.rollouts().engine)
    engine, calls = rollouts.engine, {}
    run = programs_lib.abstract_run(tiny(), engine.architecture, engine.options, engine.mesh)
    programs = programs_lib.engine_programs(dataclasses.replace(run, engine=engine), 10)
    assert [program.name for program in programs] == ["decode window of 4"]
    lowered = [program.lower() for program in programs]

    class Recorded(Exception):
        pass

    def recording(*arguments):
        calls["decode window of 4"] = shapes(arguments)
        raise Recorded  # so that nothing is compiled

    monkeypatch.setattr(engine, "_programs", dataclasses.replace(engine._programs, decode_window=recording))
    with pytest.raises(Recorded):
        tiny_engine.draw(rollouts, draws=1)
    assert calls == {p.name: shapes(low.args_info[0]) for p, low in zip(programs, lowered, strict=True)}
    for low in lowered:
        donated = [info.donated for info in jax.tree.leaves(low.args_info[0][1])]
        assert all(donated)  # else the whole cache would be there twice


def shapes(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (jnp.shape(leaf), jnp.dtype(leaf.dtype)) for path, leaf in leaves}


ARCHITECTURE = from_hf(SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True})


def abstract(dtype="float32", axes=None, **changes) -> AbstractRun:
    config = tiny(**{"model.compute_dtype": dtype} | changes)
    adapters = components_lib.engine_options(config, ARCHITECTURE, (0,)).adapters
    options = dataclasses.replace(OPTIONS, dtype=dtype, adapters=adapters)
    mesh = make_mesh(**(axes or dict(data=2, fsdp=2, tensor=2)))
    return programs_lib.abstract_run(config, ARCHITECTURE, options, mesh)


def test_the_learner_takes_just_what_training_hands_over():
    run = abstract(**{"learning.kl_coefficient": 0.1, "learning.micro_batches": 2})
    learner, config = run.learner, run.config
    state = learner.init(init(ARCHITECTURE, jax.random.key(0), learner.mesh))
    batch = make_batch([], max_prompt_tokens=8, max_response_tokens=8, num_rows=128)
    batch = learner.put(batch.replace(old_logprobs=None))  # one update an iteration computes them itself
    batch = batch.replace(reference_logprobs=learner.score(state.params, batch))
    assert config.learning.prompts_per_update * config.collection.group_size == 128
    for real, made in ((state, run.state), (batch, run.batch)):
        assert shapes(real) == shapes(made)
        same = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), real, made)
        assert all(jax.tree.leaves(same))
        assert shard_bytes(real) == shard_bytes(made)
    update = programs_lib.learner_programs(run)[-1].lower()
    assert all(info.donated for info in jax.tree.leaves(update.args_info[0][0]))


def test_state_bytes():
    # A layer: 136 matrix weights over 4 devices, 12 biases over `tensor`, 8 of norms over `fsdp`; embedding 40 over 4,
    # last norm 4 over `fsdp`: 2 * (34 + 6 + 4) + 10 + 2 = 100 float32 numbers a device, two moments of each, 3 counts.
    run = abstract()
    assert (shard_bytes(run.state.params), shard_bytes(run.state)) == (400, 1200 + 12)


@pytest.mark.parametrize("axes, dtype, copies", [
    (dict(tensor=2), "float32", 2),  # decoding reads the learner's own arrays; the copies are its moments
    (dict(fsdp=2), "float32", 3),
    (dict(tensor=2), "bfloat16", 3),
])  # fmt: skip
def test_what_stands_beside_decoding(axes, dtype, copies):
    run = abstract(dtype, axes)
    assert (run.decode_copy is None) is (copies == 2)
    weights = shard_bytes(run.state.params)
    assert {program.beside_bytes for program in programs_lib.engine_programs(run, 10)} == {copies * weights + 12}
    names = [program.name for program in programs_lib.learner_programs(run)]
    assert names == (["update"] if run.decode_copy is None else ["reshard", "update"])
    two_updates = abstract(dtype, axes, **{"collection.prompts_per_iteration": 64})
    assert [program.name for program in programs_lib.learner_programs(two_updates)][-2:] == ["score", "update"]


def test_what_stands_beside_the_learner():
    changes = {"collection.prompts_per_iteration": 96, "collection.strategy": "estimate", "estimator.kind": "value"}
    beside = {program.name: program.beside_bytes for program in programs_lib.learner_programs(abstract(**changes))}
    cache = 9 * 4 * (2 * 2 * 2 * 2) * 4 // 2  # pages, tokens, keys and values, layers, heads, columns; on two devices
    moments = 800 + 12
    # Two others of 32 prompts with all of their 32 draws, on 4 devices. A row has 3 numbers a token, 6 and a byte of
    # the mask a response token, a length, and two counts of what is left out.
    batches = 2 * (1024 // 4) * (4 * (3 * 16 + 6 * 8 + 1 + 2) + 8)
    decoding = (2 * (68 + 6 + 8) + 20 + 4) * 4  # split over `tensor` only
    assert beside["reshard"] == moments + cache
    assert beside["score"] == moments + batches  # pages are held until the end of a collection
    assert beside["update"] == batches
    assert beside["value head's features"] == moments + cache + decoding
    with_reference = {
        program.name: program.beside_bytes
        for program in programs_lib.learner_programs(abstract(**changes, **{"learning.kl_coefficient": 0.1}))
    }
    assert with_reference["reshard"] == moments + cache + 400  # the first weights, float32 here, as the learner's


LORA = {"lora.rank": 1, "learning.kl_coefficient": 0.1}


@pytest.mark.slow  # a test above has all weights, the next but one lowers programs of adapters
def test_adapters_are_trained_over_what_training_hands_over():
    run = abstract("bfloat16", **LORA, **{"learning.micro_batches": 2})
    mesh, key = run.learner.mesh, jax.random.key(0)
    base = init(ARCHITECTURE, key, mesh, jnp.bfloat16)
    state = run.learner.init(lora.init(ARCHITECTURE, run.learner.lora, key, mesh))
    for real, made in ((state, run.state), (base, run.base), (run.learner.policy(state.params, base), run.policy)):
        assert shapes(real) == shapes(made)
        same = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), real, made)
        assert all(jax.tree.leaves(same))
        assert shard_bytes(real) == shard_bytes(made)
    update = programs_lib.learner_programs(run)[-1].lower()
    state, batch, base, _ = update.args_info[0]
    assert all(info.donated for info in jax.tree.leaves(state))
    assert not any(info.donated for info in jax.tree.leaves((batch, base)))


def test_what_stands_beside_programs_of_adapters():
    run = abstract("bfloat16", **LORA)
    # A layer of rank 1, half of each adapter split over `fsdp` and half over `tensor`: four of attention with 2 + 2
    # weights a device, three of the feed-forward with 2 + 3. Two layers: 62 float32 numbers, two moments, 3 counts.
    params, moments = 248, 2 * 248 + 12
    assert (shard_bytes(run.state.params), shard_bytes(run.state)) == (params, params + moments)
    base = 200  # bfloat16; 400 in float32, see test_state_bytes
    assert (run.learner_bytes, run.reference_bytes) == (params + moments + base, 0)
    # Split over `tensor` only, with half of each adapter whole: 62 + 28 numbers of adapters, in float32 on CPUs.
    decoding = (2 * (68 + 6 + 8) + 20 + 4) * 2
    adapters = 2 * (4 * (2 + 4) + 2 * (4 + 3) + 3 + 4) * 4
    assert shard_bytes(run.decode_copy) == decoding + adapters
    assert run.learner_bytes < shard_bytes(abstract().state)
    # The reference is the base itself.
    assert run.resident_bytes == run.learner_bytes + run.cache_bytes
    beside = {program.name: program.beside_bytes for program in programs_lib.learner_programs(run)}
    cache = 9 * 4 * (2 * 2 * 2 * 2) * 4 // 2  # float32 on CPUs
    # Pages are held until the end of a collection.
    assert beside == {"reshard": moments + cache, "score": moments, "update": 0}
    assert {program.beside_bytes for program in programs_lib.engine_programs(run, 10)} == {params + moments + base}


def test_a_policy_of_adapters_in_decoding_s_layout_and_type_is_not_copied():
    """On a CPU both sides compute with a base in bfloat16 and adapters in float32."""
    run = abstract("bfloat16", dict(tensor=2), **LORA)
    assert run.decode_copy is None
    assert [program.name for program in programs_lib.learner_programs(run)] == ["score", "update"]
    # Base and adapters are arguments of the window.
    (window,) = programs_lib.engine_programs(run, 10)
    assert window.beside_bytes == run.moment_bytes
    # Where float32 adapters are merged, all weights are copied.
    merged = abstract(axes=dict(tensor=2), **LORA)
    assert shard_bytes(merged.decode_copy) == shard_bytes(merged.base)


def test_every_program_of_adapters_lowers_and_the_update_is_in_place():
    run = abstract("bfloat16", **LORA, **{"collection.strategy": "estimate", "estimator.kind": "value"})
    programs = {p.name: p for p in programs_lib.engine_programs(run, 10) + programs_lib.learner_programs(run)}
    assert list(programs)[-4:] == ["reshard", "value head's features", "score", "update"]
    lowered = {name: program.lower() for name, program in programs.items()}
    # Adapters and moments are updated in place.
    assert lowered["update"].compile().memory_analysis().alias_size_in_bytes == shard_bytes(run.state)


@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.slow), LORA], ids=["weights", "adapters"])
def test_the_programs_of_a_chain_are_those_of_one_update(monkeypatch, changes):
    standins.accelerator(monkeypatch, gathers=True)
    settings = changes | {"learning.micro_batches": 8}
    one = abstract(**settings)
    standins.accelerator(monkeypatch, in_program=2)
    run = abstract(**settings)
    *_, alone = programs_lib.learner_programs(one)
    *in_parts, begin, loop, finish = programs_lib.learner_programs(run)
    if changes:  # with a reference to score: 6 and 2 micro-batches
        assert [p.name for p in in_parts[-2:]] == ["begin scores", "score"]
        assert in_parts[-1].lower().args_info[0][0].donated
    chain = begin, loop, finish
    assert alone.name == "update" and [p.name for p in chain] == ["begin update", "update", "finish update"]
    copied = chain[0].cost.bytes  # and the sums, made of nothing
    assert sum(p.cost.bytes for p in chain) == pytest.approx(alone.cost.bytes + copied)
    lowered = [program.lower() for program in chain]
    donated = [[any(x.donated for x in jax.tree.leaves(arg)) for arg in each.args_info[0]] for each in lowered]
    # Weights are only read until the last program, which takes the state; the sums are updated in place.
    assert donated == [[False] * 2, [True] + [False] * 6, [True, False, False]]
    unread = shard_bytes((run.batch, run.base))
    params = 0 if run.learner.gathers_once else shard_bytes(run.state.params)
    beside = [run.moment_bytes + unread + params, run.moment_bytes, unread]
    assert [p.beside_bytes for p in chain] == beside


def test_what_is_there_throughout():
    run = abstract()
    assert compilation.resident_result(run, CHIPS["v5e"]).fits
    result = compilation.resident_result(run, dataclasses.replace(CHIPS["v5e"], hbm_bytes=2000))
    assert (result.fits, result.hbm_peak_bytes, result.over_bytes) == (False, 1212 + 1152, 364)


@pytest.mark.parametrize(
    ("kind", "collection"),
    [
        ("ema", {"collection.strategy": "estimate"}),
        ("value", {"collection.objective": "log", "collection.control_variate": "noise"}),
    ],
)
def test_every_program_of_the_learner_lowers(kind, collection):
    run = abstract(**collection, **{"estimator.kind": kind})
    programs = {program.name: program.lower() for program in programs_lib.learner_programs(run)}
    assert ("value head's features" in programs) is (kind == "value")


def program_that(outcome):
    """A program of (arguments, temporaries, peak) in GiB, or one that raises."""

    def lower():
        if isinstance(outcome, Exception):
            raise outcome
        sizes = dict(zip(("argument_size", "temp_size", "peak_memory"), outcome, strict=True))
        memory = types.SimpleNamespace(**{f"{name}_in_bytes": int(size * GIB) for name, size in sizes.items()})
        compiled = types.SimpleNamespace(memory_analysis=lambda: memory)
        return types.SimpleNamespace(compile=lambda: compiled)

    cost = ProgramCost(flops=197e12, bytes=819e9 * 2)
    return Program("update", lower, cost, "call", beside_bytes=2 * GIB)


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
    """A program fits or not, by how many bytes, and with its bound of time."""
    result = compilation.compile_program(program_that(outcome), CHIPS["v5e"])
    assert result.fits is fits
    assert result.hbm_limit_bytes == 15.75 * GIB and result.hbm_beside_bytes == 2 * GIB
    assert result.hbm_peak_bytes == (None if peak is None else int(peak * GIB))
    assert result.over_bytes == pytest.approx(over * GIB, abs=2)
    assert (result.least_seconds, result.bound) == (2.0, "bandwidth")
    line = report.table_row(result)
    assert ("yes" in line) is fits and ("NO" in line) is not fits
    if over:
        assert f"NO: {over:.2f} GiB over" in line
    json.dumps(dataclasses.asdict(result))


def test_an_error_of_another_kind_is_no_lack_of_memory():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compilation.compile_program(program_that(jax.errors.JaxRuntimeError("INTERNAL: a bug")), CHIPS["v5e"])


# ---- input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (dict(topology="p100:8"), ["'p100:8'", "v4, v5e, v5p, v6e, tpu7x, a100, h100, h200", "v5e:2x4"]),
        (dict(topology="v5e"), ["'v5e'", "CHIP:SHAPE"]),
        (dict(model="no/such/folder"), ["no/such/folder", "not a folder"]),
        (dict(path="models/Other-9B"), ["models/Other-9B", "'Other-9B'", "Qwen2.5-Math-1.5B", "--model=DIR"]),
        (dict(attention="pallas_gpu"), ["sampling.attention is 'pallas_gpu': a TPU", "auto, pallas_tpu or jnp"]),
        (dict(response_tokens=9), ["--mean_response_tokens is 9", "1 to 8"]),
        (dict(draws=0.0), ["--mean_draws is 0.0", "above 0"]),
        (dict(slots=-1), ["sampling.slots is -1"]),
        (dict(file="pyproject.toml/results.json"), ["--json is 'pyproject.toml/results.json'", "is a file"]),
        (dict(), ["needs its compiler", "pip install libtpu"]),
    ],
    ids=str,
)
def test_bad_input(capsys, monkeypatch, arguments, parts):
    """A wrong argument is named, with what is allowed."""
    standins.without_packages(monkeypatch, "libtpu")
    keys = {"path": "model.path", "attention": "sampling.attention", "slots": "sampling.slots"}
    config = tiny(**{keys[name]: value for name, value in arguments.items() if name in keys})
    rest = {name: value for name, value in arguments.items() if name not in keys}
    shown = refused(capsys, compile_check.main, config, **{"topology": "v5e:2x4", "model": None, "file": None} | rest)
    assert shown.out == "" and shown.err.startswith("error: ")
    for part in parts:
        assert part in shown.err


# ---- with the compiler -------------------------------------------------------------------------------------------

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed")
# Heads of 128, as TPU pages have them.
SMALL = SIZES | dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_key_value_heads=2)


def run(tmp_path, *arguments):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    options = ["--config=configs/tiny.py", f"--model={tmp_path}"]
    return run_python("-m", "reinforce_ada_jax.compile_check", *options, *arguments, env=environment(""))


@needs_libtpu
def test_what_fits(tmp_path):
    file = tmp_path / "results.json"
    sizes = "--config.mesh.fsdp=2", "--config.mesh.tensor=2", "--config.sampling.pages=20000"
    result = run(tmp_path, "--topology=v5e:2x2", f"--json={file}", *sizes)
    assert result.returncode == 0, result.stderr
    outcomes = json.loads(file.read_text())
    window, *learner = outcomes
    assert [outcome["program"] for outcome in outcomes] == ["decode window of 16", "reshard", "update"]
    cache = 20_000 * 8 * 2 * 2 * 2 * 128 * 2 // 2  # pages, tokens, keys and values, layers, heads, columns, bytes
    assert cache < window["hbm_argument_bytes"] < window["hbm_peak_bytes"] < window["hbm_limit_bytes"]
    assert window["hbm_temporary_bytes"] < cache / 20  # the cache is updated in place; half of it are keys
    reshard, update = learner
    assert update["hbm_beside_bytes"] < cache <= reshard["hbm_beside_bytes"]  # updates begin when the pages are freed
    for outcome in outcomes:
        assert outcome["fits"] and outcome["reason"] is None and outcome["least_seconds"] > 0
    assert "they share one copy of the layers' weights" in result.stdout
    assert "pallas_tpu" in result.stdout and "time     an iteration takes at least" in result.stdout


@needs_libtpu
def test_adapters_fit_where_all_weights_do(tmp_path):
    whole, adapters = tmp_path / "whole.json", tmp_path / "adapters.json"
    sizes = "--topology=v5e:2x2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"
    for file, rank in ((whole, 0), (adapters, 8)):
        result = run(tmp_path, f"--json={file}", *sizes, f"--config.lora.rank={rank}")
        assert result.returncode == 0, result.stderr
    assert "weights of adapters are trained, those under them stay in bfloat16" in result.stdout
    for full, small in zip(*(json.loads(file.read_text()) for file in (whole, adapters)), strict=True):
        assert small["program"] == full["program"] and small["fits"]
        assert small["hbm_beside_bytes"] <= full["hbm_beside_bytes"]
    # The last is the update.
    assert small["hbm_argument_bytes"] < full["hbm_argument_bytes"]


@needs_libtpu
def test_eight_chips_are_one_host():
    count = "from reinforce_ada_jax.planning.compilation import topology_devices\n"
    count += "for name in ('v5e:2x4', 'v6e:2x4', 'v5e:4x4'):\n"
    count += "    print(len({device.process_index for device in topology_devices(name)}))"
    result = run_python("-c", count, env=environment(""))
    assert result.stdout.split() == ["1", "1", "4"], result.stderr


@needs_libtpu
def test_a_window_is_one_program_of_all_hosts(tmp_path):
    sizes = "--config.mesh.fsdp=32", "--config.mesh.tensor=2"
    result = run(tmp_path, "--topology=v5e:8x8", "--json", *sizes)
    assert result.returncode == 0, result.stderr
    assert "engine   32 replicas, each" in result.stderr  # of all hosts: four chips a host, two for each


@needs_libtpu
def test_two_slices_have_a_copy_each(tmp_path):
    sizes = "--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"
    result = run(tmp_path, "--topology=v5e:2x2", "--slices=2", "--json", *sizes)
    assert result.returncode == 0, result.stderr
    assert "2 x v5e:2x2, 8 devices" in result.stderr and "mesh slice 2 x data 1 x fsdp 2 x tensor 2" in result.stderr
    assert "between  slices: an update sums" in result.stderr
    assert [outcome["fits"] for outcome in json.loads(result.stdout)] == [True] * 3
    refused = run(tmp_path, "--topology=v5e:2x2", "--slices=2", "--config.mesh.fsdp=4", "--config.mesh.tensor=2")
    assert refused.returncode == cli.BAD_INPUT and "Make mesh.data a multiple of 2." in refused.stderr


def test_a_host_with_gpus_has_no_slices(tmp_path):
    refused = run(tmp_path, "--topology=h100:8", "--slices=2", "--config.mesh.fsdp=8")
    assert refused.returncode == cli.BAD_INPUT
    assert "--slices=2 counts slices of TPUs, and --topology=h100:8 is a host with GPUs." in refused.stderr


@needs_libtpu
def test_a_slice_that_is_too_small(tmp_path):
    result = run(tmp_path, "--topology=v5e:1x1", "--config.sampling.pages=2000000", "--json")
    assert result.returncode == cli.STOPPED, result.stderr
    assert "nothing is compiled" in result.stderr and "GiB over" in result.stderr
    assert "change   sampling.slots = " in result.stderr and "mesh.fsdp = 2" in result.stderr
    (outcome,) = json.loads(result.stdout)
    assert not outcome["fits"] and outcome["hbm_peak_bytes"] > outcome["hbm_limit_bytes"]


# Published runs: 1,024 + 2,048 tokens, 512 prompts, N_max 32; the commands of docs/scale.md.
SLICES = [
    ("v5e:2x4", "qwen_1p5b", {}),
    ("v5e:4x4", "qwen_1p5b", {"mesh.fsdp": 8, "learning.micro_batches": 16}),
    ("v5e:4x4", "llama_3b", {
        "mesh.fsdp": 8, "mesh.tensor": 2, "learning.micro_batches": 32, "sampling.slots": 16,
    }),
    ("v5e:4x4", "qwen3_4b", {"mesh.fsdp": 4, "learning.micro_batches": 32, "sampling.slots": 32}),
    ("v5e:8x8", "qwen_7b", {"mesh.fsdp": 16, "learning.micro_batches": 8}),
    ("v5p:2x2x2", "qwen_7b", {"mesh.fsdp": 2}),
]  # fmt: skip


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology, name, changes", SLICES, ids=lambda x: x if isinstance(x, str) else "")
def test_published_runs_fit(tmp_path, topology, name, changes):
    file = tmp_path / "results.json"
    arguments = [f"--config=configs/{name}.py", f"--topology={topology}", f"--json={file}"]
    arguments += [f"--config.{key}={value}" for key, value in {"evaluation.benchmarks": "()", **changes}.items()]
    result = run_python("-m", "reinforce_ada_jax.compile_check", *arguments, env=environment(""))
    assert result.returncode == 0, result.stdout + result.stderr
    outcomes = json.loads(file.read_text())
    assert all(outcome["fits"] for outcome in outcomes)


@needs_libtpu
@pytest.mark.parametrize("arguments, parts", [
    (["--topology=v5e:3x7"], ["--topology=v5e:3x7", "not divisible"]),
    (["--topology=v5e:2x2", "--config.mesh.fsdp=8"], ["there are 4 devices", "mesh.fsdp"]),
    (["--topology=v5e:2x2", "--config.mesh.tensor=4"], ["kv_heads", "mesh.tensor = 4"]),
    (["--topology=v5e:2x2", "--config.mesh.tensor=2"], ["has 4 devices", "only 2", "--config.mesh.fsdp=2"]),
])  # fmt: skip
def test_a_slice_that_cannot_be(tmp_path, arguments, parts):
    result = run(tmp_path, *arguments)
    assert result.returncode == cli.BAD_INPUT and result.stdout == ""
    for part in parts:
        assert part in result.stderr

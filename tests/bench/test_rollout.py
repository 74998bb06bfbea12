"""`bench.rollout` and `bench.adaptive` on toy models: refusals, counts, and that both engines do the same work."""

import dataclasses
import json
import math
import sys

import jax
import numpy as np
import pytest
from absl import flags

from bench import adaptive, command_line, engines, models, options, rollout, workloads
from bench.simulation import Cost, SimulatedEngine
from reinforce_ada_jax.config import CollectionConfig
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.sampling.rollouts import Rollouts
from reinforce_ada_jax.types import Prompt, Request
from tests.running import refused

ARCHITECTURE = models.smallest()
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [7]]
LENGTHS = [[1, 9], [4, 4], [12, 2]]  # 32 tokens in all
REFERENCE = [2, 7, 1, 8, 2, 8]

# A baseline that reads what it is to do, says it took 50 s, and gives the log-probabilities that it finds in a file.
FAKE = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["command"] == "load":
        answer = {"fake": request["settings"]["dtype"], "responses": sum(map(len, request["lengths"]))}
    elif request["command"] == "run":
        answer = {"seconds": 50.0}
    elif request["command"] == "score":
        answer = {"logprobs": json.load(open(sys.argv[0] + ".json"))}
    else:
        break
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model's folder and its weights."""
    params = transformer.init(ARCHITECTURE, jax.random.key(0))
    folder = tmp_path_factory.mktemp("models") / "model"
    huggingface.save(folder, ARCHITECTURE, params)
    return folder, params


@pytest.fixture
def workload(tmp_path, model):
    """A workload file of that model."""
    logp = models.logprobs(ARCHITECTURE, model[1], np.array(REFERENCE))
    content = dict(prompts=PROMPTS, samples=2, temperature=1.0, lengths=LENGTHS)
    file = tmp_path / "workload.json"
    file.write_text(json.dumps(content | {"reference": {"tokens": REFERENCE, "logp": logp.tolist()}}))
    return file


def parsed(*arguments: str) -> flags.FlagValues:
    """The flags of a command."""
    values = options.define_flags(flags.FlagValues())
    values(["bench", *arguments])
    return values


def run(*arguments: str) -> dict:
    """The numbers of a command such as `rollout --slots=4`."""
    name, *flags_given = arguments
    return command_line.measured({"rollout": rollout, "adaptive": adaptive}[name].run, parsed(*flags_given))


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_rollout(tmp_path, model, workload, capsys):
    """The report counts useful tokens, and its rate is that of the median time."""
    out = tmp_path / "out.json"
    flag = [f"--model={model[0]}", f"--workload={workload}", "--slots=2", "--window=4", "--page_size=4", "--repeat=2"]
    values = parsed(*flag, f"--json={out}")
    command_line.report("rollout", command_line.measured(rollout.run, values), values.json)
    result = json.loads(out.read_text())
    assert result["useful_tokens"] == 32
    assert len(result["seconds"]) == 2
    assert result["useful_tokens_per_s"] == pytest.approx(32 / np.median(result["seconds"]))
    assert result["recompilations"] == 0 and 2 <= result["compile_count"] and result["compile_seconds"] > 0
    assert result["prefills"] == 3 and result["peak_memory_bytes"] > 1e6
    assert result["logprob_gap"]["workload"] < 1
    assert (result["slots"], result["window"], result["page_size"], result["dtype"]) == (2, 4, 4, "float32")
    assert result["platform"] == "cpu" and result["jax"] == jax.__version__
    assert result["model"]["num_parameters"] == ARCHITECTURE.num_parameters
    assert {"warmup_s", "host_between_windows_s", "attention", "device"} <= result.keys()
    shown = capsys.readouterr()
    assert "useful_tokens_per_s" in shown.out and "2/2 ours: " in shown.err
    # The simulation of the same flags has the same schedule.
    simulated = run("rollout", "--simulate", *flag[1:])
    assert simulated["slot_utilisation"] == result["slot_utilisation"]
    assert 1000 * simulated["dispatches"] / 32 == result["dispatches_per_1000_tokens"]


def test_another_model_is_refused(model, workload, capsys):
    reference = json.loads(workload.read_text())["reference"]
    reference["logp"][3] += 2e-5
    change(workload, reference=reference)
    shown = refused(capsys, run, "rollout", f"--model={model[0]}", f"--workload={workload}")
    assert "in units of rounding, and those of the workload differ by" in shown.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lengths=[[1, 9], [4, 4]]), "lengths must be 2 whole numbers above 0 for each of the 3 prompts"),
        (dict(lengths=[[1, 0], [4, 4], [2, 2]]), "whole numbers above 0"),
        (dict(reference=None), "no workload (TypeError"),
    ],
)
def test_a_malformed_workload_is_refused(workload, changes, message):
    change(workload, **changes)
    with pytest.raises(ValueError) as error:
        workloads.load(workload)
    assert message in str(error.value)


def test_a_response_of_another_length_ends_the_benchmark(workload):
    content = workloads.load(workload)
    options = engines.engine_options(content, parsed("--slots=2", "--window=4", "--page_size=4", "--attention=jnp"))
    pools = engines.draw(Rollouts(SimulatedEngine(options, Cost(), content.lengths_by_draw())), {}, content)
    assert engines.check_lengths(pools, content) == 32
    longer = content.lengths + np.array([[0, 1], [0, 0], [0, 0]])
    with pytest.raises(RuntimeError, match="draw 1 of prompt 0 has 9 tokens, 10 are prescribed"):
        engines.check_lengths(pools, dataclasses.replace(content, lengths=longer))


@pytest.fixture
def fake(tmp_path, monkeypatch, model):
    """The fake baseline's file; its log-probabilities are right."""
    file = tmp_path / "fake.py"
    file.write_text(FAKE)
    rows = [np.array(prompt) for prompt in PROMPTS]
    logprobs = [models.logprobs(ARCHITECTURE, model[1], row).tolist() for row in rows if len(row) > 1]
    (tmp_path / "fake.py.json").write_text(json.dumps([*logprobs, []]))
    monkeypatch.setitem(rollout.BASELINES, "fake", file)
    return file


def test_against_a_baseline(model, workload, fake, capsys):
    """Another program's time and log-probabilities are compared with ours."""
    change(workload, prompts=[*PROMPTS[:2], [7, 7]])
    row = models.logprobs(ARCHITECTURE, model[1], np.array([7, 7])).tolist()
    scores = fake.with_name("fake.py.json")
    scores.write_text(json.dumps([*json.loads(scores.read_text())[:2], row]))
    flag = (f"--model={model[0]}", f"--workload={workload}", "--slots=2", "--window=4", "--page_size=4", "--repeat=3")
    against = ("--against=fake", f"--against_python={sys.executable}")
    result = run("rollout", *flag, *against)
    assert result["against"]["seconds"] == [50.0] * 3
    assert result["against"]["useful_tokens_per_s"] == 32 / 50
    assert result["ratio"] == pytest.approx(result["useful_tokens_per_s"] / (32 / 50))
    assert result["against"]["responses"] == 6 and result["against"]["fake"] == "float32"
    assert result["logprob_gap"]["fake"] < 1
    # Another model there: no comparison.
    scores.write_text(json.dumps([[-1.0] * 2, [-1.0] * 5, [-1.0]]))
    assert "in units of rounding, and those of fake differ by" in refused(capsys, run, "rollout", *flag, *against).err


def test_a_baseline_that_cannot_start_is_named(model, workload, fake, capsys):
    flag = ("rollout", f"--model={model[0]}", f"--workload={workload}", "--against=fake")
    assert "/nowhere/python does not start" in refused(capsys, run, *flag, "--against_python=/nowhere/python").err
    fake.write_text("import transformers_of_another_environment")
    assert "fake ended with exit code 1" in refused(capsys, run, *flag, f"--against_python={sys.executable}").err
    assert "not one of transformers, llama.cpp, fake" in refused(capsys, run, *flag[:3], "--against=nobody").err


def test_a_baseline_refuses_a_gguf_file_before_it_starts(tmp_path, workload):
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    values = parsed("--against=transformers", "--against_python=/no", f"--model={gguf}")
    with pytest.raises(ValueError, match=r"needs a folder with \*\.safetensors, and .*model\.gguf is none"):
        rollout.start_baseline(values, workloads.load(workload))


def test_a_shaped_model_is_made_once(tmp_path, workload, capsys):
    folder = tmp_path / "shaped"
    # It is there for a baseline before that starts, which fails here.
    flag = ("rollout", f"--model={folder}", f"--workload={workload}", "--against=transformers", "--against_python=/no")
    for _ in range(2):
        assert "--against_python=/no does not start" in refused(capsys, run, *flag, "--shape=16x1").err
    made = huggingface.read_config(folder)
    assert (made.hidden_size, made.num_layers, made.num_kv_heads, made.vocab_size) == (16, 1, 4, 8192)
    assert "another model than --shape=32x1" in refused(capsys, run, *flag, "--shape=32x1").err
    assert "HIDDEN a multiple of 16" in refused(capsys, run, *flag, "--shape=24x1").err


@pytest.mark.parametrize(("requests", "samples", "replicas"), [(1, 2, 1), (2, 1, 2)])
def test_a_synthetic_workload_reports_the_bandwidth_that_it_needs(tmp_path, requests, samples, replicas):
    huggingface.save(tmp_path / "model", ARCHITECTURE, transformer.init(ARCHITECTURE, jax.random.key(0)))
    (tmp_path / "model" / "model.safetensors").unlink()  # a config.json alone will do
    result = run(
        "rollout", f"--model={tmp_path / 'model'}", f"--requests={requests}", "--prompt_tokens=6",
        f"--samples={samples}", f"--replicas={replicas}", "--response_tokens=12", "--slots=2", "--window=4",
        "--page_size=4", "--repeat=1", "--copy_mb=1", "--drafts=0",
    )  # fmt: skip
    assert result["useful_tokens"] == 24 and result["slot_utilisation"] == 1.0
    assert (result["drafts"], result["draft_tokens"]) == (0, 0) and result["processor_seconds"][0] > 0
    # 12 turns read all weights, in each replica; a response sees 6 to 17 tokens of 2 * 8 numbers each. Float32.
    needed = 4 * (12 * replicas * ARCHITECTURE.num_parameters + 2 * 138 * 16)
    assert result["bandwidth_fraction"] == pytest.approx(needed / result["seconds"][0] / result["copy_bytes_per_s"])


def test_a_plan_follows_from_a_distribution_of_lengths():
    # 64 prompts of 50 tokens, the last of which is not prefilled, in chunks of 128.
    flag = ("rollout", "--simulate", "--model=Qwen2.5-1.5B", "--requests=64", "--prompt_tokens=50", "--samples=4")
    result = run(*flag, "--lengths=100,0.5,16,400", "--slots=64", "--cost=decode_step=0,prefill=1")
    assert result["responses"] == 256 and result["seconds"] == math.ceil(64 * 49 / 128)
    assert 0.5 < result["slot_utilisation"] < 1


def test_an_embedding_of_its_own_is_not_read():
    # Qwen2.5-7B: 7.6e9 weights, of which 152064 * 3584 are the embedding, not read where the head is another matrix.
    cost = engines.simulation_cost(parsed("--model=Qwen2.5-7B", "--dtype=bfloat16", "--bandwidth=1e12"))
    assert cost.decode_step == pytest.approx(2 * (7_615_616_512 - 152064 * 3584) / 1e12)
    assert cost.cached_token == pytest.approx(2 * 2 * 28 * 4 * 128 / 1e12)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"strategy": "grpo", "group_size": 64}, 64),  # more than 4 rounds of 8
        ({"strategy": "ngu", "group_size": 4, "max_draws": 0}, 32),  # no limit, which a script needs
    ],
)
def test_an_adaptive_workload_of_any_strategy(settings, most):
    workload = workloads.adaptive(CollectionConfig(**settings), 64, workloads.constant(2), vocab_size=9)
    options = engines.engine_options(workload, parsed("--slots=8", "--simulate"))
    simulated = adaptive.simulate(workload, options, Cost(decode_step=1.0), barrier=False, limit=None)
    assert workload.lengths.shape == (64, most) and simulated["responses"] >= 64 * settings["group_size"]


@pytest.mark.slow  # test_rollout compares an engine with its simulation, and the test below has a barrier
def test_adaptive():
    """A simulation has the counts of the rollout that it stands for."""
    flag = ("adaptive", "--slots=8", "--prompts=12", "--scale=0.01", "--window=4", "--barrier")
    result, simulated = run(*flag), run(*flag, "--simulate")
    for name in ("useful_tokens", "responses", "slot_utilisation", "turns", "windows", "dispatches"):
        assert result[name] == simulated[name] and result["barrier"][name] == simulated["barrier"][name]
    assert result["barrier"]["slot_utilisation"] < result["slot_utilisation"]
    assert result["barrier_ratio"] == pytest.approx(result["barrier"]["seconds"] / result["seconds"])


# The last sizes are those of docs/performance.md, which take ten times as long.
SIZES = [("--slots=32", "--prompts=64", "--scale=0.1"), pytest.param(("--slots=256",), marks=pytest.mark.slow)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_barrier_leaves_slots_idle(sizes):
    # 0.948 against 0.828 behind a barrier, and 0.936 against 0.794: the order of the queue is worth this much.
    result = run("adaptive", "--simulate", "--barrier", *sizes)
    assert result["slot_utilisation"] > 0.92
    assert result["barrier"]["slot_utilisation"] < (0.82 if "--slots=256" in sizes else 0.84)
    assert 1.1 < result["barrier_ratio"] < 1.3


FEW = ("--prompts=96", "--slots=12", "--scale=0.1")


@pytest.mark.slow  # the test above has such a simulation; test_speculation.py has what is drawn early
@pytest.mark.parametrize(("sizes", "busy", "idle"), [(FEW, 0.88, 0.74), ((), 0.95, 0.87)], ids=str)
def test_single_draws_keep_the_slots_busy_by_speculation(sizes, busy, idle):
    # 0.896, and 0.7397 without; 64 slots: 0.972 and 0.822. The pools are the same.
    flag = ("adaptive", "--simulate", "--samples_per_round=1", "--max_rounds=32", *sizes)
    fast, slow = run(*flag), run(*flag, "--nospeculative")
    assert fast["useful_share"] > busy and slow["useful_share"] < idle
    assert fast["useful_tokens"] == slow["useful_tokens"] and fast["prefills"] == (96 if sizes else 512)
    assert 0 < fast["discarded_tokens"] < 0.02 * fast["useful_tokens"] and slow["discarded_tokens"] == 0


def test_hosts_in_step_wait_for_the_one_with_the_most_work(tmp_path):
    (tmp_path / "lengths").write_text("8\n")
    # 8 draws of 8 tokens for each prompt in 8 slots: 8 steps of a second. Three prompts on two hosts are two and one.
    flag = ("adaptive", "--simulate", "--hosts=2", "--slots=8", "--window=8", "--max_rounds=1", "--cost=decode_step=1")
    flag += (f"--lengths={tmp_path / 'lengths'}",)
    equal, unequal = (run(*flag, f"--prompts={prompts}") for prompts in (2, 3))
    assert (equal["seconds"], equal["waited_share"], equal["responses"]) == (8, 0, 16)
    assert (unequal["seconds"], unequal["responses"]) == (16, 24)
    # One host decodes for 16 of 16 seconds, the other for 8 of them; the same if they were not in step.
    assert (unequal["waited_share"], unequal["unequal_work_share"], unequal["in_step_ratio"]) == (0.25, 0.25, 1)


def test_lengths(tmp_path):
    """Lengths come from a distribution, from a file, or from the samples of a run."""
    random = np.random.default_rng(0)
    drawn = workloads.parse_lengths("500,0.8,16,2048")(random, (10_000,))
    assert drawn.min() >= 16 and drawn.max() == 2048 and np.median(drawn) == pytest.approx(500, rel=0.05)
    file = tmp_path / "lengths.txt"
    file.write_text("3\n5\n")
    assert set(workloads.parse_lengths(str(file))(random, (100,))) == {3, 5}
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "000001.jsonl").write_text('{"tokens": 7}\n{"tokens": 9}\n')
    assert set(workloads.parse_lengths(str(tmp_path))(random, (100,))) == {7, 9}
    with pytest.raises(ValueError, match="neither four numbers"):
        workloads.parse_lengths("500,0.8")
    file.write_text("")
    with pytest.raises(ValueError, match="no response lengths"):
        workloads.parse_lengths(str(file))


def test_costs_by_name(capsys):
    """A cost that is named scales the simulated time, and an unknown one is refused."""
    flag = ("adaptive", "--simulate", "--slots=8", "--prompts=8", "--scale=0.01")
    plain, twice = run(*flag, "--cost=decode_step=1"), run(*flag, "--cost=decode_step=2")
    assert plain["seconds"] == plain["turns"] and twice["seconds"] == 2 * plain["turns"]
    shown = refused(capsys, run, *flag, "--cost=decode_steps=1")
    assert "no 'decode_steps'; it has decode_step, cached_token" in shown.err


def test_a_draw_knows_its_length(workload):
    content = workloads.load(workload)
    assert content.length(Request(Prompt("2", "", "", np.zeros(1, np.int32)), 1)) == 2
    assert content.lengths_by_draw()["0", 1] == 9

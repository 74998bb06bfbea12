"""`bench.update` on a toy model: what is counted and compared, and that another update is refused."""

import json
import sys

import jax
import numpy as np
import pytest
from absl import flags

from bench import command_line, models, options, update, workloads
from bench.json_subprocess import JsonSubprocess
from reinforce_ada_jax.policy import huggingface, transformer
from tests.running import refused

pytestmark = pytest.mark.slow  # three processes that measure
ARCHITECTURE = models.smallest()
SIZES = ("--rows=6", "--micro_batches=2", "--prompt_tokens=3", "--response_tokens=13", "--repeat=2", "--layers=3")

# A baseline that answers for every update what it finds in a file; its log-probabilities are `shift` from ours.
FAKE = """
import json, sys
content = json.load(open(sys.argv[0] + ".json"))
runs = iter(content["runs"])
for line in sys.stdin:
    request = json.loads(line)
    answer = {}
    if request["command"] == "load":
        answer = {"device": "fake", "given": request["dtype"], "cut": request["micro_batches"]}
    elif request["command"] == "score":
        answer = {"logprobs": content["logprobs"]}
    elif request["command"] == "run":
        answer = next(runs)
    print(json.dumps(answer), flush=True)
"""


def run(*arguments: str) -> dict:
    """The numbers of `update` with flags such as --rows=4."""
    values = options.define_flags(flags.FlagValues())
    values(["bench", *arguments])
    return command_line.measured(update.run, values)


class Kept(JsonSubprocess):
    """A process that loads one learner after the other: a measurement does not end it."""

    def close(self):
        pass

    def end(self):
        super().close()


@pytest.fixture(scope="module")
def start():
    """Starts processes; ours are kept, one for all rows and one for fewer."""
    worker = [sys.executable, "-m", "bench.update_worker"]
    kept = {name: Kept(name, worker) for name in ("ours", "packed")}
    kept[update.LEFT_OUT] = kept["packed"]
    yield lambda name, command, **environment: kept.get(name) or JsonSubprocess(name, command, **environment)
    for process in (kept["ours"], kept["packed"]):
        process.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory, start):
    """A random model's folder, its weights, and what was measured of it, packed and not."""
    params = transformer.init(ARCHITECTURE, jax.random.key(0))
    folder = tmp_path_factory.mktemp("models") / "model"
    huggingface.save(folder, ARCHITECTURE, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "JsonSubprocess", start)
        result = run(f"--model={folder}", *SIZES, "--lengths=2,0.5,1,13", "--pack=4")
    return folder, params, result


@pytest.fixture
def cheap(monkeypatch, start, model):
    """Measures the host's time not again."""
    monkeypatch.setattr(update, "JsonSubprocess", start)
    monkeypatch.setattr(update, "host_time", lambda layers: model[2]["host"])


def examples() -> list[dict]:
    """Those of the fixture."""
    sizes = update.Sizes(rows=6, prompt_tokens=3, response_tokens=13, micro_batches=2)
    return update.make_examples(sizes, workloads.parse_lengths("2,0.5,1,13"), ARCHITECTURE.vocab_size)


def scores(params) -> list[list[float]]:
    """Log-probabilities of the examples' responses, by the plain forward pass."""
    found = []
    for example in examples():
        tokens = np.array(example["prompt"] + example["response"])
        found.append(models.logprobs(ARCHITECTURE, params, tokens)[len(example["prompt"]) - 1 :].tolist())
    return found


def test_the_report(model):
    """The report has tokens, times, losses and bytes of the update."""
    _, _, result = model
    tokens = sum(len(example["prompt"]) + len(example["response"]) for example in examples())
    assert result["tokens"] == tokens
    assert len(result["seconds"]) == 2 and len(result["losses"]) == 3
    assert result["tokens_per_s"] == pytest.approx(tokens / np.median(result["seconds"]))
    assert result["mfu"] is None and result["platform"] == "cpu" and result["micro_rows"] == 3
    assert result["weight_bytes"] == 4 * ARCHITECTURE.num_parameters
    assert 0 < result["host_s"] < result["seconds_per_update"] and result["extra_bytes"] > 0
    assert result["model"]["num_parameters"] == ARCHITECTURE.num_parameters
    assert result["host"]["layers"] == 3 and result["host"]["host_cpu_s"] > 0
    assert result["host"]["host_s"] < result["host"]["whole_update_s"]
    # Sums 6 N a token and 12 L N H T a token of a sequence of T tokens: one layer, two heads of 8.
    lengths = [len(example["prompt"]) + len(example["response"]) for example in examples()]
    needed = sum(6 * ARCHITECTURE.num_parameters * t + 12 * 2 * 8 * t**2 for t in lengths)
    assert result["necessary_flops"] == pytest.approx(needed)


def test_packed_rows_are_fewer_and_mean_the_same(model):
    _, _, result = model
    packed = result["packed"]
    assert result["rows"] == 6 and packed["rows"] < 6
    assert packed["losses"] == pytest.approx(result["losses"], rel=1e-5)
    assert packed["gaps"]["grad_norm"] < 1e-5
    assert result["losses"][0] != result["losses"][1]  # an update changes something
    ratio = result["seconds_per_update"] / packed["seconds_per_update"]
    assert result["packing_speedup"] == pytest.approx(ratio)


@pytest.mark.usefixtures("cheap")
def test_responses_without_advantage_are_left_out(model):
    # Four of six: the two others fill one of two micro-batches of three, with one of the four.
    result = run(f"--model={model[0]}", *SIZES, "--zero_rows=0.67")
    less = result["left_out"]
    assert (result["rows"], less["rows"]) == (6, 3)
    assert less["losses"] == pytest.approx(result["losses"], rel=1e-5)
    ratio = less["seconds_per_update"] / result["seconds_per_update"]
    assert result["left_out_time_ratio"] == pytest.approx(ratio)


@pytest.fixture
def fake(tmp_path, monkeypatch, model, cheap):
    """Puts the fake baseline in place: fake(runs, shift) with its updates, and how far its scores are off."""

    def put(runs, shift=0.0):
        file = tmp_path / "fake.py"
        file.write_text(FAKE)
        logprobs = [[logprob + shift for logprob in row] for row in scores(model[1])]
        (tmp_path / "fake.py.json").write_text(json.dumps({"runs": runs, "logprobs": logprobs}))
        monkeypatch.setitem(update.BASELINES, "fake", file)
        return (f"--model={model[0]}", *SIZES, "--lengths=2,0.5,1,13", "--against=fake",
                f"--against_python={sys.executable}")  # fmt: skip

    return put


def answers(result, **changes) -> list[dict]:
    """The updates of a baseline that gets what ours got."""
    common = {"seconds": 50.0, "cpu_seconds": 60.0, "extra_bytes": 10**12, "grad_norm": result["grad_norm"]}
    return [common | {"loss": loss} | changes for loss in result["losses"]]


def test_beside_a_baseline(fake, model):
    """Another program's loss and log-probabilities are compared with ours, in time and memory."""
    result = run(*fake(answers(model[2])))
    theirs = result["against"]
    assert (theirs["given"], theirs["cut"], theirs["seconds_per_update"]) == ("float32", 2, 50.0)
    assert result["gaps"]["loss"] < 1e-6 and result["gaps"]["logprob"] < 1e-5 and result["gaps"]["logprob_units"] < 2
    assert result["time_ratio"] == pytest.approx(result["seconds_per_update"] / 50)
    assert result["memory_ratio"] == pytest.approx(result["extra_bytes"] / 1e12)


@pytest.mark.parametrize(
    ("changes", "shift", "message"),
    [
        ({}, 2e-5, "our log-probabilities, in units of rounding, and those of fake differ by"),
        ({"loss": 1.0}, 0.0, "our values of loss and those of fake differ by"),
        pytest.param(
            {"grad_norm": 1.0}, 0.0, "our values of grad_norm and those of fake differ by", marks=pytest.mark.slow
        ),
    ],
)
def test_another_update_is_refused(fake, model, capsys, changes, shift, message):
    assert message in refused(capsys, run, *fake(answers(model[2], **changes), shift)).err


def test_losses_are_compared_in_sizes_of_their_terms(fake, model, capsys):
    """Terms of 0.4 and 0.6 of both signs nearly cancel; what rounding changes is a share of them, not of their sum."""

    def off_by(difference: float) -> list[dict]:
        result = model[2] | {"losses": [loss + difference for loss in model[2]["losses"]]}
        return answers(result)

    run(*fake(off_by(0.4 * 0.8e-5)))
    assert "our values of loss and those of fake differ by" in refused(capsys, run, *fake(off_by(0.6 * 2e-5))).err


def test_what_is_refused_before_anything_starts(model, capsys):
    flag = (f"--model={model[0]}", "--rows=6")
    for more, message in (
        (("--micro_batches=4",), "--rows=6 can't be cut into --micro_batches=4"),
        (("--micro_batches=2", "--against=nobody"), "not one of transformers"),
        (("--micro_batches=2", "--lengths=9,0.1,9,9", "--response_tokens=5"), "responses of up to 9 tokens"),
    ):
        assert message in refused(capsys, run, *flag, *more).err


def test_peak_of_a_known_device(model):
    runs = [{"seconds": 2.0, "cpu_seconds": 1.0, "extra_bytes": 1, "loss": 0.5, "grad_norm": 1.0}] * 3
    found = update._summary(runs, 10, 989e12, "NVIDIA H100 80GB HBM3")
    assert found["mfu"] == pytest.approx(0.5) and found["tokens_per_s"] == 5

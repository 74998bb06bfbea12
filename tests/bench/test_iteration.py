"""`bench.iteration`: that phases add up, that variants do the same work, and that a script decides made-up runs."""

import sys

import numpy as np
import pytest

from bench import iteration, models, workloads
from reinforce_ada_jax.training.components import build, model_folder
from reinforce_ada_jax.types import Prompt, Request
from tests.running import tiny

SMALL = {
    "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 2, "collection.samples_per_round": 4,
    "collection.max_rounds": 2, "sampling.slots": 8, "sampling.window": 4,
}  # fmt: skip
ONE_UPDATE = SMALL | {
    "collection.strategy": "grpo", "collection.group_size": 4, "sampling.max_response_tokens": 4,
    "learning.prompts_per_update": 4,
}  # fmt: skip
LENGTHS = workloads.parse_lengths("4,0.5,2,8")
EQUAL = workloads.parse_lengths("4,0.0001,4,4")


@pytest.fixture(scope="module")
def result():
    """Two timed iterations with and without the barrier, of a made-up model."""
    architecture = models.shaped("16x1")
    return iteration.measure(
        tiny(**SMALL), variants=("rounds", "barrier"), repeat=2, lengths=LENGTHS, architecture=architecture
    )


@pytest.mark.slow
def test_phases_add_up(result):
    for name in ("rounds", "barrier"):
        one = result[name]
        assert one["iterations"] == 2 and len(one["all_seconds"]) == 3
        assert one["seconds"] == pytest.approx(np.median(one["all_seconds"][1:]))
        assert min(one[f"{phase}_s"] for phase in iteration.PHASES) > 0
        parts = sum(one[f"{phase}_s"] for phase in (*iteration.PHASES, "other"))
        assert parts == pytest.approx(one["seconds"], rel=0.5)  # medians of parts, beside a median of wholes
        assert 0 < one["outside_device_share"] < 1
    assert result["scripted"] and result["platform"] == "cpu" and result["model"]["hidden_size"] == 16


@pytest.mark.slow
def test_a_barrier_does_the_same_work(result):
    rounds, barrier = result["rounds"], result["barrier"]
    for name in ("tokens", "responses", "updates"):
        assert rounds[name] == barrier[name]
    assert rounds["updates"] == 2 and rounds["responses"] >= 4 * 4
    assert result["barrier_ratio"] == pytest.approx(rounds["tokens_per_s"] / barrier["tokens_per_s"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "architecture"), [(ONE_UPDATE, models.shaped("16x1")), (SMALL, None)], ids=["made-up", "packaged"]
)
def test_one_iteration_by_its_phases(settings, architecture):
    config = tiny(**settings)
    measured = iteration.measure(config, variants=("overlap",), repeat=1, lengths=LENGTHS, architecture=architecture)
    found = measured["overlap"]
    parts = sum(found[f"{phase}_s"] for phase in (*iteration.PHASES, "other"))
    assert parts == pytest.approx(found["seconds"])
    assert config.collection.overlap == "none"  # what a variant sets is its own


def test_a_script_is_a_function_of_the_address():
    script = iteration.Script(LENGTHS, limit=6, seed=3)
    prompts = [Prompt(str(index), "", "", np.zeros(1, np.int32)) for index in range(300)]
    lengths = [[script.length(Request(prompt, draw)) for draw in range(4)] for prompt in prompts]
    assert lengths == [[script.length(Request(prompt, draw, prefetch=True)) for draw in range(4)] for prompt in prompts]
    assert np.min(lengths) == 2 and np.max(lengths) == 6 and len(set(map(tuple, lengths))) > 50
    correct = [[script.verdict(prompt, draw).correct for draw in range(8)] for prompt in prompts]
    # Beta(0.6, 1.2) has a mean of 1/3, and prompts differ by more than chance: some are always wrong, some right.
    rates = np.mean(correct, axis=1)
    assert rates.mean() == pytest.approx(1 / 3, abs=0.06)
    assert (rates == 0).mean() > 0.15 and (rates == 1).mean() > 0.03


def test_what_is_refused():
    with pytest.raises(ValueError, match="must name some of rounds, barrier, overlap"):
        iteration.measure(tiny(), variants=("rounds", "steps"), lengths=LENGTHS)
    with pytest.raises(ValueError, match="not a folder"):
        config = tiny(**{"model.path": "/nowhere"})
        iteration.measure(config, lengths=LENGTHS, architecture=models.smallest())


# As TRL would: it must get one request for each iteration, and all prompts and rewards before the first.
FAKE = """
import sys
sys.path.insert(0, {baselines!r})
from json_worker import serve

class Fake:
    def __init__(self, model, prompts, rewards, prompts_per_iteration, response_tokens, micro_batches):
        self.given = dict(prompts=prompts, rewards=rewards, micro_batches=micro_batches)
        self.tokens = prompts_per_iteration * len(rewards[0]) * response_tokens

    def describe(self):
        return self.given

    def run(self):
        return dict(seconds=2.0, cpu_seconds=4.0, tokens={tokens} or self.tokens)

serve(Fake)
"""


def measured_beside_fake(tmp_path, monkeypatch, tokens=0, lengths=EQUAL, **changes):
    """An iteration beside one of the fake, which reports `tokens` tokens, or with 0 as many as it had to draw."""
    file = tmp_path / "fake.py"
    file.write_text(FAKE.format(baselines=str(iteration.BASELINES["trl"].parent), tokens=tokens))
    monkeypatch.setitem(iteration.BASELINES, "trl", file)
    return iteration.measure(
        tiny(**ONE_UPDATE | changes), variants=("rounds",), repeat=1, lengths=lengths,
        architecture=models.shaped("16x1"), against=iteration.Baseline("trl", sys.executable, 2),
    )  # fmt: skip


@pytest.mark.slow
def test_a_baseline_has_the_same_prompts_and_rewards(tmp_path, monkeypatch):
    found = measured_beside_fake(tmp_path, monkeypatch)
    ours, theirs = found["rounds"], found["trl"]
    assert found["time_ratio"] == pytest.approx(ours["seconds"] / 2.0)
    assert found["cpu_time_ratio"] == pytest.approx(ours["cpu_seconds"] / 4.0)
    assert theirs["micro_batches"] == 2 and len(theirs["prompts"]) == len(set(theirs["prompts"])) == 2 * 4
    config = tiny(**ONE_UPDATE)
    script = iteration.Script(EQUAL, 4, config.seed)
    assert np.shape(theirs["rewards"]) == (8, 4) and theirs["rewards"][0] == [
        script.verdict(prompt_of(config, theirs["prompts"][0]), draw).reward for draw in range(4)
    ]


@pytest.mark.slow  # an iteration of ours and one of a baseline
def test_a_baseline_that_does_other_work_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="64 tokens, and 100 of trl: other work"):
        measured_beside_fake(tmp_path, monkeypatch, tokens=100)
    with pytest.raises(ValueError, match="needs random weights whose responses all have"):
        measured_beside_fake(tmp_path, monkeypatch, lengths=LENGTHS)
    with pytest.raises(ValueError, match="does GRPO with one update an iteration"):
        measured_beside_fake(tmp_path, monkeypatch, **{"learning.prompts_per_update": 2})


def prompt_of(config, text):
    """Returns the prompt with a text."""
    components = build(config, model_folder(config.model.path))
    prompts = components.prompts(config.data.prompts, config)
    return next(prompt for prompt in prompts if components.tokenizer.decode(prompt.tokens) == text)

"""Runs whose responses are trajectories: the built-in model against an environment that lets it try again."""

import json
import shutil

import pytest

from reinforce_ada_jax.training import components as components_lib
from tests import forked
from tests.running import environment, killed_after, reproducible

# "=" and "." are the characters of the model's vocabulary that are no letters.
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
CLASS = """
import os, signal

class TryAgain:
    def __init__(self, rng):
        self.rng, self.tries = rng, 0

    def reset(self, problem):
        self.answer = problem["answer"]
        return [{"role": "user", "content": problem["problem"]}]

    def step(self, messages):
        self.tries += 1
        if messages[-1]["content"] == self.answer:
            return 1 / self.tries
        if self.tries == 3:
            return 0
        return [{"role": "user", "content": "." * int(self.rng.integers(1, 3)) + "="}]


class Broken(TryAgain):
    def step(self, messages):
        raise RuntimeError("no luck today")
"""
SETTINGS = {
    "iterations": 2, "evaluation.every": 2, "checkpoint.every": 1, "logging.tensorboard": False,
    "data.template": "chat", "data.system": "", "data.instruction": "", "data.max_prompt_tokens": 8,
    "evaluation.benchmarks": ("heldout.jsonl",), "evaluation.samples": 2, "evaluation.max_response_tokens": 24,
    "sampling.max_response_tokens": 24, "sampling.slots": 16, "sampling.check_invariants": True,
    "environment.max_turns": 3, "environment.max_turn_tokens": 8, "environment.timeout_s": 30.0,
    "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 4,
}  # fmt: skip
TRAIN = """
import json, sys
import reinforce_ada_jax as ada
from reinforce_ada_jax.data import cipher
from tests.running import tiny
settings, workdirs = json.loads(sys.argv[1])
for workdir in workdirs:
    ada.train(tiny(**settings), workdir)
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    shutil.copytree(components_lib.model_folder("package:cipher"), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "mine.py").write_text(CLASS)
    from reinforce_ada_jax.data import cipher  # noqa: PLC0415

    for name, split in {"prompts": "train", "heldout": "heldout"}.items():
        lines = [json.dumps(problem) + "\n" for problem in cipher.problems(split)[:8]]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return SETTINGS | {
        "model.path": str(folder / "model"), "data.prompts": str(folder / "prompts.jsonl"),
        "evaluation.benchmarks": (str(folder / "heldout.jsonl"),), "environment.path": f"{folder}/mine.py:TryAgain",
    }  # fmt: skip


def train(settings, *workdirs):
    return forked.run(["-c", TRAIN, json.dumps([settings, [str(workdir) for workdir in workdirs]])], environment())


def test_a_run_trains_on_trajectories_and_goes_on_after_a_kill(tmp_path, settings):
    done = train(settings, tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    metrics = reproducible(tmp_path / "whole")
    assert len(metrics) == 2
    for line in metrics:
        assert 1.0 < line["collection/turns_mean"] <= 3.0
        assert line["collection/environment_tokens"] > 0
        assert line["collection/verifier_failures"] == 0
        assert line["update/logprob_gap"] < 1e-4  # of whole trajectories, whose prompts the sampler prefilled by turns
    assert 0.0 <= metrics[-1]["evaluation/heldout/avg"] <= 1.0
    shown = (tmp_path / "whole" / "samples" / "000001.jsonl").read_text(encoding="utf-8").splitlines()
    assert any("\n[environment]\n" in json.loads(line)["response"] for line in shown)

    killed = forked.Forked(["-c", TRAIN, json.dumps([settings, [str(tmp_path / "killed")]])], environment())
    killed_after(killed, tmp_path / "killed" / "metrics.jsonl", 1)
    assert len(reproducible(tmp_path / "killed")) == 1
    done = train(settings, tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    assert reproducible(tmp_path / "killed") == metrics


def test_an_environment_that_fails_stops_the_run_with_its_traceback(tmp_path, settings):
    broken = settings | {"environment.path": settings["environment.path"].replace("TryAgain", "Broken")}
    done = train(broken, tmp_path / "run")
    assert done.returncode != 0
    assert "RuntimeError: no luck today" in done.stderr
    assert "could grade none of the" in done.stderr

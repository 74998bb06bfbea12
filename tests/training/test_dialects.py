"""Files of tests/data/dialects train the built-in model, unchanged."""

import json
import shutil

import pytest

from reinforce_ada_jax.training import components as components_lib
from tests import forked
from tests.running import ROOT, environment

DIALECTS = ROOT / "tests" / "data" / "dialects"
# Template of the prompts.
FILES = {
    "openai_chat.jsonl": "chat",
    "gsm8k.jsonl.gz": "plain",
    "own.jsonl": "plain",
    "trl_chat.jsonl": "chat",
    "trl_text.jsonl": "plain",
    "tunix_gsm8k.jsonl": "plain",
    "verl.jsonl": "chat",
    "openai_reinforcement.jsonl": "chat",
    "math.jsonl": "plain",
    "reinforce_ada.jsonl": "plain",
}
REWARD = """
import re

def letters(response, answer):
    "Above 0 for every response, so that a verdict of 0 is a failure."
    said = re.findall("[A-Za-z0-9+/]+", response)[-1:] or [""]
    return (1 + sum(map(str.__eq__, said[0], answer))) / (1 + max(len(said[0]), len(answer)))
"""
MESSAGES = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
# All runs in one process: most of a run's time is the start of Python and of JAX.
TRAIN = """
import json, sys
import reinforce_ada_jax as ada
from tests.running import tiny
settings, runs = json.loads(sys.argv[1])
for workdir, changes in runs.items():
    run = ada.train(tiny(**settings | {"evaluation.benchmarks": ()} | changes), workdir)
    print(json.dumps({name: run.metrics[0][name] for name in ("reward/pool", "collection/verifier_failures")}))
"""


def train(folder, names):
    """Returns the metrics of one iteration with each file."""
    shutil.copytree(components_lib.model_folder("package:cipher"), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(MESSAGES)
    settings = {
        "iterations": 1, "evaluation.every": 0, "checkpoint.every": 0, "logging.tensorboard": False,
        "model.path": str(folder / "model"), "data.max_prompt_tokens": 24, "reward.workers": 1,
        "reward.path": f"{folder}/rewards.py:letters", "sampling.slots": 32,
        "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 4,
    }  # fmt: skip
    runs = {}
    (folder / "rewards.py").write_text(REWARD)
    for name in names:
        runs[str(folder / name)] = {"data.prompts": str(DIALECTS / name), "data.template": FILES[name]}
    done = forked.run(["-c", TRAIN, json.dumps([settings, runs])], environment())
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    "names", [["openai_chat.jsonl", "gsm8k.jsonl.gz"], pytest.param(list(FILES), marks=pytest.mark.slow)], ids=len
)
def test_one_iteration(tmp_path, names):
    metrics = train(tmp_path, names)
    assert len(metrics) == len(names)
    for name, line in zip(names, metrics, strict=True):
        assert line["collection/verifier_failures"] == 0, name
        assert 0.0 < line["reward/pool"] < 1.0, name

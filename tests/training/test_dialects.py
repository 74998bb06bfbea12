"""Files of tests/data/dialects train the built-in model, unchanged, with rewards by the same conventions.

tests/data/test_dialects.py reads their rows, tests/rewards/test_dialects.py computes their rewards, and
test_reward_check.py trains with a reward of another program: those tests take no minutes.
"""

import json
import shutil

import pytest

from reinforce_ada_jax.training import components as components_lib
from tests import forked
from tests.running import ROOT, environment

DIALECTS = ROOT / "tests" / "data" / "dialects"
# File: template of its prompts, and function of rewards.py.
FILES = {
    "trl_chat.jsonl": ("chat", "trl"),
    "tunix_gsm8k.jsonl": ("plain", "tunix"),
    "verl.jsonl": ("chat", "compute_score"),
    "own.jsonl": ("plain", "own"),
    "trl_text.jsonl": ("plain", "trl_text"),
    "openai_reinforcement.jsonl": ("chat", "openai"),
    "openai_chat.jsonl": ("chat", "own"),
    "math.jsonl": ("plain", "own"),
    "reinforce_ada.jsonl": ("plain", "own"),
    "gsm8k.jsonl.gz": ("plain", "own"),
}
MESSAGES = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
# All runs in one process: most of a run's time is the start of Python and of JAX.
TRAIN = """
import json, sys
import reinforce_ada_jax as ada
from tests.running import tiny
settings, runs = json.loads(sys.argv[1])
for workdir, changes in runs.items():
    run = ada.train.train(tiny(**settings | {"evaluation.benchmarks": ()} | changes), workdir)
    print(json.dumps({name: run.metrics[0][name] for name in ("reward/pool", "collection/verifier_failures")}))
"""


def train(folder, names):
    """Returns the metrics of one iteration with each file."""
    shutil.copytree(components_lib.model_folder("package:cipher"), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(MESSAGES)
    settings = {
        "iterations": 1, "evaluation.every": 0, "checkpoint.every": 0, "logging.trackers": "",
        "model.path": str(folder / "model"), "data.max_prompt_tokens": 24, "reward.workers": 1, "sampling.slots": 32,
        "collection.prompts_per_iteration": 4, "learning.prompts_per_update": 4,
    }  # fmt: skip
    runs = {}
    for name in names:
        template, function = FILES[name]
        reward = f"{DIALECTS}/rewards.py:{function}"
        runs[str(folder / name)] = {
            "data.prompts": str(DIALECTS / name), "data.template": template, "reward.path": reward,
        }  # fmt: skip
    done = forked.run(["-c", TRAIN, json.dumps([settings, runs])], environment())
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_one_iteration(tmp_path):
    """A run trains on files of other programs, and grades all responses."""
    metrics = train(tmp_path, FILES)
    assert len(metrics) == len(FILES)
    for name, line in zip(FILES, metrics, strict=True):
        assert line["collection/verifier_failures"] == 0, name
        # No response has 0: that would be a reward that could not be computed.
        assert 0.0 < line["reward/pool"] < 1.0, name

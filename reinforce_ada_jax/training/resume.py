"""Identity of a run: the input that each start reads again, and must find unchanged."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from reinforce_ada_jax.config import Config, resume
from reinforce_ada_jax.data.problems import json_hash
from reinforce_ada_jax.environments.loading import file_hash
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.policy import adapter_files
from reinforce_ada_jax.rewards import code_tests, loading
from reinforce_ada_jax.training import records
from reinforce_ada_jax.training.run import Inputs
from reinforce_ada_jax.types import Prompt

# In place of the hash of a reward, in checkpoints of the command sft.
SUPERVISED = "supervised"


def identity(inputs: Inputs) -> dict[str, Any]:
    """Returns, as JSON, the architecture and fingerprints of configuration, prompts, reward and frozen weights.

    The frozen weights are the base under adapters, or the reference of the KL term. Supervised training has no reward.
    """
    config, components, weights = inputs.given, inputs.components, None
    if config.lora.rank or config.learning.kl_coefficient:
        weights = adapter_files.fingerprint(components.folder)
    if inputs.is_supervised:
        graded = SUPERVISED
    elif inputs.reward is not None:
        graded = json_hash([loading.source_text(inputs.reward), [prompt.columns for prompt in inputs.prompts]])
    else:
        graded = reward_hash(config, inputs.prompts)
    return {
        "config": resume.identity_hash(config),
        "architecture": json.loads(json.dumps(dataclasses.asdict(components.architecture))),
        "prompts": prompts_hash(inputs.prompts),
        "reward": graded,
        "code": "" if inputs.is_supervised else code_hash(config),
        "base": weights if config.lora.rank else None,
        "reference": None if config.lora.rank else weights,
    }


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Returns a hash of ids, texts, answers and tokens, which depend on tokenizer and chat template."""
    found = hashlib.sha256()
    for prompt in prompts:
        texts = [prompt.id, prompt.source_text, prompt.answer, len(prompt.tokens)]
        found.update(json.dumps(texts).encode() + prompt.tokens.astype("<i4").tobytes())
    return found.hexdigest()[:16]


def reward_hash(config: Config, prompts: Sequence[Prompt]) -> str:
    """Returns a hash of the user's reward or environment and the columns that it gets, or of the tests of programs."""
    if config.reward.kind == "code" and not config.reward.path:
        return code_tests.tests_hash(prompt.columns for prompt in prompts)
    code = file_hash(config.environment.path) or loading.settings_hash(config.reward.path, config.judge.template)
    return json_hash([code, [prompt.columns for prompt in prompts]]) if code else ""


def code_hash(config: Config) -> str:
    """Returns a hash of the user's files with the strategy, the choice of prompts and the loss, "" for none."""
    names = (config.collection.strategy, config.collection.selection, config.learning.loss)
    files = [pathlib.Path(name.rpartition(":")[0]) for name in names if ":" in name]
    return json_hash([hashlib.sha256(file.read_bytes()).hexdigest() for file in files]) if files else ""


def check_command(workdir: pathlib.Path, *, supervised: bool) -> None:
    """Raises ValueError if the other command of `train` and `sft` wrote the checkpoints in a work directory."""
    saved = records.newest_record(workdir)
    if saved is not None and (saved.get("reward") == SUPERVISED) != supervised:
        command = "train" if supervised else "sft"
        raise ValueError(
            f"{buckets.origin(workdir)} holds checkpoints of the command {command}, and this is another: name another "
            "--workdir. To begin with its weights, export them, and name their folder as model.path."
        )


def check_newest(workdir: pathlib.Path, inputs: Inputs) -> None:
    """Raises ValueError as `check` does for the newest checkpoint of the run in a work directory, if there is one."""
    saved = records.newest_record(workdir)
    if saved is not None and saved.get("run_id") == records.read_run_id(workdir):
        check(
            workdir, inputs.components.folder, identity(inputs), saved,
            accept_reward=inputs.config.checkpoint.accept_changed_reward,
        )  # fmt: skip


def check(
    workdir: pathlib.Path,
    folder: pathlib.Path,
    ours: dict[str, Any],
    saved: dict[str, Any],
    *,
    accept_reward: bool = False,
) -> None:
    """Raises ValueError if the checkpoint's record `saved` belongs to another run than the identity `ours`.

    With `accept_reward` the user's functions may have changed. `folder` is that of the model.
    """
    named = buckets.origin(workdir)
    now, then = ours["architecture"], saved["architecture"]
    different = [f"{name} {then.get(name)!r}, now {now[name]!r}" for name in now if now[name] != then.get(name)]
    if different:
        raise ValueError(
            f"{named} holds checkpoints of another model than {folder}: {'; '.join(different)}. Name the model that "
            "the run began with, or another --workdir."
        )
    if ours["base"] is not None:
        adapter_files.check_base(folder, saved["base"])
    parts = {
        "prompts": "prompts of data.prompts, or their tokens (tokenizer and chat template of the model) are not those",
        "reference": "weights of model.path are not those",
    }
    for part, differs in parts.items():
        if ours[part] != saved[part]:
            raise ValueError(
                f"the {differs} that the run in {named} began with. Use the same again, or choose another --workdir."
            )
    if ours["config"] != saved["config"]:
        raise ValueError(
            f"{named} holds checkpoints of another configuration: its config.json was changed or lost. Restore that "
            "file, or choose another --workdir."
        )
    functions = {
        "reward": "reward (reward.path, environment.path, train(..., reward=), the columns of data.prompts that it "
        "gets, or the tests of reward.kind=code)",
        "code": "file of collection.strategy, collection.selection or learning.loss",
    }
    for part, what in functions.items():
        if ours[part] != saved.get(part, ours[part]) and not accept_reward:  # early checkpoints have no "code"
            raise ValueError(
                f"the {what} is not the one that the run in {named} began with. Use the same again, choose another "
                "--workdir, or go on with the new one: --config.checkpoint.accept_changed_reward=True."
            )

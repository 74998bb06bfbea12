"""Identity of a run: what it reads again at each start, and must find unchanged."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from reinforce_ada_jax.config import Config, resume
from reinforce_ada_jax.data.problems import problems_hash
from reinforce_ada_jax.policy import adapter_files
from reinforce_ada_jax.training.components import Components
from reinforce_ada_jax.types import Prompt


def identity(config: Config, components: Components, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Returns, as JSON, the architecture and fingerprints of the configuration, the prompts and the frozen weights.

    These are the base under adapters ("base"), or the reference of the KL term ("reference"); otherwise None.
    """
    weights = None
    if config.lora.rank or config.learning.kl_coefficient:
        weights = adapter_files.fingerprint(components.folder)
    return {
        "config": resume.identity_hash(config),
        "architecture": json.loads(json.dumps(dataclasses.asdict(components.architecture))),
        "prompts": problems_hash((prompt.id, f"{prompt.source_text}\n{prompt.answer}") for prompt in prompts),
        "base": weights if config.lora.rank else None,
        "reference": None if config.lora.rank else weights,
    }


def check(workdir: pathlib.Path, folder: pathlib.Path, ours: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError if `saved`, the record of a checkpoint, belongs to another run than the configured one.

    Args:
      workdir: of the run.
      folder: of the model.
      ours: `identity` of the run as it is now.
      saved: a record with the `identity` of the run that wrote it.
    """
    now, then = ours["architecture"], saved["architecture"]
    different = [f"{name} {then.get(name)!r}, now {now[name]!r}" for name in now if now[name] != then.get(name)]
    if different:
        raise ValueError(
            f"{workdir} holds checkpoints of another model than {folder}: {'; '.join(different)}. Name the model that "
            "the run began with, or another --workdir."
        )
    if ours["base"] is not None:
        adapter_files.check_base(folder, saved["base"])
    for part, what in {"prompts": "prompts of data.prompts", "reference": "weights of model.path"}.items():
        if ours[part] != saved[part]:
            raise ValueError(
                f"the {what} are not those that the run in {workdir} began with. Restore them, or choose another "
                "--workdir."
            )
    if ours["config"] != saved["config"]:
        raise ValueError(
            f"{workdir} holds checkpoints of another configuration: its config.json was changed or lost. Restore that "
            "file, or choose another --workdir."
        )

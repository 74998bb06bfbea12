"""Settings that a resumed run may change, and the comparison with the run that a work directory holds."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from reinforce_ada_jax.config.defaults import flatten
from reinforce_ada_jax.config.settings import Config

# A resume may change these; any other difference is another run.
RESUMABLE = (
    *("iterations", "checkpoint", "evaluation", "logging"),
    *("sampling.check_invariants", "learning.non_finite", "learning.max_skipped"),
)
# What an evaluation of a run must have in common with it. `evaluation` and everything that only changes speed is free.
DRAWN_WITH = ("seed", "model", "lora", "data.template", "data.system", "data.instruction", "data.date")
GRADED_BY = ("reward.kind", "reward.path", "reward.positive_threshold")


def differences(config: Config, saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns "key: saved -> now" by key, for the settings that make `config` another run than `saved` describes."""
    now, then = flatten(json.loads(json.dumps(dataclasses.asdict(config)))), flatten(saved)
    return {
        key: f"{key}: {then.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(now.keys() | then.keys())
        if not {key, key.split(".")[0]} & {*RESUMABLE} and now.get(key, KeyError) != then.get(key, KeyError)
    }


def _of_saved_run(config: Config, workdir: pathlib.Path) -> dict[str, str]:
    file = workdir / "config.json"
    return differences(config, json.loads(file.read_text())) if file.exists() else {}


def check_workdir(config: Config, workdir: pathlib.Path) -> None:
    """Raises ValueError when `workdir` holds a run of another configuration."""
    different = _of_saved_run(config, workdir)
    if different:
        lines = "\n  ".join(different.values())
        raise ValueError(
            f"{workdir} holds a run of another configuration (saved -> now):\n  {lines}\nResume it with its own "
            f"values, or choose another --workdir. What may change: {', '.join(RESUMABLE)}."
        )


def check_evaluated(config: Config, workdir: pathlib.Path, keys: tuple[str, ...]) -> None:
    """Raises ValueError when `config` differs from that of the run in `workdir` in one of `keys`."""
    different = [
        line
        for key, line in _of_saved_run(config, workdir).items()
        if any(f"{key}.".startswith(f"{prefix}.") for prefix in keys)
    ]
    if different:
        lines = "\n  ".join(different)
        raise ValueError(
            f"{workdir} holds a run of another configuration (saved -> now):\n  {lines}\nIts figures would be another "
            "policy's or another task's. Evaluate it with its own --config and values."
        )

"""Settings that a resumed run may change, and the comparison with the run that a work directory holds."""

import hashlib
import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from reinforce_ada_jax.config.defaults import flatten, replaced, resolve, to_json
from reinforce_ada_jax.config.paths import check_output
from reinforce_ada_jax.config.settings import Config
from reinforce_ada_jax.files import buckets

# A resume may change these; any other difference is another run.
RESUMABLE = (
    *("iterations", "checkpoint", "evaluation", "logging", "sft.validation"),
    *("sampling.check_invariants", "learning.max_skipped", "reward.max_failed", "judge.url"),
)
# Settings that an evaluation of a run must share with it. `evaluation` and settings that only change speed may differ.
DRAWN_WITH = ("seed", "model", "lora", "data.template", "data.system", "data.instruction")
SHOWN = 3  # lines of differences in a message
# Orbax looks for the parts of a checkpoint by its whole path as a pattern: below a folder `run[1]` it found none,
# reported no error, and the checkpoint had no arrays.
WILDCARDS = "*?[\\"
GRADED_BY = (
    *(f"reward.{key}" for key in ("kind", "path", "completions", "positive_threshold")),
    *(f"environment.{key}" for key in ("path", "max_turns", "max_turn_tokens")),
)


def _is_among(key: str, names: Sequence[str]) -> bool:
    """Returns True if `names` has the setting `key` or its section."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def identity_hash(config: Config) -> str:
    """Returns a hash of the settings that a resume must find unchanged."""
    settings = flatten(json.loads(to_json(config)))
    fixed = {key: value for key, value in settings.items() if not _is_among(key, RESUMABLE)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def differences(config: Config, saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns {key: "key: saved -> now"} of the settings that make `config` another run than `saved`."""
    now, then = flatten(json.loads(to_json(config))), flatten(saved)
    return {
        key: f"{key}: {then.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(now.keys() | then.keys())
        if not _is_among(key, RESUMABLE) and now.get(key, KeyError) != then.get(key, KeyError)
    }


def _saved(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Returns config.json of a work directory as nested mappings, or None if there is none."""
    file = workdir / "config.json"
    if not file.exists():
        return None
    try:
        saved = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{file} is not valid JSON ({error}): it was cut short, or edited. Restore it from a copy, or remove it; "
            "train then writes it again from its flags."
        ) from error
    if not isinstance(saved, dict) or "collection" not in saved:
        raise ValueError(
            f"{file} is not the configuration of a run, but of something else, such as a model: name another --workdir."
        )
    return saved


def read(workdir: pathlib.Path) -> Config | None:
    """Returns the configuration of the run in a work directory, None without one; ValueError if it is damaged."""
    saved = _saved(workdir)
    return None if saved is None else resolve(saved)


def with_saved_dtype(config: Config, workdir: pathlib.Path) -> Config:
    """Returns `config` with the dtype of the run in `workdir`, if any, in place of model.compute_dtype "auto"."""
    saved = _saved(workdir) if config.model.compute_dtype == "auto" else None
    dtype = saved and flatten(saved).get("model.compute_dtype")
    return replaced(config, {"model.compute_dtype": dtype}) if dtype else config


def _of_saved_run(config: Config, workdir: pathlib.Path) -> dict[str, str]:
    saved = _saved(workdir)
    return {} if saved is None else differences(config, saved)


def shortened(lines: Sequence[str]) -> str:
    """Returns indented lines: at most SHOWN; if there are more, the last one says how many."""
    more = f"\n  ... and {len(lines) - SHOWN + 1} more" if len(lines) > SHOWN else ""
    return "  " + "\n  ".join(lines[: SHOWN - 1 if more else SHOWN]) + more


def check_workdir(config: Config, workdir: pathlib.Path) -> None:
    """Raises ValueError when `workdir` can't be written, or holds a run of another configuration."""
    check_output("--workdir", workdir, folder=True)
    if wild := [each for each in WILDCARDS if each in str(workdir.absolute())]:
        raise ValueError(
            f"--workdir is {str(workdir.absolute())!r}, and {' '.join(wild)} in a path are wildcards for the library "
            "of checkpoints, which would lose them: name another path."
        )
    _refuse(
        workdir, [*_of_saved_run(config, workdir).values()],
        "Resume it with its own values, or choose another --workdir. docs/concepts/resume.md lists what may change.",
    )  # fmt: skip


def check_evaluated(config: Config, workdir: pathlib.Path, keys: tuple[str, ...]) -> None:
    """Raises ValueError when `config` differs from that of the run in `workdir` in one of `keys`."""
    different = {key: line for key, line in _of_saved_run(config, workdir).items() if _is_among(key, keys)}
    saved = flatten(_saved(workdir) or {})
    own = " ".join(shlex.quote(f"--config.{key}={saved[key]}") for key in [*different][:SHOWN] if key in saved)
    _refuse(
        workdir, [*different.values()],
        "Its figures would be another policy's or another task's. Evaluate it with its own --config and values"
        f"{f': {own}' if own else ''}.",
    )  # fmt: skip


def _refuse(workdir: pathlib.Path, different: Sequence[str], remedy: str) -> None:
    if different:
        raise ValueError(
            f"{buckets.origin(workdir)} holds a run of another configuration (saved -> now):\n{shortened(different)}\n"
            f"{remedy}"
        )

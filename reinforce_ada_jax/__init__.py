"""Reinforce-Ada in JAX: adaptive-sampling reinforcement learning with verifiable rewards for language models.

    import reinforce_ada_jax as ada

The public names are imported on first use, so importing the package loads no JAX. __init__.pyi declares them for type
checkers. docs/api.md has examples.
"""

import importlib
import os
import pathlib
import signal
import sys
from typing import Any


def _end(number: int, frame: object) -> None:
    del frame
    print("error: interrupted while the command was starting; nothing was written.", file=sys.stderr, flush=True)
    os._exit(128 + number)


if pathlib.Path((sys.argv or [""])[0]).name in ("-m", "reinforce-ada"):
    # A command: Ctrl-C during its imports would print a stack trace. cli takes over when the flags are parsed.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)

__version__ = "0.1.0"

_MODULES = ("config", "train")
# Public name: its module in the package, and after a colon its name there if that is another one.
_PUBLIC = {
    "CollectOptions": "collection.collect",
    "Config": "config",
    "Engine": "sampling.engine",
    "EngineOptions": "sampling.state",
    "Group": "collection.advantages",
    "LossConfig": "learning.loss",
    "Pool": "types",
    "Prompt": "types",
    "Request": "types",
    "RequestQueue": "types",
    "Response": "types",
    "Rollouts": "sampling.rollouts",
    "SamplingParams": "sampling.state",
    "Strategy": "collection.strategies",
    "Verdict": "types",
    "VerifierPool": "rewards.workers",
    "anchored_advantages": "collection.advantages",
    "balanced_group": "collection.groups",
    "build_strategy": "collection.strategies:build",
    "clipped_policy_loss": "learning.loss",
    "collect": "collection.collect",
    "defaults": "config",
    "grade_gsm8k": "rewards.gsm8k:grade",
    "grade_math": "rewards.math_answer:grade",
    "grade_minerva": "rewards.minerva:grade",
    "group_advantages": "collection.advantages",
    "kl_estimate": "learning.loss",
    "leave_one_out_advantages": "collection.advantages",
    "load": "policy.huggingface",
    "logits": "policy.transformer",
    "make_group": "collection.advantages",
    "objective_weight": "collection.objectives:weight",
    "save": "policy.huggingface",
    "validate": "config",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _PUBLIC:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__dir__())}."
        )
    module, _, other = _PUBLIC[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), other or name)
    return value


def __dir__() -> list[str]:
    return sorted((*_MODULES, *_PUBLIC, "__version__"))

"""Configurations as tests load and change them, and the environment in which they start commands."""

import importlib.util
import os
import pathlib
import types

from ml_collections import ConfigDict

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = ROOT / "configs"


def load(file: pathlib.Path) -> types.ModuleType:
    """The module of a configuration file."""
    spec = importlib.util.spec_from_file_location(f"configs_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(**changes: object) -> ConfigDict:
    """configs/tiny.py with some keys set: tiny(**{"seed": 1, "mesh.data": 2})."""
    config = load(CONFIGS / "tiny.py").get_config()
    config.update_from_flattened_dict(changes)
    return config


def environment(compiled: pathlib.Path | None = None) -> dict[str, str]:
    """That of a user's command on one CPU device; `compiled` is where commands leave their programs to each other.

    The flags of conftest.py are for this process alone: a run at optimisation level 0 would take longer.
    """
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | (cache if compiled else {})

"""Reinforce-Ada in JAX: adaptive-sampling reinforcement learning with verifiable rewards for language models.

    import reinforce_ada_jax as ada

The public names are declared in __init__.pyi and are imported on first use, so importing the package loads no JAX.
docs/api.md has examples.
"""

import ast
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

_DECLARED = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
# Public name: (module, name there).
_PUBLIC = {
    alias.asname or alias.name: (node.module, alias.name)
    for node in _DECLARED
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = sorted(_PUBLIC)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]  (__init__.pyi declares it)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__all__)}."
        )
    module_name, attribute = _PUBLIC[name]
    if name in ("config", "train"):  # modules of that name; the module `train` can be called
        return importlib.import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(importlib.import_module(module_name), attribute)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

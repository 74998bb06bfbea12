"""The command line of a measurement: its flags, the check of --json, the printed and the written numbers."""

import json
from collections.abc import Callable
from typing import Any

import jax
from absl import flags

from bench import options
from reinforce_ada_jax import cli
from reinforce_ada_jax.analysis.tables import plain
from reinforce_ada_jax.config.paths import check_output
from reinforce_ada_jax.distributed import mesh
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import write_atomically

# Measures what the flags say, and returns its numbers.
RunFn = Callable[[flags.FlagValues], dict[str, Any]]


def leave_the_device(values: flags.FlagValues) -> None:
    """Keeps this process off the accelerators, which belong to its subprocesses."""
    del values
    jax.config.update("jax_platforms", "cpu")


def check_flags(name: str, values: flags.FlagValues) -> None:
    """Raises ValueError where a flag is given that the measurement `name` does not read."""
    read = ("json", *options.USED[name])
    given = [flag for flag in options.define_flags(flags.FlagValues()) if values[flag].present]
    if unread := [flag for flag in given if flag not in read]:
        raise ValueError(f"`{name}` does not read --{unread[0]}; --help lists the flags that it reads.")


def measured(run: RunFn, values: flags.FlagValues, auto_dtype: str | None = None) -> dict[str, Any]:
    """Returns the numbers of a measurement; impossible flags end the process.

    `auto_dtype` is what --dtype=auto means; None: float32 on CPUs, bfloat16 on other devices.
    """
    with cli.user_input():
        if values.json:
            check_output("--json", values.json, folder=False)
        if values.dtype == "auto":
            on_cpu = mesh.available_devices()[0].platform == "cpu"
            values.dtype = auto_dtype or ("float32" if on_cpu else "bfloat16")
        return run(values)


def summary(result: dict[str, Any], indent: str = "") -> str:
    """Returns a line for each number, nested ones indented."""
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", summary(value, indent + "  ")]
            continue
        if isinstance(value, float):
            text = f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
        elif isinstance(value, list):
            text = " ".join(f"{item:.3g}" for item in value)
        else:
            text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        lines.append(f"{indent}{name:<28}{text}")
    return "\n".join(lines)


def report(name: str, result: dict[str, Any], file: str | None) -> None:
    """Prints the numbers of the measurement `name`, and writes them into a file, NaN and infinity as null."""
    result = {"benchmark": name, **result}
    print(summary(result))
    if file:
        with buckets.output(file) as local:
            local.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(local, json.dumps(plain(result), indent=2, allow_nan=False) + "\n")
        print(f"kept in {file}")


def start(
    name: str, run: RunFn, *, before: Callable[[flags.FlagValues], None] | None = None, auto_dtype: str | None = None
) -> None:
    """Runs the command `python -m bench.NAME`; `before` is called before JAX looks for devices."""
    options.define_flags(flags.FLAGS)

    def main() -> None:
        with cli.user_input():
            check_flags(name, flags.FLAGS)
        if before is not None:
            before(flags.FLAGS)
        report(name, measured(run, flags.FLAGS, auto_dtype), flags.FLAGS.json)

    cli.run(main, {f"Flags of {name}": ("json", *options.USED[name])})

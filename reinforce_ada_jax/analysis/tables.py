"""Tables at the terminal, and figures with their numbers in a folder; `reporting.plotting` draws them."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_ada_jax.analysis.enumeration import Rates
from reinforce_ada_jax.reporting.panels import Curve, Panel


def number(x: float) -> str:
    """Returns a number with four decimals below 1, two from 1 on, none from 1,000 on; in powers of ten below 0.0001."""
    if not np.isfinite(x):
        return "-" if np.isnan(x) else "inf"
    if abs(x) >= 1:
        return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.2f}"
    return f"{x:.4f}" if abs(x) >= 1e-4 or x == 0 else f"{x:.1e}"


def _aligned(*rows: Sequence[str]) -> list[list[str]]:
    """Returns the cells of a table, each as wide as its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns lines of right-aligned columns."""
    return "\n".join(map("  ".join, _aligned(header, *rows)))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the lines of `table` as a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in _aligned(header, ["---:"] * len(header), *rows))


def rate_table(pass_rates: Rates, columns: Mapping[str, Rates]) -> str:
    """Returns a table with one line per pass rate."""
    cells = [[number(x) for x in column] for column in columns.values()]
    return table(["pass rate", *columns], list(zip([f"{rate:.4f}" for rate in pass_rates], *cells, strict=True)))


def rate_panel(title: str, pass_rates: Rates, values: Mapping[str, Rates], y_scale: str = "linear") -> Panel:
    """Returns a panel over pass rates, in logits where none of them is 0 or 1."""
    x_scale = "logit" if ((pass_rates > 0) & (pass_rates < 1)).all() else "linear"
    curves = [Curve(entry, style, pass_rates, y) for style, (entry, y) in enumerate(values.items())]
    return Panel(title, "pass rate", "", curves, x_scale=x_scale, y_scale=y_scale)


def write(output: str | None, name: str, panels: Sequence[Panel], result: Mapping[str, Any]) -> None:
    """Draws name.png, name.svg and name-dark.svg into the folder `output`, and writes name.json; None: no files."""
    if output is None:
        return
    from reinforce_ada_jax.reporting import plotting  # noqa: PLC0415  (half a second, for figures only)

    folder = pathlib.Path(output)
    plotting.draw(panels, folder / name, columns=3 if len(panels) <= 3 else -(-len(panels) // 2))
    (folder / f"{name}.json").write_text(json.dumps(plain(result), indent=2) + "\n")
    print(f"\nfigure and numbers: {folder}/{name}.png, .svg, -dark.svg, .json")


def plain(value: Any) -> Any:
    """Returns `value` in types that JSON has; numbers that are not finite become null."""
    if dataclasses.is_dataclass(value):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value

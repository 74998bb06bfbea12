"""Tables at the terminal, and figures with their numbers in a folder: what simulate.py shows."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("agg")

from matplotlib import pyplot, ticker

# The lowest value shown on a logarithmic axis, as a part of the highest.
LEAST = 1e-6
# Told apart in grey too.
MARKERS, LINES = "osv^Dx*P", ("-", "--", "-.", ":")


def number(x: float) -> str:
    """Two decimals from 1 on, four below, and a power of ten for what they would not show."""
    if not np.isfinite(x):
        return "-" if np.isnan(x) else "inf"
    if abs(x) >= 1:
        return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.2f}"
    return f"{x:.4f}" if abs(x) >= 1e-4 or x == 0 else f"{x:.1e}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [[f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in (header, *rows)]
    return "\n".join("  ".join(line) for line in lines)


def by_rate(pass_rates: np.ndarray, columns: Mapping[str, np.ndarray | list[str]]) -> str:
    """A table with a line for each pass rate."""
    cells = [[x if isinstance(x, str) else number(x) for x in column] for column in columns.values()]
    return table(["pass rate", *columns], list(zip([f"{rate:.4f}" for rate in pass_rates], *cells, strict=True)))


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot: lines {label: (x, y)} in the order that decides their looks."""

    title: str
    label: str
    lines: Mapping[str, tuple[Any, Any]]
    x_scale: str = "linear"
    y_scale: str = "linear"


def write(output: str | None, name: str, panels: Sequence[Panel], result: Mapping[str, Any]) -> None:
    """name.png, name.svg and name.json in the folder `output`, where one was named."""
    if output is None:
        return
    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    rows = 1 + (len(panels) > 3)
    columns = -(-len(panels) // rows)
    canvas, axes = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.8 * rows), layout="constrained")
    for panel, axis in zip(panels, np.ravel(axes), strict=False):
        for index, (label, (x, y)) in enumerate(panel.lines.items()):
            values = np.asarray(y, np.float64)
            shown = np.isfinite(values) & ((values > 0) | (panel.y_scale != "log"))
            marker, line = MARKERS[index % len(MARKERS)], LINES[index % len(LINES)]
            every = max(1, len(values) // 12)
            axis.plot(
                x, np.where(shown, values, np.nan), line, marker=marker, markevery=every, markersize=4, label=label
            )
        axis.set(title=panel.title, xlabel=panel.label, xscale=panel.x_scale)
        if axis.dataLim.height > 0 or panel.y_scale == "linear":
            axis.set_yscale(panel.y_scale)
        if panel.y_scale == "log":  # what is as good as 0 would leave no room for the rest
            axis.set_ylim(bottom=max(axis.get_ylim()[0], axis.get_ylim()[1] * LEAST))
        if panel.label == "draws":
            axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    np.ravel(axes)[0].legend(frameon=False, fontsize="small")
    for suffix in ("png", "svg"):
        canvas.savefig(folder / f"{name}.{suffix}", dpi=120)
    pyplot.close(canvas)
    (folder / f"{name}.json").write_text(json.dumps(plain(result), indent=2) + "\n")
    print(f"\nfigure and numbers: {folder}/{name}.png, .svg, .json")


def plain(value: Any) -> Any:
    """`value` as JSON has it; what is not finite becomes null."""
    if dataclasses.is_dataclass(value):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def rate_scale(pass_rates: np.ndarray) -> str:
    return "logit" if ((pass_rates > 0) & (pass_rates < 1)).all() else "linear"

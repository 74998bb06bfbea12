"""Tables at the terminal, and figures with their numbers in a folder."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The lowest value of a logarithmic axis, as a share of the highest.
LEAST = 1e-6
# Markers and line styles that differ in grey too.
MARKERS, LINES = "osv^Dx*P", ("-", "--", "-.", ":")


def number(x: float) -> str:
    """Returns a number with two decimals from 1 on, with four below 1, and as a power of ten where these are 0."""
    if not np.isfinite(x):
        return "-" if np.isnan(x) else "inf"
    if abs(x) >= 1:
        return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.2f}"
    return f"{x:.4f}" if abs(x) >= 1e-4 or x == 0 else f"{x:.1e}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns lines of right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [[f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in (header, *rows)]
    return "\n".join("  ".join(line) for line in lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the lines of `table` as a Markdown table."""
    cells = [*header], ["---:"] * len(header), *rows
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rate_table(pass_rates: Float[np.ndarray, " P"], columns: Mapping[str, Float[np.ndarray, " P"]]) -> str:
    """Returns a table with one line per pass rate."""
    cells = [[number(x) for x in column] for column in columns.values()]
    return table(["pass rate", *columns], list(zip([f"{rate:.4f}" for rate in pass_rates], *cells, strict=True)))


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot of a figure.

    Attributes:
      title: text above it.
      label: label of the x axis.
      lines: {label: (x, y)}; their order decides markers and line styles.
      x_scale: scale of the x axis: "linear", "log" or "logit".
      y_scale: scale of the y axis.
    """

    title: str
    label: str
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]]
    x_scale: str = "linear"
    y_scale: str = "linear"


def rate_panel(
    title: str,
    pass_rates: Float[np.ndarray, " P"],
    values: Mapping[str, Float[np.ndarray, " P"]],
    y_scale: str = "linear",
) -> Panel:
    """Returns a panel over pass rates, in logits where none of them is 0 or 1."""
    x_scale = "logit" if ((pass_rates > 0) & (pass_rates < 1)).all() else "linear"
    return Panel(title, "pass rate", {entry: (pass_rates, y) for entry, y in values.items()}, x_scale, y_scale)


def _draw(panel: Panel, axis: "Axes") -> None:
    from matplotlib import ticker  # noqa: PLC0415

    for index, (label, (x, y)) in enumerate(panel.lines.items()):
        values = np.asarray(y, np.float64)
        shown = np.isfinite(values) & ((values > 0) | (panel.y_scale != "log"))
        style = {"marker": MARKERS[index % len(MARKERS)], "linestyle": LINES[index % len(LINES)], "markersize": 4}
        axis.plot(x, np.where(shown, values, np.nan), label=label, markevery=max(1, len(values) // 12), **style)
    axis.set(title=panel.title, xlabel=panel.label, xscale=panel.x_scale)
    if axis.dataLim.height > 0 or panel.y_scale == "linear":
        axis.set_yscale(panel.y_scale)
    if panel.y_scale == "log":  # values that are as good as 0 would leave no room for the others
        axis.set_ylim(bottom=max(axis.get_ylim()[0], axis.get_ylim()[1] * LEAST))
    if panel.label == "draws":
        axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axis.grid(alpha=0.3)


def write(output: str | None, name: str, panels: Sequence[Panel], result: Mapping[str, Any]) -> None:
    """Writes name.png, name.svg and name.json to the folder `output`; nothing where it is None."""
    if output is None:
        return
    import matplotlib as mpl  # noqa: PLC0415  (half a second, for a table as well)

    mpl.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415

    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    rows = 1 + (len(panels) > 3)
    columns = -(-len(panels) // rows)
    canvas, axes = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.8 * rows), layout="constrained", squeeze=False
    )
    for panel, axis in zip(panels, axes.flat, strict=False):
        _draw(panel, axis)
    # One legend for panels with the same lines.
    same = all(list(panel.lines) == list(panels[0].lines) for panel in panels)
    for axis in axes.flat[: 1 if same else len(panels)]:
        axis.legend(frameon=False, fontsize="small")
    for suffix in ("png", "svg"):
        canvas.savefig(folder / f"{name}.{suffix}", dpi=120)
        canvas.set_layout_engine("none")  # both files have the layout of the first, which takes most of the time
    pyplot.close(canvas)
    (folder / f"{name}.json").write_text(json.dumps(_plain(result), indent=2) + "\n")
    print(f"\nfigure and numbers: {folder}/{name}.png, .svg, .json")


def _plain(value: Any) -> Any:
    """Returns `value` as JSON has it; numbers that are not finite become null."""
    if dataclasses.is_dataclass(value):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value

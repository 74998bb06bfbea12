"""Drawing of panels with curves and bars as PNG and SVG, on light and on dark paper.

This module only draws; `curves` makes the data of runs. Lines differ in colour, dashes and marker and are named at
their ends, and bars are hatched, so figures can be read in grey.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np

mpl.use("agg")

from matplotlib import pyplot, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from reinforce_ada_jax.reporting.panels import DARK_COLORS, LIGHT_COLORS, Curve, Panel

LINES = ("-", (0, (5, 2)), (0, (5, 2, 1, 2)), (0, (1, 1.2)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "os^DvP*Xh"
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++")
# The two papers: background, ink, grid, and the colours of lines.
LIGHT = {"paper": "#ffffff", "ink": "#20242b", "grid": "#d5d8de", "colors": LIGHT_COLORS}
DARK = {"paper": "#171a20", "ink": "#e3e6eb", "grid": "#3a404a", "colors": DARK_COLORS}
PANEL_INCHES = (3.9, 3.1)
LONGEST_NAME, LONGEST_TITLE = 28, 42  # characters
LEAST = 1e-6  # the lowest value of a logarithmic axis, as a share of the highest
MOST_NAMED = 6  # lines named where they end; more have a legend


def literal(text: str, longest: int = LONGEST_NAME) -> str:
    """Returns `text` as matplotlib shows it unchanged: no formulas, a box for characters that fonts lack, shortened."""
    if len(text) > longest:
        text = f"{text[: longest // 2]}…{text[-(longest // 2) :]}"
    shown = "".join(character if character.isprintable() and ord(character) < 0x2500 else "□" for character in text)
    return shown.replace("$", r"\$")


def _shown(curve: Curve, panel: Panel) -> Curve:
    """Returns the curve without points that are not finite or, on a logarithmic axis, not above 0."""
    finite = np.isfinite(curve.x) & np.isfinite(curve.y) & ((curve.y > 0) | (panel.y_scale != "log"))
    error = None if curve.error is None else curve.error[finite]
    band = None if curve.band is None else (curve.band[0][finite], curve.band[1][finite])
    return dataclasses.replace(curve, x=curve.x[finite], y=curve.y[finite], error=error, band=band)


def _draw_curves(axis: Axes, panel: Panel, theme: Mapping) -> None:
    for curve in (_shown(curve, panel) for curve in panel.curves):
        color = theme["colors"][curve.style % len(theme["colors"])]
        marker, line = MARKERS[curve.style % len(MARKERS)], LINES[curve.style % len(LINES)]
        if curve.band is not None:
            axis.fill_between(curve.x, *curve.band, color=color, alpha=0.16, linewidth=0)
        axis.errorbar(
            curve.x, curve.y, curve.error, label=literal(curve.label), color=color, linestyle=line, marker=marker,
            markersize=4.5, markevery=max(1, len(curve.x) // 8), capsize=2, elinewidth=0.9,
            linewidth=1.0 if curve.faint else 1.8, markerfacecolor=theme["paper"] if curve.faint else color,
            alpha=0.75 if curve.faint else 1.0,
        )  # fmt: skip
    if panel.diagonal:
        axis.plot([0, 1], [0, 1], color=theme["ink"], linewidth=0.8, linestyle=":", zorder=0)
        axis.set(xlim=(0, 1), ylim=(0, 1))
    axis.set_xscale(panel.x_scale)
    if panel.y_scale == "log" and axis.dataLim.height > 0:
        axis.set_yscale("log")  # without a lower end, values near 0 would leave no room for the others
        axis.set_ylim(bottom=max(axis.get_ylim()[0], axis.get_ylim()[1] * LEAST))
    if panel.powers:
        ks = sorted({int(k) for curve in panel.curves for k in curve.x})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, [str(k) for k in ks])
        axis.minorticks_off()


def _draw_bars(axis: Axes, panel: Panel, theme: Mapping) -> None:
    parts = list(dict.fromkeys(part for bar in panel.bars.values() for part in bar))
    positions = np.arange(len(panel.bars))[::-1]
    left = np.zeros(len(panel.bars))
    for index, part in enumerate(parts):
        lengths = np.array([bar.get(part, 0.0) for bar in panel.bars.values()])
        axis.barh(
            positions, lengths, 0.62, left, label=part, color=theme["colors"][index % len(theme["colors"])],
            hatch=HATCHES[index % len(HATCHES)], edgecolor=theme["paper"], linewidth=0.8,
        )  # fmt: skip
        left += lengths
    axis.set_yticks(positions, [literal(name) for name in panel.bars])
    axis.set_ylim(-0.6, len(panel.bars) - 0.4)
    axis.legend(
        frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, handlelength=2.2,
        borderaxespad=0, labelcolor=theme["ink"],
    )  # fmt: skip


def _name_lines(axis: Axes, panel: Panel, theme: Mapping) -> None:
    """Writes the name of each line at its end, moved up where two would overlap."""
    height, near = 11.0, 60.0  # points: height of a line of text, and distance of ends that may overlap
    to_points = 72 / axis.figure.dpi
    ends = []
    for curve in (_shown(curve, panel) for curve in panel.curves):
        if len(curve.x) and not curve.faint:
            x, y = axis.transData.transform((curve.x[-1], curve.y[-1])) * to_points
            ends.append((y, x, curve))
    placed: list[tuple[float, float]] = []
    for y, x, curve in sorted(ends, key=lambda end: end[0]):
        below = [at for at, beside in placed if abs(beside - x) < near]
        at = max([y, *(other + height for other in below)])
        placed.append((at, x))
        axis.annotate(
            literal(curve.label), (curve.x[-1], curve.y[-1]), (7, at - y), textcoords="offset points", va="center",
            fontsize=9, color=theme["colors"][curve.style % len(theme["colors"])], annotation_clip=False,
            bbox={"facecolor": theme["paper"], "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        )  # fmt: skip


def _finish(axis: Axes, panel: Panel, theme: Mapping) -> None:
    axis.set_title(
        literal(panel.title, LONGEST_TITLE), loc="left", fontsize=10.5, fontweight="bold", color=theme["ink"]
    )
    axis.set_xlabel(panel.x_label, color=theme["ink"])
    axis.set_ylabel(panel.y_label, color=theme["ink"])
    axis.set_facecolor(theme["paper"])
    axis.tick_params(which="both", colors=theme["ink"], labelsize=9)
    axis.grid(color=theme["grid"], linewidth=0.7)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme["grid"])
    if panel.limits is not None:
        axis.set_ylim(*panel.limits)
    if panel.x_scale == "linear" and not panel.powers:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=panel.counted))
    for side, limits in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        if limits[1] >= 10_000:
            side.set_major_formatter(ticker.EngFormatter(sep=""))


def _canvas(panels: Sequence[Panel], columns: int, theme: Mapping) -> Figure:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    width, height = PANEL_INCHES
    size = (width * (columns if columns > 1 else 1.4), height * rows)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.06)
    canvas, axes = pyplot.subplots(rows, columns, figsize=size, layout=layout, squeeze=False)
    canvas.set_facecolor(theme["paper"])
    for panel, axis in zip(panels, axes.flat, strict=False):
        (_draw_bars if panel.bars else _draw_curves)(axis, panel, theme)
        _finish(axis, panel, theme)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    canvas.draw_without_rendering()  # to find the ends of the lines
    for panel, axis in zip(panels, axes.flat, strict=False):
        named = len({curve.label for curve in panel.curves})
        if 1 < named <= MOST_NAMED and panel.x_scale == "linear":
            _name_lines(axis, panel, theme)
        elif named > 1:  # on an axis of pass rates, lines often end at the same point
            # With its handles given, a legend has names that begin with an underscore, too.
            drawn = axis.containers
            names = [str(curve.get_label()) for curve in drawn]
            axis.legend(drawn, names, frameon=False, fontsize="x-small", labelcolor=theme["ink"])
    canvas.draw_without_rendering()
    canvas.set_layout_engine("none")  # the layout has room for the names; saving need not compute it again
    return canvas


def draw(panels: Sequence[Panel], file: pathlib.Path, columns: int = 3) -> None:
    """Writes file.png, file.svg and file-dark.svg; equal panels make equal bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": file.name, "hatch.linewidth": 0.6, "font.size": 9.5}):
        for theme, suffixes in ((LIGHT, (".png", ".svg")), (DARK, ("-dark.svg",))):
            canvas = _canvas(panels, columns, theme)
            for suffix in suffixes:
                metadata = {"Date": None} if suffix.endswith("svg") else {}
                canvas.savefig(file.with_name(file.name + suffix), dpi=150, metadata=metadata)
            pyplot.close(canvas)

"""Plots as data: panels of curves or bars. `curves` makes them, `plotting` and the page draw them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Num

# Colours of lines on light and on dark paper. Each has its own lightness, so that readers who confuse red and green can
# tell them apart.
LIGHT_COLORS = ("#0b4f9e", "#d9541e", "#00836b", "#9250b5", "#9a7400", "#55606e")
DARK_COLORS = ("#79b4ff", "#ff9a6b", "#4fd3b5", "#d7a5ff", "#eac25a", "#b6bfca")


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """One line. Points that are not finite are left out."""

    label: str
    style: int  # index of colour, dashes and marker
    x: Num[np.ndarray, " N"]
    y: Num[np.ndarray, " N"]
    error: Num[np.ndarray, " N"] | None = None  # half the length of error bars
    band: tuple[Num[np.ndarray, " N"], Num[np.ndarray, " N"]] | None = None  # lower and upper ends of a shaded range
    faint: bool = False  # drawn thin, as a baseline of the others


@dataclasses.dataclass(frozen=True, eq=False)
class Panel:
    """One plot of curves, or of bars: {bar: {part: length}}, drawn from left to right, one below the other."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve] = ()
    bars: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    limits: tuple[float | None, float | None] | None = None  # of the y axis; None for those of the curves
    x_scale: str = "linear"  # or "logit"
    y_scale: str = "linear"  # or "log"
    powers: bool = False  # the x axis is logarithmic, base 2
    diagonal: bool = False  # also draws the line y = x
    counted: bool = False  # the ticks of the x axis are whole numbers

"""Figs 12, 14, 16 and 17: normalized latency against request rate, drawn."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.attribution import Row
from experiments.figures import BLUE, GREEN, ORANGE, PURPLE, VERMILION, to_png
from experiments.studies.capacity_study import THRESHOLD, capacities, mark_of
from experiments.studies.panels import Panel
from experiments.studies.paper import NAMES, numbers
from experiments.studies.study import Figures, Scale, seeds_of

_TOP = 1.0  # of the plots, as in the paper, in s/token
_LOOKS = {
    "ft": (PURPLE, "P"),
    "orca_max": (ORANGE, "v"),
    "orca_pow2": (GREEN, "s"),
    "orca_oracle": (BLUE, "^"),
    "vllm": (VERMILION, "o"),
}


def draw(panels: Sequence[Panel], rows: list[Row], scale: Scale) -> Figures:
    """Draws the panels of a figure."""
    name = panels[0].figure
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    size = (max(4.0 * columns, 5.6), 3.1 * lines + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax, panel in zip(axes, panels, strict=True):
        some = [row for row in rows if row["cell"]["panel"] == panel.name]
        _draw_panel(ax, panel, some)
    for ax in axes.reshape(lines, columns)[:, 0]:
        ax.set_ylabel("normalized latency (s/token)")
    for ax in axes.reshape(lines, columns)[-1]:
        ax.set_xlabel("request rate (requests/s)")
    systems = [s for s in NAMES if s in panels[0].systems]
    handles = [
        Line2D([], [], color=color, marker=marker, label=NAMES[system])
        for system in systems
        for color, marker in [_LOOKS[system]]
    ]
    overlaid = any(panel.name == "fig12a" for panel in panels)
    if overlaid:
        look: dict[str, Any] = {
            "linestyle": "",
            "marker": "o",
            "markerfacecolor": "none",
        }
        handles.append(Line2D([], [], color="black", label="the paper (a)", **look))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    caption = (
        f"Fig {name.removeprefix('fig')}: normalized latency against request rate, "
        f"mean of {seeds_of(scale)}, bars from the lowest to the highest; "
        "dotted: 0.5 s/token, where capacity is read."
    )
    if overlaid:
        caption += " Hollow: the paper's points, as far as it draws them."
    for mark, letters in _marks(panels, scale).items():
        where = f" ({', '.join(letters)})" if len(letters) < len(panels) else ""
        caption += f" {mark.capitalize()}{where}."
    return {f"{name}.png": (caption, to_png(figure))}


def _marks(panels: Sequence[Panel], scale: Scale) -> dict[str, list[str]]:
    """Returns how panels are cut short, with the letters of those that are."""
    marks: dict[str, list[str]] = {}
    for panel in panels:
        if mark := mark_of(panel, scale):
            marks.setdefault(mark, []).append(panel.letter)
    return marks


def _draw_panel(ax: Axes, panel: Panel, rows: list[Row]) -> None:
    rightmost = 0.0
    for system in panel.systems:
        color, marker = _LOOKS[system]
        curves = [
            row["metrics"]["curve"] for row in rows if row["cell"]["system"] == system
        ]
        if panel.name == "fig12a":
            points = np.array(numbers()["fig12a"]["series"][system])
            ax.plot(*points.T, marker, color=color, markerfacecolor="none", alpha=0.7)
        if not curves:
            continue
        # All seeds have the first few points; where the line rises, some have more.
        length = min(map(len, curves))
        points = np.array([curve[:length] for curve in curves], float)
        rate = points[:, :, 0].mean(axis=0)
        latency = points[:, :, 1]
        mean = latency.mean(axis=0)
        ends = np.stack([mean - latency.min(axis=0), latency.max(axis=0) - mean])
        ax.errorbar(
            rate,
            mean,
            np.maximum(ends, 0.0),
            color=color,
            marker=marker,
            markersize=5,
            elinewidth=0.8,
            capsize=2,
        )
        found = capacities(rows, system=system)
        if found is not None:
            rightmost = max(rightmost, found.mean)
    ax.axhline(THRESHOLD, color="black", linewidth=0.8, linestyle=":")
    ax.set_ylim(0, _TOP)
    ax.set_xlim(0, 1.12 * rightmost or None)
    ax.grid(linewidth=0.3)
    ax.set_title(f"({panel.letter}) {panel.title}" if panel.letter else panel.title)
    ax.title.set_fontsize(9)

"""Figures of ablations: quantities side by side, against what was varied."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    to_png,
)
from experiments.studies.seeds import Estimate

_LOOKS = (
    (VERMILION, "o"),
    (BLUE, "s"),
    (GREEN, "^"),
    (ORANGE, "v"),
    (PURPLE, "D"),
    (SKY, "P"),
)


class Panel(NamedTuple):
    """A quantity.

    Attributes:
      title: what it is.
      unit: of it.
      series: by name, labels and values; None where there is none.
    """

    title: str
    unit: str
    series: dict[str, list[tuple[str, Estimate | None]]]


def draw_variants(axis: str, panels: Sequence[Panel]) -> bytes:
    """Draws a panel for each quantity, the labels evenly spaced; PNG.

    Args:
      axis: what the labels are.
      panels: with the same series and labels in all.
    """
    labels = list(
        dict.fromkeys(label for line in panels[0].series.values() for label, _ in line)
    )
    longest = max(map(len, labels))
    turned = longest * len(labels) > 40
    width = max(3.4, 0.5 * len(labels) + 1.2)
    height = 3.6 + (0.06 * longest if turned else 0.0)
    figure = Figure(
        figsize=(max(width * len(panels), 6.4), height), layout="constrained"
    )
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel, labels)
        ax.set_xticks(
            range(len(labels)),
            labels,
            fontsize=8,
            rotation=30 if turned else 0,
            ha="right" if turned else "center",
        )
        ax.set_xlabel(axis)
    handles, names = axes[0].get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(
            handles, names, loc="outside upper center", ncols=min(len(names), 4)
        )
    return to_png(figure)


def _labels_of(line: list[tuple[str, Estimate | None]]) -> list[str]:
    """Returns the labels of a series."""
    return [label for label, _ in line]


def _is_number(label: str) -> bool:
    """Whether a label stands at a place of a scale, so that a line leads to it."""
    try:
        float(label.rstrip("%x"))
    except ValueError:
        return False
    return True


def _draw(ax: Axes, panel: Panel, labels: list[str]) -> None:
    count = len(panel.series)
    for number, (name, line) in enumerate(panel.series.items()):
        color, marker = _LOOKS[number % len(_LOOKS)]
        known = [(label, found) for label, found in line if found is not None]
        if not known:
            continue
        # A little apart, so that bars of equal values stay visible.
        x = np.array([labels.index(label) for label, _ in known])
        x = x + 0.06 * (number - (count - 1) / 2)
        y = np.array([found.mean for _, found in known])
        reach = np.transpose([found.reach for _, found in known])
        ax.errorbar(
            x,
            y,
            reach,
            color=color,
            marker=marker,
            markersize=5,
            linestyle="-" if all(map(_is_number, _labels_of(line))) else "",
            linewidth=1.2,
            capsize=2,
            label=name,
        )
    ax.set_ylim(bottom=0)
    ax.margins(y=0.1)
    ax.set_ylim(0, 1.08 * ax.get_ylim()[1])
    ax.grid(axis="y", linewidth=0.3)
    ax.set_title(panel.title, fontsize=10)
    ax.set_ylabel(panel.unit)

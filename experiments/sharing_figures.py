"""Figures of what sharing and preemption bring, beside the paper's numbers."""

from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from experiments.attribution import Row, find, ratio
from experiments.figures import (
    BLUE,
    GREEN,
    GREY,
    STYLE,
    VERMILION,
    legend_below,
    subplots,
    to_png,
)
from experiments.preemption_figures import draw_preemption
from experiments.sharing_claims import (
    PAPER_PREFIX_SPEEDUP,
    PAPER_SAVING,
    prefix_ways,
)

_BAR = 0.8

# One bar of each group: what it is, its colour, its heights (None: no bar).
_Bars = list[tuple[str, str, list[float | None]]]


def draw(experiment: str, rows: list[Row]) -> dict[str, tuple[str, bytes]]:
    """Draws an experiment's own figures.

    Args:
      experiment: the name of its claims.
      rows: as in `summary.json`, with `key` and `label`.

    Returns:
      Caption and PNG by file name; nothing for experiments without.
    """
    if experiment not in _FIGURES:
        return {}
    name, caption, make = _FIGURES[experiment]
    with matplotlib.rc_context(STYLE):
        return {name: (caption, make(rows))}


def draw_saving(kind: str, key: str, rows: list[Row]) -> bytes:
    """Draws the share of blocks that sharing saves as bars; PNG.

    Args:
      kind: `parallel` or `beam`, as in the paper's figure 15.
      key: the setting that says how many sequences a request has.
      rows: those with sharing are drawn.
    """
    sizes = sorted({row["cell"].get(key) for row in rows} & set(PAPER_SAVING[kind]))
    some = [row for row in rows if row["cell"].get("engine.sharing", True)]
    found = [find(some, **{key: size}) for size in sizes]
    bars: _Bars = [
        ("paper (OPT-13B, Alpaca)", GREY, [PAPER_SAVING[kind][s] for s in sizes]),
        (
            "here",
            BLUE,
            [r if r is None else 100 * r["metrics"]["block_saving"] for r in found],
        ),
    ]
    figure, axes = subplots(1, height=3.6)
    _draw_groups(axes[0], [str(size) for size in sizes], bars, "{:.1f}%")
    axes[0].set_xlabel("sequences of a request" if kind == "parallel" else "beam width")
    axes[0].set_ylabel("% of the blocks")
    axes[0].set_title("Blocks saved by sharing")
    legend_below(figure, axes[0], columns=2)
    return to_png(figure)


def draw_prefix_ratios(rows: list[Row]) -> bytes:
    """Draws throughput over that without sharing, for each way of sharing; PNG."""
    by_workload = {
        name: prefix_ways([r for r in rows if r["cell"]["workload"] == name])
        for name in PAPER_PREFIX_SPEEDUP
        if any(r["cell"]["workload"] == name for r in rows)
    }
    bars: _Bars = [
        (
            "paper (LLaMA-13B, over Orca (Oracle))",
            GREY,
            [PAPER_PREFIX_SPEEDUP[name] for name in by_workload],
        )
    ]
    for way, color in (("registered", BLUE), ("automatic", GREEN)):
        ratios = [ratio(ways[way], ways["none"]) for ways in by_workload.values()]
        bars.append((way, color, ratios))
    figure, axes = subplots(1, height=3.6)
    names = [name.replace("_", " ") for name in by_workload]
    _draw_groups(axes[0], names, bars, "{:.2f}x")
    axes[0].axhline(1, color=VERMILION, linewidth=1, label="without sharing")
    axes[0].set_ylabel("ratio of output tokens/s")
    axes[0].set_title("A prefix that all prompts share")
    legend_below(figure, axes[0], columns=2)
    return to_png(figure)


def _draw_groups(ax: Axes, names: list[str], bars: _Bars, text: str) -> None:
    """Draws bars side by side in groups, with their heights above them."""
    width = _BAR / len(bars)
    middle = np.arange(len(names))
    for number, (label, color, heights) in enumerate(bars):
        place = middle + (number - (len(bars) - 1) / 2) * width
        values = [0.0 if height is None else height for height in heights]
        ax.bar(place, values, width, color=color, edgecolor="white", label=label)
        for x, height in zip(place, heights):
            if height is not None:
                ax.text(x, height, text.format(height), ha="center", va="bottom")
    ax.set_xticks(middle, names)
    ax.tick_params(axis="x", length=0)
    ax.set_ylim(0, 1.1 * ax.get_ylim()[1])


_FIGURES: dict[str, tuple[str, str, Callable[[list[Row]], bytes]]] = {
    "parallel_sampling": (
        "saving.png",
        "Blocks that the sequences of a request need not store, 1 - 1 / mean over "
        "iterations of (logical / physical blocks), beside the paper's figure 15.",
        lambda rows: draw_saving("parallel", "workload.n", rows),
    ),
    "beam_search": (
        "saving.png",
        "Blocks that the beams of a request need not store, 1 - 1 / mean over "
        "iterations of (logical / physical blocks), beside the paper's figure 15.",
        lambda rows: draw_saving("beam", "workload.beam_width", rows),
    ),
    "preemption": (
        "preemption.png",
        "What a preempted sequence takes, swapped out and in or computed again, beside "
        "the paper's figure 19a; and the throughput with either.",
        draw_preemption,
    ),
    "shared_prefix": (
        "prefix_speedup.png",
        "Output tokens per second over those of the same engine without sharing. The "
        "paper's figure 16 compares with another system, at equal latency.",
        draw_prefix_ratios,
    ),
}

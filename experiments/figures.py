"""Figures, drawn from the rows of `summary.json` and the engine's logs."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from experiments.attribution import Row, find
from paged_jax.step_log import Field

# Log and the end of each step in seconds, of the cell with this key.
ReadLog = Callable[[str], tuple[np.ndarray, np.ndarray]]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
VERMILION, PURPLE, GREY = "#D55E00", "#CC79A7", "#BBBBBB"

_PARTS = (
    ("token_states", "token states", BLUE, ""),
    ("reservation", "reservation", SKY, "//"),
    ("internal", "internal fragmentation", ORANGE, "xx"),
    ("external", "external fragmentation and free", "#EEEEEE", ""),
)
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "hatch.linewidth": 0.4,
}


def draw_all(
    rows: list[Row], read_log: ReadLog, swept: list[str]
) -> dict[str, tuple[str, bytes]]:
    """Draws the figures that the cells allow.

    Args:
      rows: as in `summary.json`, with `key` and `label`.
      read_log: reads a cell's log.
      swept: keys of the sweep; one with numbers gets figures against it.

    Returns:
      Caption and PNG by file name.
    """
    figures: dict[str, tuple[str, bytes]] = {}
    with matplotlib.rc_context(STYLE):
        axis = next((k for k in swept if _is_numeric(rows, k)), None)
        if axis is not None:
            figures["against_" + axis.rsplit(".", 1)[-1] + ".png"] = (
                f"Figures of the cells against {axis}.",
                draw_against(rows, axis),
            )
        else:
            figures["utilization.png"] = (
                "Where the slots of the KV pool are, mean over the iterations in which "
                "requests wait: few of them under Poisson arrivals, and if none ever "
                "waits, all iterations.",
                draw_breakdown(rows),
            )
            figures["throughput.png"] = (
                "Output tokens per second, wall clock, and the ratio to the first bar "
                "of each workload.",
                draw_throughput(rows),
            )
        pair = [
            find(rows, workload="offline", memory="max", batching="static"),
            find(rows, workload="offline", memory="paged", batching="continuous"),
        ]
        shown = [row for row in pair if row is not None] or rows[:2]
        figures["occupancy.png"] = (
            "The KV pool while the requests are served: slots that hold a token, slots "
            "granted, slots in all.",
            draw_occupancy(
                [
                    (row["label"], *read_log(row["key"]), row["details"]["total_slots"])
                    for row in shown
                ]
            ),
        )
    return figures


def draw_breakdown(rows: list[Row]) -> bytes:
    """Draws the parts of the pool as stacked bars; PNG."""
    figure, axes = subplots(1, height=1.6 + 0.34 * len(rows))
    left = np.zeros(len(rows))
    for name, label, color, hatch in _PARTS:
        widths = np.array([100 * r["metrics"]["kv_breakdown"][name] for r in rows])
        axes[0].barh(
            range(len(rows)),
            widths,
            left=left,
            color=color,
            hatch=hatch,
            edgecolor="white" if hatch else "#999999",
            linewidth=0.5,
            label=label,
        )
        for i, (start, width) in enumerate(zip(left, widths)):
            if width >= 6:
                dark = name == "token_states"
                axes[0].text(
                    start + width / 2,
                    i,
                    f"{width:.0f}",
                    ha="center",
                    va="center",
                    color="white" if dark else "black",
                    bbox=None
                    if dark or not hatch
                    else {"boxstyle": "round,pad=0.15", "fc": color, "ec": "none"},
                )
        left = left + widths
    _name_bars(axes[0], rows)
    axes[0].set_xlim(0, 100)
    axes[0].set_xlabel("% of all slots")
    axes[0].set_title("KV pool")
    legend_below(figure, axes[0], columns=2)
    return to_png(figure)


def draw_throughput(rows: list[Row]) -> bytes:
    """Draws output tokens per second as bars, with the ratio to a baseline; PNG."""
    figure, axes = subplots(1, height=1.2 + 0.34 * len(rows))
    speeds = [row["metrics"]["output_tokens_per_s"] for row in rows]
    base: dict[str, float] = {}
    bars = []
    for row, speed in zip(rows, speeds):
        first = base.setdefault(row["cell"]["workload"], speed)
        bars.append((speed, speed / first))
    colors = [VERMILION if row["cell"]["memory"] == "paged" else BLUE for row in rows]
    hatches = ["" if r["cell"]["batching"] == "continuous" else "//" for r in rows]
    axes[0].barh(
        range(len(rows)), speeds, color=colors, hatch=hatches, edgecolor="white"
    )
    for i, (speed, times) in enumerate(bars):
        axes[0].text(speed, i, f" {speed:.0f}   {times:.2f}x", va="center")
    _name_bars(axes[0], rows)
    axes[0].set_xlim(0, 1.25 * max(speeds))
    axes[0].xaxis.set_major_locator(MaxNLocator(6))
    axes[0].set_xlabel("output tokens per second")
    axes[0].set_title("Throughput")
    handles = [
        Patch(facecolor=VERMILION, label="paged"),
        Patch(facecolor=BLUE, label="contiguous"),
        Patch(facecolor=GREY, hatch="//", edgecolor="white", label="static batches"),
    ]
    legend_below(figure, axes[0], columns=3, handles=handles)
    return to_png(figure)


def draw_occupancy(runs: list[tuple[str, np.ndarray, np.ndarray, int]]) -> bytes:
    """Draws the pool over time, one panel for each run; PNG.

    Args:
      runs: label, log f32[iterations, F], end of each step f64[iterations] in seconds,
        slots of the pool.
    """
    figure, axes = subplots(len(runs), height=0.7 + 2.2 * len(runs), share_x=True)
    for ax, (label, log, times, total) in zip(axes, runs):
        reserved, live = 100 * log[:, [Field.RESERVED, Field.LIVE]].T / total
        ax.fill_between(times, reserved, step="pre", color=ORANGE, label="reserved")
        ax.fill_between(times, live, step="pre", color=BLUE, label="live")
        ax.axhline(100, color="black", linewidth=1, label="pool")
        mean = np.mean(live[reserved > 0] / reserved[reserved > 0])
        ax.set_title(f"{label}: {100 * mean:.0f}% of what is reserved is live")
        ax.set_ylim(0, 108)
        ax.set_ylabel("% of all slots")
    axes[-1].set_xlim(0, max(times[-1] for _, _, times, _ in runs))
    axes[-1].set_xlabel("seconds")
    legend_below(figure, axes[-1], columns=3)
    return to_png(figure)


def draw_against(rows: list[Row], key: str) -> bytes:
    """Draws the main metrics against a number that was swept; PNG."""
    panels: list[tuple[str, Callable[[Row], Any]]] = [
        ("output tokens per second", lambda r: r["metrics"]["output_tokens_per_s"]),
        ("KV utilisation, %", lambda r: 100 * r["metrics"]["kv_utilization"]),
        ("mean running sequences", lambda r: r["metrics"]["mean_running"]),
        ("scheduling, us per step", lambda r: r["metrics"]["schedule_us"]),
        ("block tables, KiB", lambda r: r["metrics"]["block_table_bytes"] / 1024),
        ("copied on write, MiB", lambda r: r["metrics"]["cow_bytes"] / 2**20),
    ]
    lines: dict[str, list[Row]] = {}
    for row in rows:
        cell = {k: v for k, v in row["cell"].items() if k not in (key, _alias(key))}
        workload = cell["workload"].replace("_", " ")
        name = f"{cell['memory']} + {cell['batching']}, {workload}"
        extra = [
            f"{k} {v}" for k, v in cell.items() if "." in k and _alias(k) not in cell
        ]
        lines.setdefault(", ".join([name, *extra]), []).append(row)
    figure = Figure(figsize=(9, 6.6), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    styles = zip(
        (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY) * 8, ("o", "s", "^", "D") * 12
    )
    for (name, some), (color, marker) in zip(lines.items(), styles):
        some = sorted(some, key=lambda r: r["cell"][key])
        x = [row["cell"][key] for row in some]
        for ax, (_, value) in zip(axes, panels):
            y = [np.nan if value(row) is None else value(row) for row in some]
            ax.plot(x, y, marker=marker, color=color, label=name)
    values = sorted({row["cell"][key] for row in rows})
    for ax, (title, _) in zip(axes, panels):
        ax.set_title(title, fontsize=10)
        ax.set_ylim(0, 1.06 * ax.get_ylim()[1])
        if values[0] > 0 and values[-1] / values[0] >= 4:
            ax.set_xscale("log", base=2)
        ax.set_xticks(values, [f"{v:g}" for v in values], fontsize=8)
        ax.minorticks_off()
        ax.grid(axis="y", linewidth=0.4)
        ax.set_xlabel(key.rsplit(".", 1)[-1].replace("_", " "))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return to_png(figure)


def _is_numeric(rows: list[Row], key: str) -> bool:
    values = {row["cell"].get(key) for row in rows}
    numbers = all(
        isinstance(v, (int, float)) and not isinstance(v, bool) for v in values
    )
    return numbers and len(values) > 2


def _alias(key: str) -> str:
    """The short name under which a cell has a swept key as well."""
    return key.rsplit(".", 1)[-1]


def subplots(
    count: int, height: float, share_x: bool = False
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of the usual width, `height` inches high, and its panels."""
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(count, 1, sharex=share_x, squeeze=False)
    return figure, list(axes[:, 0])


def _name_bars(ax: Axes, rows: list[Row]) -> None:
    names = []
    for row in rows:
        workload = row["cell"]["workload"].replace("_", " ")
        names.append(
            row["label"] + (f"  [{workload}]" if workload != "offline" else "")
        )
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)


def legend_below(
    figure: Figure, ax: Axes, columns: int, handles: list | None = None
) -> None:
    """Puts the legend of one panel, or of these handles, below the figure."""
    found, labels = ax.get_legend_handles_labels()
    if handles is not None:
        found, labels = handles, [handle.get_label() for handle in handles]
    figure.legend(found, labels, loc="outside lower center", ncols=columns)


def to_png(figure: Figure) -> bytes:
    """Returns a figure as a file's content."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()

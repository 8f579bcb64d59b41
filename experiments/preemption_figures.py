"""The figure of swapping against recomputing, beside the paper's."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.attribution import Row
from experiments.figures import BLUE, VERMILION, to_png
from experiments.preemption_claims import (
    PAPER_BLOCK_SIZES,
    PAPER_RECOMPUTE_MS,
    PAPER_SWAP_MS,
    preemption_costs,
)


def draw_preemption(rows: list[Row]) -> bytes:
    """Draws times and throughput against the block size; PNG."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    here, paper, speed = figure.subplots(1, 3)
    costs = preemption_costs(rows)
    tokens = {
        row["details"]["preemption_cost"]["tokens"]
        for row in rows
        if row["details"]["preemption_cost"]
    }
    sizes = sorted(costs)
    for way, style in _STYLES.items():
        times = [1e3 * costs[size][way] for size in sizes]
        here.plot(sizes, times, label=_LABELS[way], **style)
        some = sorted(
            (row for row in rows if row["cell"]["engine.preemption"] == way),
            key=lambda row: row["cell"]["block_size"],
        )
        speed.plot(
            [row["cell"]["block_size"] for row in some],
            [row["metrics"]["output_tokens_per_s"] for row in some],
            **style,
        )
    for way, times in (("swap", PAPER_SWAP_MS), ("recompute", PAPER_RECOMPUTE_MS)):
        paper.plot(PAPER_BLOCK_SIZES, times, **_STYLES[way])
    many = ", ".join(map(str, sorted(tokens)))
    _finish(here, f"Here: {many} tokens, ms")
    here.set_yscale("log")
    here.set_ylim(0.5 * here.get_ylim()[0], 2 * here.get_ylim()[1])
    _finish(paper, "Paper: 256 tokens, ms")
    paper.set_ylim(0, None)
    _finish(speed, "Here: output tokens/s")
    speed.set_ylim(0, 1.06 * speed.get_ylim()[1])
    handles, labels = here.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return to_png(figure)


_STYLES = {
    "swap": {"color": BLUE, "marker": "o"},
    "recompute": {"color": VERMILION, "marker": "s"},
}
_LABELS = {"swap": "swapped out and in", "recompute": "computed again"}


def _finish(ax: Axes, title: str) -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xscale("log", base=2)
    ticks = PAPER_BLOCK_SIZES[::2]
    ax.set_xticks(ticks, [str(size) for size in ticks])
    ax.minorticks_off()
    ax.grid(axis="y", linewidth=0.4)
    ax.set_xlabel("block size")

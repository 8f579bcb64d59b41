"""Fig 19: swapping against recomputing, by block size.

a: what it takes to swap 256 tokens of OPT-13B, or to compute them again. b: how that
shows in the latency of a whole run.
"""

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.attribution import Row, find
from experiments.claim import Claim
from experiments.figures import BLUE, ORANGE, STYLE, VERMILION, to_png
from experiments.simulator.costs import RooflineCosts
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.systems import SETUPS, overheads_of
from experiments.simulator.work import prompt_work, swap_work
from experiments.studies.block_sizes import (
    BLOCK_SIZES,
    DATASETS,
    draw_line,
    latency,
    mark_of,
    name_sizes,
    serving_tasks,
    sizes,
)
from experiments.studies.calibration import SWAPPED_TOKENS
from experiments.studies.paper import SOURCE, numbers
from experiments.studies.seeds import over_seeds
from experiments.studies.serve import serve
from experiments.studies.study import Figures, Scale, Task, seeds_of
from experiments.studies.study_claim import compared_claim, study_claim

TITLE = "Swapping and recomputing"

_WAYS = {
    "recompute": ("recompute", BLUE, "^"),
    "swap_in": ("swap in", ORANGE, "o"),
    "swap_out": ("swap out", VERMILION, "s"),
}
_POLICIES = {"recompute": ("recompute", BLUE, "^"), "swap": ("swap", ORANGE, "o")}
_FITTED = "bandwidth and time of a copy are fitted to these points"
_NOTES = {
    "recompute": "one prompt of 256 tokens; what a step takes while serving is fitted "
    "to these points",
    "swap_in": _FITTED,
    "swap_out": _FITTED,
}


def tasks(scale: Scale) -> list[Task]:
    """Returns one task for all times of a, and those of b."""
    b = [task for way in _POLICIES for task in serving_tasks(scale, way)]
    return [Task("times", {"what": "times"}), *b]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns what a swap takes by block size, or serves a trace."""
    if "what" not in settings:
        return serve(settings)
    return {f"{size}": times(size) for size in BLOCK_SIZES}


def times(block_size: int) -> dict[str, float]:
    """Returns milliseconds for each of the ways, to which a swap adds no other work."""
    setup = SETUPS["opt-13b"]
    costs = RooflineCosts(
        MODELS[setup.model],
        HARDWARE[setup.hardware],
        block_size=block_size,
        overheads=overheads_of("vllm"),
    )
    blocks = SWAPPED_TOKENS / block_size
    without = float(costs(swap_work()))
    return {
        "recompute": 1e3 * float(costs(prompt_work(SWAPPED_TOKENS))),
        "swap_in": 1e3 * (float(costs(swap_work(ins=blocks))) - without),
        "swap_out": 1e3 * (float(costs(swap_work(outs=blocks))) - without),
    }


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the times of a by block size, the latencies of b, and their ratios."""
    made = []
    figure = numbers()["fig19a"]
    for way in _WAYS:
        for size, paper in zip(figure["block_size"], figure[way], strict=True):
            made.append(
                study_claim(
                    f"fig19a.{way}.{size}",
                    over_seeds(
                        rows,
                        lambda m, key=f"{size}", way=way: m[key][way],
                        what="times",
                    ),
                    paper=paper,
                    unit="ms",
                    kind="fitted",
                    source=f"{SOURCE} Fig 19a",
                    note=_NOTES[way],
                )
            )
    for dataset in DATASETS:
        for way in _POLICIES:
            for size in sizes(scale):
                made.append(
                    study_claim(
                        f"fig19b.latency_{dataset}.{way}.{size}",
                        latency(rows, dataset, size, way),
                        paper=None,
                        unit="s/token",
                        kind="predicted",
                        source=f"{SOURCE} Fig 19b",
                        mark=mark_of(scale),
                    )
                )
        for size in sizes(scale):
            made.append(
                compared_claim(
                    f"fig19b.ratio_{dataset}.swap_over_recompute.{size}",
                    latency(rows, dataset, size, "swap"),
                    latency(rows, dataset, size, "recompute"),
                    paper=None,
                    unit="x, latency",
                    kind="predicted",
                    source=f"{SOURCE} Fig 19b",
                    mark=mark_of(scale),
                )
            )
    return made


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws the times, and the latencies of each dataset."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.5), layout="constrained")
        axes = figure.subplots(1, 3)
        _draw_times(axes[0], rows)
        for ax, (dataset, (name, rate)) in zip(axes[1:], DATASETS.items(), strict=True):
            some = list(sizes(scale))
            for way, (label, color, marker) in _POLICIES.items():
                found = [latency(rows, dataset, size, way) for size in some]
                draw_line(ax, some, found, color=color, marker=marker, label=label)
            name_sizes(ax)
            ax.set_yscale("log")
            ax.set_ylabel("normalized latency (s/token)")
            ax.set_title(f"(b) {name}, {rate:g} requests/s", fontsize=10)
            ax.legend()
    caption = (
        "Fig 19: (a) time to swap 256 tokens of OPT-13B in or out, fitted to the "
        "paper's points (hollow), and to compute them again; (b) latency, mean of "
        f"{seeds_of(scale)}."
    )
    if mark := mark_of(scale):
        caption += f" (b) {mark}."
    return {"fig19.png": (caption, to_png(figure))}


def _draw_times(ax: Axes, rows: list[Row]) -> None:
    row, figure = find(rows, what="times"), numbers()["fig19a"]
    for way, (label, color, marker) in _WAYS.items():
        if row is not None:
            y = [row["metrics"][f"{size}"][way] for size in BLOCK_SIZES]
            ax.plot(BLOCK_SIZES, y, color=color, label=label)
        paper = figure[way]
        ax.plot(
            figure["block_size"], paper, marker, color=color, mfc="none", linestyle=""
        )
    name_sizes(ax)
    ax.set_ylim(0)
    ax.set_ylabel("time (ms)")
    ax.set_title("(a) 256 tokens; hollow: paper", fontsize=10)
    ax.legend()

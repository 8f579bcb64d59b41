"""What Figs 18b and 19b share: one load served with blocks of 1 to 256 tokens."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.attribution import Row
from experiments.simulator.systems import BLOCK_SIZE, SETUPS
from experiments.studies.seeds import Estimate, over_seeds
from experiments.studies.study import Scale, Task

BLOCK_SIZES = tuple(2**power for power in range(9))
# The artifact's load points: name, requests/s.
DATASETS = {"sharegpt": ("ShareGPT", 2.01), "alpaca": ("Alpaca", 30.1)}
_SECONDS = 600
_SLOTS = SETUPS["opt-13b"].num_blocks * BLOCK_SIZE


def sizes(scale: Scale) -> tuple[int, ...]:
    """Returns the block sizes of a preset; both ends and 16 are always there."""
    return BLOCK_SIZES[:: max(round(1 / scale.grid), 1)]


def mark_of(scale: Scale) -> str:
    """Returns what is said of a coarser grid; empty if all sizes are there."""
    some, whole = len(sizes(scale)), len(BLOCK_SIZES)
    return scale.marked(f"{some} of {whole} block sizes" if some < whole else "")


def serving_tasks(scale: Scale, preemption: str) -> list[Task]:
    """Returns one task for each block size, dataset and seed.

    The trace is as long as the paper's in every preset.

    Args:
      scale: how much is run.
      preemption: `recompute` or `swap`.
    """
    return [
        Task(
            f"{preemption}-{size}-{dataset}-{seed}",
            {
                "system": "vllm",
                "setup": "opt-13b",
                "dataset": dataset,
                "rate": rate,
                "seconds": _SECONDS,
                "window": [0, _SECONDS],
                "engine": {
                    "block_size": size,
                    "num_blocks": _SLOTS // size,
                    "preemption": preemption,
                },
                "block_size": size,
                "preemption": preemption,
                "seed": seed,
            },
        )
        for size in sizes(scale)
        for dataset, (_, rate) in DATASETS.items()
        for seed in scale.seeds
    ]


def latency(
    rows: list[Row], dataset: str, size: int, preemption: str = "recompute"
) -> Estimate | None:
    """Returns the normalized latency in seconds a token."""
    return over_seeds(
        rows,
        lambda metrics: metrics["normalized_latency_s"],
        dataset=dataset,
        block_size=size,
        preemption=preemption,
    )


def name_sizes(ax: Axes) -> None:
    """Makes the horizontal axis one of block sizes."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    ax.minorticks_off()
    ax.set_xlabel("block size (tokens)")


def draw_line(
    ax: Axes, x: list[int], found: list[Estimate | None], **looks: Any
) -> None:
    """Draws numbers over seeds as a line with their spread."""
    means = [np.nan if one is None else one.mean for one in found]
    spreads = [0.0 if one is None else one.spread / 2 for one in found]
    ax.errorbar(x, means, yerr=spreads, capsize=3, **looks)

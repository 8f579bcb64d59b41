"""Fig 3: three kinds of waste when memory is reserved in one piece.

Two requests are granted memory by the library's own managers, and a part of their
outputs is written; what is drawn is where the chunks then are.
"""

from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.figures import BLUE, GREY, ORANGE, SKY, STYLE, to_png
from experiments.studies.paper import NAMES, SOURCE
from experiments.studies.seeds import over_seeds
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim
from paged_jax.block_pool import init_block_pool, take
from paged_jax.buddy import allocate, init_buddy, order_of
from paged_jax.memory_managers import MANAGERS

TITLE = "Kinds of waste in a contiguous pool"

BLOCK_SIZE, NUM_BLOCKS = 16, 192  # a pool of 128 + 64 blocks
_SYSTEMS = {
    "orca_max": "max",
    "orca_pow2": "pow2",
    "orca_oracle": "oracle",
    "vllm": "paged",
}
# Name, prompt, output written so far, output in all, longest that it may become:
# lengths as ShareGPT and Alpaca have them in the mean (Fig 11), half of it done.
_REQUESTS = (("A", 161, 169, 338, 2048), ("B", 19, 29, 58, 512))
_LOOKS = {
    "prompt": ("prompt", BLUE, ""),
    "output": ("output so far", SKY, ""),
    "reservation": ("reservation: will be written", GREY, "//"),
    "internal": ("internal fragmentation: never used", ORANGE, "xx"),
    "rounding": ("external: rounding of the chunk", "#DDDDDD", ".."),
    "free": ("free: external where too short to be granted", "white", ""),
}
PARTS = ("token_states", "reservation", "internal", "external")


def tasks(scale: Scale) -> list[Task]:
    """Returns one task for each system."""
    del scale  # nothing is drawn at random
    return [Task(system, {"system": system}) for system in _SYSTEMS]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Grants memory to both requests; returns the pieces of the pool, and its parts.

    Each piece is a part, its first slot, how many slots it has, and whose it is. Free
    ones are as the allocator has them: it grants none that spans two.
    """
    manager = MANAGERS[_SYSTEMS[settings["system"]]]
    pieces: list[tuple[str, int, int, str]] = []
    if manager.grows:
        pool = init_block_pool(NUM_BLOCKS)
        for name, prompt, written, final, _ in _REQUESTS:
            count = -(-(prompt + written) // BLOCK_SIZE)
            pool, blocks = take(pool, jnp.ones(count, bool))
            start = (int(blocks.min()) - 1) * BLOCK_SIZE
            ends = (prompt, prompt + written, min(final + prompt, count * BLOCK_SIZE))
            pieces += _pieces(
                name, start, *ends, count * BLOCK_SIZE, count * BLOCK_SIZE
            )
        used = sum(size for _, _, size, _ in pieces)
        pieces.append(("free", used, NUM_BLOCKS * BLOCK_SIZE - used, ""))
    else:
        most = max(longest for *_, longest in _REQUESTS)
        pool = init_buddy(NUM_BLOCKS, most // BLOCK_SIZE)
        for name, prompt, written, final, longest in _REQUESTS:
            reserved = manager.reserve(prompt, final, longest)
            order = order_of(-(-reserved // BLOCK_SIZE))
            pool, block, ok = allocate(pool, order)
            assert bool(ok), "the pool holds both"
            size = BLOCK_SIZE << int(order)
            ends = (prompt, prompt + written, prompt + final, reserved)
            pieces += _pieces(name, (int(block) - 1) * BLOCK_SIZE, *ends, size)
        chunk = np.asarray(pool.chunk)
        for block in np.flatnonzero(chunk > 0):
            size = BLOCK_SIZE << int(chunk[block] - 1)
            pieces.append(("free", (int(block) - 1) * BLOCK_SIZE, size, ""))
    return {"pieces": sorted(pieces, key=lambda p: p[1]), **_shares(pieces)}


def _pieces(
    name: str, start: int, prompt: int, now: int, final: int, reserved: int, size: int
) -> list[tuple[str, int, int, str]]:
    """Returns the parts of a chunk; all but the start are ends counted from there."""
    ends = (0, prompt, now, final, reserved, size)
    parts = ("prompt", "output", "reservation", "internal", "rounding")
    return [
        (part, start + low, high - low, name)
        for part, low, high in zip(parts, ends, ends[1:])
        if high > low
    ]


def _shares(pieces: list[tuple[str, int, int, str]]) -> dict[str, float]:
    """Returns the share of each part, as Fig 2 divides."""
    sums: dict[str, float] = {part: 0.0 for part in PARTS}
    into = {"prompt": "token_states", "output": "token_states"}
    into |= {"rounding": "external", "free": "external"}
    for part, _, size, _ in pieces:
        sums[into.get(part, part)] += size / (NUM_BLOCKS * BLOCK_SIZE)
    return sums


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the share of each part; the paper has words for them, not numbers."""
    del scale
    return [
        study_claim(
            f"fig03.{part}.{system}",
            over_seeds(rows, lambda m, part=part: 100 * m[part], system=system),
            paper=None,
            unit="% of all slots",
            kind="memory",
            source=f"{SOURCE} Fig 3",
            note="two requests of our own choice",
        )
        for part in PARTS
        for system in _SYSTEMS
    ]


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws the pool of each system as a strip."""
    del scale
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 5.2), layout="constrained")
        axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        for ax, row in zip(axes, rows, strict=True):
            _draw_strip(ax, row["metrics"]["pieces"])
            shares = ", ".join(
                f"{part.replace('_', ' ')} {100 * row['metrics'][part]:.0f}%"
                for part in PARTS
            )
            system = row["cell"]["system"]
            ax.set_title(f"{NAMES[system]}: {shares}", fontsize=10)
        axes[-1].set_xlabel("slots of the pool")
        handles = [
            Patch(facecolor=color, hatch=hatch, edgecolor="#555555", label=label)
            for label, color, hatch in _LOOKS.values()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    asked = "; ".join(
        f"{name} has a prompt of {prompt} tokens, {written} of {final} output tokens "
        f"written, and may become {longest} long"
        for name, prompt, written, final, longest in _REQUESTS
    )
    caption = (
        f"Fig 3: a pool of {NUM_BLOCKS * BLOCK_SIZE:,} slots and two requests. {asked}."
    )
    return {"fig03.png": (caption, to_png(figure))}


def _draw_strip(ax: Axes, pieces: list[list]) -> None:
    chunks: dict[str, list[float]] = {}
    for part, start, size, name in pieces:
        _, color, hatch = _LOOKS[part]
        ax.broken_barh(
            [(start, size)],
            (0, 1),
            facecolors=color,
            hatch=hatch,
            edgecolor="#555555",
            linewidth=0.6,
        )
        if size >= 110:
            ax.text(
                start + size / 2,
                0.5,
                str(size),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if part == "prompt" else "black",
                bbox={"boxstyle": "round,pad=0.15", "fc": color, "ec": "none"},
            )
        if name:
            low, high = chunks.get(name, (start, start))
            chunks[name] = [min(low, start), max(high, start + size)]
    for name, (low, high) in chunks.items():
        ax.annotate(
            "",
            (low, 1.12),
            (high, 1.12),
            arrowprops={"arrowstyle": "|-|", "mutation_scale": 3, "linewidth": 0.8},
            annotation_clip=False,
        )
        ax.text((low + high) / 2, 1.18, name, ha="center", va="bottom", fontsize=9)
    ax.set_xlim(0, NUM_BLOCKS * BLOCK_SIZE)
    ax.set_ylim(0, 1.45)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)

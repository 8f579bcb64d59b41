"""Fig 18b: normalized latency against block size.

What a block size changes in the simulation: how much of the pool the last blocks of the
sequences leave unused, and, for blocks of less than 64 bytes of keys a piece, what the
attention kernel reads in vain (`simulator.costs`). Nothing is fitted to the figure.
"""

from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.figures import BLUE, STYLE, to_png
from experiments.studies.block_sizes import (
    DATASETS,
    draw_line,
    latency,
    mark_of,
    name_sizes,
    serving_tasks,
    sizes,
)
from experiments.studies.paper import SOURCE, numbers
from experiments.studies.seeds import Estimate, compare
from experiments.studies.serve import serve
from experiments.studies.study import Figures, Scale, Task, seeds_of
from experiments.studies.study_claim import study_claim

TITLE = "Latency against block size"


def tasks(scale: Scale) -> list[Task]:
    """Returns one task for each block size, dataset and seed."""
    return serving_tasks(scale, "recompute")


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Serves the trace."""
    return serve(settings)


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the latency by block size, and the block size that has the least."""
    made = []
    for dataset in DATASETS:
        paper = _paper(dataset)
        for size in sizes(scale):
            made.append(
                study_claim(
                    f"fig18b.latency.{dataset}.{size}",
                    latency(rows, dataset, size),
                    paper=paper.get(size),
                    unit="s/token",
                    kind="predicted",
                    source=f"{SOURCE} Fig 18b",
                    mark=mark_of(scale),
                    note="the load is near the capacity, where latency is steep",
                )
            )
        some = {size: paper[size] for size in sizes(scale) if paper}
        of_paper = min(some, key=some.__getitem__) if some else None
        best, words = _best(rows, dataset, scale, of_paper)
        made.append(
            study_claim(
                f"fig18b.best_block.{dataset}",
                best,
                paper=of_paper,
                unit="tokens in a block",
                kind="predicted",
                source=f"{SOURCE} Fig 18b",
                mark=mark_of(scale),
                of_seeds=words,
                note=f"of {', '.join(map(str, sizes(scale)))}",
            )
        )
    return made


def _paper(dataset: str) -> dict[int, float]:
    figure = numbers()["fig18b"]
    return dict(zip(figure["block_size"], figure.get(dataset, ())))


def _best(
    rows: list[Row], dataset: str, scale: Scale, of_paper: int | None
) -> tuple[Estimate | None, str]:
    """Returns the block size of the least latency, and how others compare with it.

    The size is that of the mean latencies; its spread, that of the best of each seed.
    Whether another is as good is for the latencies to say, not for that.
    """
    found = _latencies(rows, dataset, scale)
    if not found:
        return None, ""
    best, *others = sorted(found, key=lambda size: found[size].mean)
    seeds = {row["cell"]["seed"] for row in rows}
    each = []
    for seed in seeds:
        of_seed = [row for row in rows if row["cell"]["seed"] == seed]
        some = _latencies(of_seed, dataset, scale)
        if some:
            each.append(min(some, key=lambda size, some=some: some[size].mean))
    words = [] if len(each) > 1 else ["one seed: no spread is known"]
    named = {"next best": others[0] if others else None, "paper's": of_paper}
    for name, size in named.items():
        if size in others:
            compared = compare(found[size], found[best])
            words.append(f"the {name} is {size}: in latency {compared.words}")
    spread = float(max(each) - min(each))
    return Estimate(float(best), spread, len(each)), "; ".join(words)


def _latencies(rows: list[Row], dataset: str, scale: Scale) -> dict[int, Estimate]:
    found = {size: latency(rows, dataset, size) for size in sizes(scale)}
    return {size: one for size, one in found.items() if one is not None}


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws a panel for each dataset, with the paper's line."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        axes = figure.subplots(1, len(DATASETS))
        for ax, (dataset, (name, rate)) in zip(axes, DATASETS.items(), strict=True):
            some = list(sizes(scale))
            found = [latency(rows, dataset, size) for size in some]
            draw_line(ax, some, found, color=BLUE, marker="o", label="here")
            if paper := _paper(dataset):
                ax.plot(*zip(*paper.items()), "k--s", mfc="none", label="paper")
            name_sizes(ax)
            ax.set_yscale("log")
            ax.set_title(f"{name}, {rate:g} requests/s")
            ax.legend()
        axes[0].set_ylabel("normalized latency (s/token)")
    caption = (
        "Fig 18b: latency of OPT-13B by block size, mean of "
        f"{seeds_of(scale)}; nothing is fitted to it."
    )
    if mark := mark_of(scale):
        caption += f" {mark.capitalize()}."
    return {"fig18b.png": (caption, to_png(figure))}

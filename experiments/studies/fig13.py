"""Fig 13: how many requests run at once, by system."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.figures import BLUE, STYLE, to_png
from experiments.studies.paper import NAMES, SOURCE, numbers
from experiments.studies.seeds import over_seeds
from experiments.studies.serve import serve
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim

TITLE = "Requests that run at once"

SYSTEMS = ("orca_max", "orca_pow2", "orca_oracle", "vllm")
# The artifact's load points: dataset, requests/s; it leaves the first ten minutes out.
_PANELS = {"a": ("sharegpt", 2.0), "b": ("alpaca", 30.0)}
_SECONDS, _FROM = 3600, 600


def tasks(scale: Scale) -> list[Task]:
    """Returns one task for each panel, system and seed."""
    seconds = _SECONDS * scale.time_share
    return [
        Task(
            f"{panel}-{system}-{seed}",
            {
                "panel": panel,
                "system": system,
                "setup": "opt-13b",
                "dataset": dataset,
                "rate": rate,
                "seconds": seconds,
                "window": [_FROM * scale.time_share, seconds],
                "means_only": True,
                "seed": seed,
            },
        )
        for panel, (dataset, rate) in _PANELS.items()
        for system in SYSTEMS
        for seed in scale.seeds
    ]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Serves the trace."""
    rest = {key: value for key, value in settings.items() if key != "panel"}
    return serve(rest)


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the mean number of running requests, by panel and system."""
    return [
        study_claim(
            f"fig13{panel}.batched.{system}",
            over_seeds(rows, _running, panel=panel, system=system),
            paper=_paper(panel, system),
            unit="requests",
            # What vLLM batches depends on how long its steps take, and so on Fig 1.
            kind="fitted" if system == "vllm" else "memory",
            source=f"{SOURCE} Fig 13{panel}",
            scale=scale,
        )
        for panel in _PANELS
        for system in SYSTEMS
    ]


def _running(metrics: dict[str, Any]) -> float:
    return metrics["mean_running"]


def _paper(panel: str, system: str) -> float | None:
    return numbers().get(f"fig13{panel}", {}).get("requests", {}).get(system)


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws the bars, the paper's numbers as marks."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots(1, 2)
        places = np.arange(len(SYSTEMS))
        for ax, (panel, (dataset, rate)) in zip(axes, _PANELS.items(), strict=True):
            found = [
                over_seeds(rows, _running, panel=panel, system=system)
                for system in SYSTEMS
            ]
            means = [np.nan if one is None else one.mean for one in found]
            spreads = [0.0 if one is None else one.spread / 2 for one in found]
            bars = ax.bar(places, means, yerr=spreads, color=BLUE, width=0.6, capsize=3)
            ax.bar_label(bars, fmt="%.1f", padding=3)
            paper = [_paper(panel, system) for system in SYSTEMS]
            if any(paper):
                shown = [np.nan if one is None else one for one in paper]
                ax.plot(places, shown, "k_", markersize=34, label="paper")
                ax.legend()
            ax.set_xticks(places, [NAMES[s].replace(" ", "\n") for s in SYSTEMS])
            ax.set_title(f"({panel}) {_DATASETS[dataset]}, {rate:g} requests/s")
            ax.set_ylim(0, 1.15 * np.nanmax([1.0, *means, *filter(None, paper)]))
        axes[0].set_ylabel("requests that run at once")
    caption = "Fig 13: running requests, mean over iterations (OPT-13B)."
    if scale.mark:
        caption += f" {scale.mark}."
    return {"fig13.png": (caption, to_png(figure))}


_DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}

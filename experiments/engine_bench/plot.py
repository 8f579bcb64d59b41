"""The comparison as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.engine_bench.engines import OURS
from experiments.figures import BLUE, GREY, STYLE

SUFFIXES = (".png", ".svg")


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws output tokens a second of each engine, the runs beside each other.

    Args:
      runs: from `report.describe_run`.
      path: the file, a PNG or an SVG.
    """
    style: dict[Any, Any] = STYLE | {"svg.hashsalt": "engines"}
    with matplotlib.rc_context(style):
        names = list(runs[0]["engines"])
        figure = Figure(
            figsize=(1.5 + 3.2 * len(runs), 1.2 + 0.35 * len(names)),
            layout="constrained",
        )
        panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
        for axes, run in zip(panels, runs):
            rates = [run["engines"][name]["output_tokens_per_s"] for name in names]
            bars = axes.barh(
                names,
                [rate or 0 for rate in rates],
                color=[BLUE if name == OURS else GREY for name in names],
            )
            labels = [f"{rate:.0f}" if rate else "not run" for rate in rates]
            axes.bar_label(bars, labels, padding=3)
            axes.margins(x=0.2)
            plural = "s" if run["threads"] > 1 else ""
            axes.set_title(f"{run['dtype']}, {run['threads']} thread{plural}")
            axes.set_xlabel("output tokens/s")
        panels[0].invert_yaxis()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})

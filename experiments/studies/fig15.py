"""Fig 15: blocks saved by sharing them among the sequences of a request."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.figures import BLUE, STYLE, to_png
from experiments.studies.panels import BEAMS_ASSUMED
from experiments.studies.paper import SOURCE, numbers
from experiments.studies.seeds import Estimate, over_seeds
from experiments.studies.serve import serve
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim

TITLE = "Blocks saved by sharing"

WIDTHS = (2, 4, 6)
_METHODS = {"parallel": ("n", "parallel sampling"), "beam": ("beam_width", "beams")}
# The artifact's load for Alpaca; for ShareGPT, which the paper gives in a sentence, one
# that is as far above what is served.
_RATES = {"alpaca": 20.0, "sharegpt": 2.0}
_SECONDS, _FROM = 900, 300
# Where traces are cut short, those of beams are: their steps take the longest to
# simulate.
_SHORT = 3
_NOTES = {
    "parallel": "lengths of prompt and output drawn apart; there they are one text's",
    "beam": BEAMS_ASSUMED,
}


def tasks(scale: Scale) -> list[Task]:
    """Returns one task for each dataset, method, number of sequences and seed.

    The trace is as long as the paper's, or for beams a third of it.
    """
    return [
        Task(
            f"{dataset}-{method}-{width}-{seed}",
            {
                "method": method,
                "width": width,
                "system": "vllm",
                "setup": "opt-13b",
                "dataset": dataset,
                "rate": rate,
                "seconds": _SECONDS // _cut(method, scale),
                "window": [x // _cut(method, scale) for x in (_FROM, _SECONDS)],
                "means_only": True,
                "seed": seed,
            },
        )
        for method in _METHODS
        for width in WIDTHS
        for dataset, rate in _RATES.items()
        for seed in scale.seeds
    ]


def _cut(method: str, scale: Scale) -> int:
    return _SHORT if method == "beam" and scale.time_share < 1 else 1


def _mark(method: str, scale: Scale) -> str:
    cut = _cut(method, scale) > 1
    return scale.marked("a third of the paper's trace" if cut else "")


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Serves the trace."""
    rest = {k: v for k, v in settings.items() if k not in ("method", "width")}
    key, _ = _METHODS[settings["method"]]
    return serve(rest | {key: settings["width"]})


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the saving of each method and width, by dataset."""
    made = []
    for dataset in _RATES:
        quantity = "saving" if dataset == "alpaca" else f"saving_{dataset}"
        for method in _METHODS:
            for width in WIDTHS:
                note = _NOTES[method]
                if dataset == "sharegpt":
                    note += "; the load is assumed, the paper gives a range"
                made.append(
                    study_claim(
                        f"fig15.{quantity}.{method}.{width}",
                        _saving(rows, dataset, method, width),
                        paper=_paper(dataset, method, width),
                        unit="% of the blocks",
                        kind="memory" if method == "parallel" else "predicted",
                        source=f"{SOURCE} Fig 15",
                        points=True,
                        mark=_mark(method, scale),
                        note=note,
                    )
                )
    return made


def _saving(rows: list[Row], dataset: str, method: str, width: int) -> Estimate | None:
    return over_seeds(
        rows,
        lambda metrics: 100 * metrics["block_saving"],
        dataset=dataset,
        method=method,
        width=width,
    )


def _paper(dataset: str, method: str, width: int) -> float | None:
    """Returns the paper's number; of a range its ends, for the fewest and the most."""
    figure = numbers()["fig15"]
    if dataset == "alpaca":
        return figure[method][str(width)]
    ends: dict[int, float] = dict(
        zip((WIDTHS[0], WIDTHS[-1]), figure["sharegpt_ranges"][method])
    )
    return ends.get(width)


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws the bars, the paper's numbers as marks."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5.6), layout="constrained")
        axes = figure.subplots(2, 2, sharey="row", sharex="col")
        places = np.arange(len(WIDTHS))
        for line, dataset in zip(axes, _RATES, strict=True):
            for ax, (method, (_, name)) in zip(line, _METHODS.items(), strict=True):
                found = [_saving(rows, dataset, method, width) for width in WIDTHS]
                means = [np.nan if one is None else one.mean for one in found]
                spreads = [0.0 if one is None else one.spread / 2 for one in found]
                ax.bar(places, means, yerr=spreads, color=BLUE, width=0.6, capsize=3)
                paper = [_paper(dataset, method, width) for width in WIDTHS]
                shown = [np.nan if one is None else one for one in paper]
                ax.plot(places, shown, "k_", markersize=44)
                # Above the bar, and above the paper's mark.
                above = np.fmax(np.add(means, spreads), shown) - means
                labels = [f"{mean:.1f}%" for mean in means]
                for place, mean, room, label in zip(
                    places, means, above, labels, strict=True
                ):
                    ax.text(place, mean + room, label, ha="center", va="bottom")
                ax.set_xticks(places, [str(width) for width in WIDTHS])
                ax.set_title(f"{_DATASETS[dataset]}, {name}")
                ax.margins(y=0.15)
            line[0].set_ylabel("blocks saved (%)")
        for ax in axes[-1]:
            ax.set_xlabel("sequences of a request")
        axes[0, 0].plot([], [], "k-", label="paper")
        axes[0, 0].legend(loc="upper left")
    caption = (
        "Fig 15: 1 - 1 / (logical / physical blocks, mean over iterations), OPT-13B. "
        "Of ShareGPT the paper gives the ends of a range."
    )
    if mark := _mark("beam", scale):
        caption += f" Beams, {mark}."
    return {"fig15.png": (caption, to_png(figure))}


_DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}

"""Fig 2: where the slots of the KV cache are, while requests wait for some."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.figures import BLUE, ORANGE, SKY, to_png
from experiments.studies.paper import NAMES, SOURCE, numbers
from experiments.studies.seeds import Estimate, over_seeds
from experiments.studies.serve import serve
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim

TITLE = "Where the slots of the KV cache are"

SYSTEMS = ("orca_max", "orca_pow2", "orca_oracle", "vllm")
PARTS = ("token_states", "reservation", "internal", "external")
# The artifact's load: far above what any of the systems serves.
_RATE, _SECONDS, _FROM = 4.0, 900, 300
_LOOKS = {
    "token_states": ("token states", BLUE, ""),
    "reservation": ("reservation", SKY, "//"),
    "internal": ("internal fragmentation", ORANGE, "xx"),
    "external": ("external fragmentation and others", "#EEEEEE", ""),
}


def tasks(scale: Scale) -> list[Task]:
    """Returns one task for each system and seed.

    The trace is as long as the paper's in every preset: it takes a second.
    """
    return [
        Task(f"{system}-{seed}", overload(system, seed))
        for system in SYSTEMS
        for seed in scale.seeds
    ]


def overload(system: str, seed: int) -> dict[str, Any]:
    """Returns the settings of a run in which requests always wait."""
    return {
        "system": system,
        "setup": "opt-13b",
        "dataset": "sharegpt",
        "rate": _RATE,
        "seconds": _SECONDS,
        "window": [_FROM, _SECONDS],
        "means_only": True,
        "seed": seed,
    }


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Serves the trace."""
    return serve(settings)


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the share of each part for each system."""
    del scale  # in every preset the same
    made = []
    for part_number, part in enumerate(PARTS):
        for system in SYSTEMS:
            paper = numbers()["fig02"]["percent"][system][part_number]
            made.append(
                study_claim(
                    f"fig02.{part}.{system}",
                    _found(rows, part, system),
                    paper=paper,
                    unit="% of all slots",
                    kind="memory",
                    source=f"{SOURCE} Fig 2",
                    points=True,
                    note=_NOTES.get((part, system), ""),
                )
            )
    return made


_HALVES = "half of what is granted and not filled, as the paper's figure has it"
_NOTES = {("reservation", "vllm"): _HALVES, ("internal", "vllm"): _HALVES}


def _found(rows: list[Row], part: str, system: str) -> Estimate | None:
    """Returns a part in percent; of vLLM as the paper draws it."""

    def share(metrics: dict[str, Any]) -> float:
        parts = (part,)
        if (part, system) in _NOTES:
            parts = ("reservation", "internal")
        shares = [metrics[f"kv_breakdown.{one}"] for one in parts]
        return 100 * sum(shares) / len(shares)

    return over_seeds(rows, share, system=system)


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws the stacked bars, the paper's beside ours."""
    del scale
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    ax = figure.subplots()
    places = np.arange(len(SYSTEMS))
    for ours in (True, False):
        bottom = np.zeros(len(SYSTEMS))
        for number, part in enumerate(PARTS):
            label, color, hatch = _LOOKS[part]
            values = np.array(
                [
                    _mean(rows, part, system)
                    if ours
                    else numbers()["fig02"]["percent"][system][number]
                    for system in SYSTEMS
                ]
            )
            ax.bar(
                places + (0.2 if ours else -0.2),
                values,
                0.38,
                bottom=bottom,
                color=color,
                hatch=hatch,
                edgecolor="white",
                alpha=1.0 if ours else 0.55,
                label=label if ours else None,
            )
            for x, value, low in zip(places, values, bottom, strict=True):
                if value > 5:
                    ax.text(
                        x + (0.2 if ours else -0.2),
                        low + value / 2,
                        f"{value:.1f}",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="white" if ours and part == "token_states" else "black",
                    )
            bottom += np.nan_to_num(values)
    ax.set_xticks(places, [f"{NAMES[s]}\npaper | here" for s in SYSTEMS])
    ax.set_ylabel("KV cache usage (%)")
    figure.legend(loc="outside upper center", ncols=2)
    caption = (
        "Fig 2: shares of all slots, mean over the iterations in which requests wait "
        f"({_RATE:g} requests/s of ShareGPT, OPT-13B); left of each pair the paper's."
    )
    return {"fig02.png": (caption, to_png(figure))}


def _mean(rows: list[Row], part: str, system: str) -> float:
    found = _found(rows, part, system)
    return np.nan if found is None else found.mean

"""Table 1, and Fig 1 (left): what the GPUs' memory holds."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.figures import BLUE, GREY, ORANGE, STYLE, VERMILION, to_png
from experiments.simulator.hardware import GIB, HARDWARE
from experiments.simulator.memory_split import split_memory
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.systems import BLOCK_SIZE, SETUPS
from experiments.studies.paper import SOURCE, numbers
from experiments.studies.seeds import over_seeds
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim

TITLE = "What the GPUs' memory holds"

_MODELS = ("opt-13b", "opt-66b", "opt-175b")
_QUANTITIES = {
    "slots": ("slots", "slots"),
    "kv_gb": ("kv_gb", "GiB"),
    "weights_gb": ("weights_gb", "GB"),
}
# The artifact copies some small weights to every GPU.
_NOTE = (
    "an even split of all weights; the paper's set-up gives {} blocks, which are used"
)
# Of the bar, in this order.
PARTS = {
    "weights": ("parameters", BLUE),
    "kv": ("KV cache", ORANGE),
    "activations": ("activations", VERMILION),
    "other": ("other, and left free", GREY),
}


def tasks(scale: Scale) -> list[Task]:
    """Returns a task for each model."""
    del scale  # nothing is drawn at random
    return [Task(setup, {"setup": setup}) for setup in _MODELS]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Divides the memory; all bytes are of all GPUs together."""
    return divide(settings["setup"])


def divide(setup_name: str) -> dict[str, Any]:
    """Returns slots, and the parts of the memory of all GPUs in bytes."""
    setup = SETUPS[setup_name]
    hardware, devices = HARDWARE[setup.hardware], setup.num_devices
    split = split_memory(MODELS[setup.model], hardware, devices)
    total = hardware.memory_bytes
    parts = {
        "weights": split.weights,
        "kv": split.kv,
        "activations": split.activations,
        "other": total - split.weights - split.kv - split.activations,
    }
    return {
        "slots": split.num_blocks * BLOCK_SIZE,
        "kv_gb": split.kv * devices / GIB,
        "weights_gb": split.weights * devices / 1e9,
        "total": total * devices,
        **{name: nbytes * devices for name, nbytes in parts.items()},
    }


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns slots, KV memory and weights of each model."""
    del scale
    return [
        study_claim(
            f"table1.{quantity}.{short_name(name)}",
            over_seeds(rows, lambda m, key=key: m[key], setup=name),
            paper=numbers()["table1"][quantity][short_name(name)],
            unit=unit,
            kind="memory",
            source=f"{SOURCE} Table 1",
            note=_NOTE.format(SETUPS[name].num_blocks) if quantity == "slots" else "",
        )
        for quantity, (key, unit) in _QUANTITIES.items()
        for name in _MODELS
    ]


def short_name(setup: str) -> str:
    """Returns a set-up's name as claims have it, such as `opt13b`."""
    return setup.replace("-", "")


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws what fills the memory, with the paper's numbers as marks."""
    del scale
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        ax = figure.subplots()
        labels = []
        for place, row in enumerate(rows):
            name, metrics = row["cell"]["setup"], row["metrics"]
            setup, paper = SETUPS[name], numbers()["table1"]
            left = 0.0
            for part, (label, color) in PARTS.items():
                share = 100 * metrics[part] / metrics["total"]
                ax.barh(
                    place,
                    share,
                    left=left,
                    color=color,
                    edgecolor="white",
                    label=label if place == 0 else None,
                )
                if share > 7.5:
                    ax.text(
                        left + share / 2,
                        place,
                        f"{metrics[part] / GIB:.0f} GiB\n{share:.0f}%",
                        ha="center",
                        va="center",
                        fontsize=9,
                        color="white" if part == "weights" else "black",
                    )
                left += share
            key = short_name(name)
            ends = np.cumsum(
                [paper["weights_gb"][key] * 1e9, paper["kv_gb"][key] * GIB]
            )
            ax.plot(
                100 * ends / metrics["total"],
                [place, place],
                "k|",
                markersize=46,
                markeredgewidth=1.5,
            )
            labels.append(
                f"{setup.model.upper()}\n{setup.num_devices} x "
                f"{HARDWARE[setup.hardware].name}\n{metrics['slots']:,} slots\n"
                f"(paper {paper['slots'][key] / 1e3:g}K)"
            )
        ax.set_yticks(range(len(rows)), labels, fontsize=9)
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_xlim(0, 100)
        ax.set_xlabel("% of the usable memory")
        mark = Line2D([], [], color="black", marker="|", linestyle="", markersize=12)
        mark.set_label("ends in the paper")
        handles = [*ax.get_legend_handles_labels()[0], mark]
        figure.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=9)
        caption = "Table 1: what the memory of all GPUs of a model holds."
        return {"table1.png": (caption, to_png(figure))}

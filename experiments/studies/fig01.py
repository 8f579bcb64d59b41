"""Fig 1: what fills a GPU, and what throughput its batch size gives."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.attribution import Row, find
from experiments.claim import Claim
from experiments.figures import BLUE, STYLE, VERMILION, to_png
from experiments.simulator.costs import RooflineCosts
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.systems import BLOCK_SIZE, PAPER_OVERHEADS, SETUPS
from experiments.simulator.work import decode_work
from experiments.studies.calibration import context_of_fig1
from experiments.studies.fig02 import overload
from experiments.studies.paper import SOURCE, numbers
from experiments.studies.seeds import Estimate, over_seeds
from experiments.studies.serve import serve
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim
from experiments.studies.table1 import PARTS, divide

TITLE = "Memory of a GPU, batch size and throughput"

# What the figure calls the existing systems is Orca (Max): 2048 tokens for each.
_SYSTEMS = {"orca_max": ("existing", VERMILION), "vllm": ("vllm", BLUE)}
_SETUP = "opt-13b"
_FITTED = "step and row overheads are fitted to these ten points"


def tasks(scale: Scale) -> list[Task]:
    """Returns one task for memory and step times, and one for each system and seed."""
    return [
        Task("model", {"what": "model"}),
        *(
            Task(f"{system}-{seed}", {"what": "requests", **overload(system, seed)})
            for system in _SYSTEMS
            for seed in scale.seeds
        ),
    ]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the memory's parts and the throughput by batch, or serves a trace."""
    if settings["what"] == "requests":
        rest = {key: value for key, value in settings.items() if key != "what"}
        return serve(rest)
    batches = [batch for batch, _ in numbers()["fig01"]["throughput"]]
    return {
        "throughput": {f"{batch:g}": throughput(batch) for batch in batches},
        "memory": divide(_SETUP),
    }


def throughput(batch: float) -> float:
    """Returns the tokens a second of so many sequences that decode."""
    setup = SETUPS[_SETUP]
    costs = RooflineCosts(
        MODELS[setup.model], HARDWARE[setup.hardware], overheads=PAPER_OVERHEADS
    )
    return batch / float(costs(decode_work(batch, context_of_fig1())))


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns throughput by batch, the memory's parts, and what a request takes."""
    del scale  # in every preset the same
    made = []
    for batch, paper in numbers()["fig01"]["throughput"]:
        key = f"{batch:g}"
        made.append(
            study_claim(
                f"fig01.throughput.vllm.{key}",
                over_seeds(rows, lambda m, key=key: m["throughput"][key], what="model"),
                paper=paper,
                unit="tokens/s",
                kind="fitted",
                source=f"{SOURCE} Fig 1",
                note=_FITTED,
            )
        )
    for part in PARTS:
        made.append(
            study_claim(
                f"fig01.share.{part}",
                over_seeds(
                    rows,
                    lambda m, part=part: 100 * m["memory"][part] / m["memory"]["total"],
                    what="model",
                ),
                paper=None,
                unit="% of the usable memory",
                kind="memory",
                source=f"{SOURCE} Fig 1",
            )
        )
    for system, (name, _) in _SYSTEMS.items():
        (_, none), (requests, full) = numbers()["fig01"]["memory_gb"][name]
        made.append(
            study_claim(
                f"fig01.gb_per_request.{system}",
                _gb_per_request(rows, system),
                paper=(full - none) / requests,
                unit="GB",
                kind="memory",
                source=f"{SOURCE} Fig 1",
                note=_NOTES[system],
            )
        )
    return made


_NOTES = {
    "orca_max": "slope of the drawn line",
    "vllm": "slope of the drawn line, which has as many requests as Fig 2's do not fit",
}


def _gb_per_request(rows: list[Row], system: str) -> Estimate | None:
    """Returns what a running request has of the pool, rounding of chunks apart."""
    slots = SETUPS[_SETUP].num_blocks * BLOCK_SIZE
    pool = slots * MODELS[_SETUP].kv_bytes_per_token / 1e9

    def read(metrics: dict[str, Any]) -> float:
        parts = ("token_states", "reservation", "internal")
        share = sum(metrics[f"kv_breakdown.{part}"] for part in parts)
        return pool * share / metrics["mean_running"]

    return over_seeds(rows, read, system=system)


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws the memory's parts, memory against requests, throughput against batch."""
    del scale
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.subplot_mosaic([["parts", "memory"], ["parts", "speed"]])
        model = find(rows, what="model")
        if model is not None:
            _draw_parts(axes["parts"], model["metrics"]["memory"])
            _draw_speed(axes["speed"], model["metrics"]["throughput"])
        _draw_memory(axes["memory"], rows)
        axes["memory"].sharex(axes["speed"])
        figure.legend(
            *axes["memory"].get_legend_handles_labels(),
            loc="outside lower right",
            ncols=4,
            fontsize=9,
        )
    caption = (
        "Fig 1: memory of OPT-13B on an A100 40GB; memory in use by requests that run; "
        "throughput by batch size, whose overheads are fitted to the paper's points."
    )
    return {"fig01.png": (caption, to_png(figure))}


def _draw_parts(ax: Axes, memory: dict[str, float]) -> None:
    sizes = [memory[part] for part in PARTS]
    names = [
        f"{label}: {size / 1e9:.1f} GB, {100 * size / memory['total']:.0f}%"
        for (label, _), size in zip(PARTS.values(), sizes, strict=True)
    ]
    wedges, *_ = ax.pie(
        sizes,
        colors=[color for _, color in PARTS.values()],
        startangle=90,
        counterclock=False,
        wedgeprops={"edgecolor": "white"},
    )
    ax.legend(
        wedges,
        names,
        title="A100 40GB, OPT-13B",
        loc="upper center",
        bbox_to_anchor=(0.5, 0.05),
        fontsize=9,
    )


def _draw_memory(ax: Axes, rows: list[Row]) -> None:
    memory = divide(_SETUP)
    bottom, top = memory["weights"] / 1e9, (memory["weights"] + memory["kv"]) / 1e9
    for system, (name, color) in _SYSTEMS.items():
        label = "existing systems" if name == "existing" else "vLLM"
        found = _gb_per_request(rows, system)
        if found is not None:
            most = (top - bottom) / found.mean
            ax.plot([0, most], [bottom, top], color=color, label=label)
        x, y = np.array(numbers()["fig01"]["memory_gb"][name]).T
        ax.plot(x, y, "o", color=color, mfc="none", label=f"{label}, paper")
    ax.axhline(bottom, color="black", linewidth=0.8, linestyle=":")
    ax.text(40, bottom, "parameters", ha="right", va="bottom", fontsize=8)
    ax.set_ylabel("memory (GB)")
    ax.set_ylim(20, 42)


def _draw_speed(ax: Axes, found: dict[str, float]) -> None:
    batches = np.linspace(1, 40, 40)
    ax.plot(batches, [throughput(batch) for batch in batches], color=BLUE)
    x, y = np.array(numbers()["fig01"]["throughput"]).T
    ax.plot(x, y, "o", color=BLUE, mfc="none")
    ax.set_ylim(0, 1.1 * max(*y, *found.values()))
    ax.set_ylabel("tokens/s")
    ax.set_xlabel("batch size (requests)")

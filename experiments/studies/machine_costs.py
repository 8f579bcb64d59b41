"""The cost model beside the real engine on this machine: predicted and measured steps.

The machine's own limits are measured first, in the same process; the cost model knows
it by them, as it knows an A100 by its data sheet. What a step takes beyond that is
fitted on half of the points, and judged on the others.
"""

import statistics
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.figures import BLUE, GREY, ORANGE, to_png
from experiments.machine_speed import Speed, measure_speed
from experiments.simulator.costs import RooflineCosts
from experiments.simulator.hardware import Hardware
from experiments.simulator.model_profiles import profile_of
from experiments.simulator.work import decode_work
from experiments.step_bench import StepBench
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim

TITLE = "The cost model beside the real engine"

_BATCHES, _CONTEXTS, _STEPS = (1, 2, 4, 8, 16, 32, 64), (64, 256, 512), 8


def tasks(scale: Scale) -> list[Task]:
    """Returns one task: steps that are timed must not run side by side."""
    settings = {
        "model": "smollm2-135m",
        "dtype": "float32",
        "batches": list(_BATCHES),
        "contexts": list(_CONTEXTS),
        "steps": _STEPS,
        "repeats": 5 if scale.name == "full" else 3,
    }
    return [Task("steps", settings)]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Times steps that only decode, and predicts them."""
    # Here, since no other study needs a model.
    from experiments.models import load_model
    from paged_jax.models.packed import pack_model

    model = pack_model(load_model(settings["model"], settings["dtype"]))
    points = [(b, c) for b in settings["batches"] for c in settings["contexts"]]
    steps, repeats = settings["steps"], settings["repeats"]
    speed = measure_speed(2 * repeats)
    bench = StepBench(model, points, steps)
    measured: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for repeat in range(repeats + 1):
        for point in points:
            seconds = bench.step_seconds(*point, steps)
            if repeat:  # the first time warms up
                measured[point].append(seconds)
    profile = profile_of(settings["model"], model.config)
    costs = RooflineCosts(profile, this_machine(speed))
    # In the middle of the steps that are timed; a token sees itself.
    seen = [context + 2 + steps // 2 for _, context in points]
    physics = [
        float(costs(decode_work(batch, slots)))
        for (batch, _), slots in zip(points, seen, strict=True)
    ]
    times = [statistics.median(measured[point]) for point in points]
    batches = [batch for batch, _ in points]
    half = slice(None, None, 2)
    step_s, row_s = fit_overheads(batches[half], physics[half], times[half])
    fitted = [p + step_s + row_s * b for p, b in zip(physics, batches, strict=True)]
    return {
        "gb_per_s": speed.bandwidth / 1e9,
        "gflops": speed.flops / 1e9,
        "step_s": step_s,
        "row_s": row_s,
        "points": [
            {
                "batch": batch,
                "context": context,
                "measured_s": times[i],
                "physics_s": physics[i],
                "fitted_s": fitted[i],
                "held_out": i % 2 == 1,
            }
            for i, (batch, context) in enumerate(points)
        ],
    }


def this_machine(speed: Speed) -> Hardware:
    """Returns the machine that was measured, as the cost model sees it."""
    # Its memory is the host's, and it has no link to others.
    return Hardware(
        "this machine",
        memory_bytes=float("inf"),
        bandwidth=speed.bandwidth,
        flops=speed.flops,
        link_bandwidth=float("inf"),
        host_bandwidth=speed.bandwidth,
    )


def fit_overheads(
    batches: list[int], physics: list[float], measured: list[float]
) -> tuple[float, float]:
    """Fits seconds of a step, and of each sequence in it; neither is below 0.

    The squares of relative errors are least, so that short steps count like long ones.

    Args:
      batches: sequences in each step.
      physics: seconds that the cost model gives without overheads.
      measured: seconds that it took.
    """
    b, p, m = (np.asarray(x, float) for x in (batches, physics, measured))
    columns = np.stack([np.ones_like(b), b], axis=1) / m[:, None]
    target = (m - p) / m
    best: tuple[float, float, float] = (float("inf"), 0.0, 0.0)
    # Either may be at its bound of 0; the least of the four ways is the optimum.
    for used in ([], [0], [1], [0, 1]):
        found = np.zeros(2)
        if used:
            found[used] = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
        if (found >= 0).all():
            error = float(np.sum((columns @ found - target) ** 2))
            best = min(best, (error, float(found[0]), float(found[1])))
    return best[1], best[2]


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the error of the prediction, without and with fitted overheads."""
    del scale
    made = []
    for which, kind in (("physics", "predicted"), ("fitted", "fitted")):
        made.append(
            study_claim(
                f"machine_costs.error_real.{which}",
                _error(rows, which),
                paper=None,
                unit="% of a step, mean of the held-out points",
                kind=kind,
                source="the engine on this machine",
                note="at most 15% is wanted"
                if which == "fitted"
                else "no constant fitted",
                at_most=15.0 if which == "fitted" else None,
            )
        )
    return made


def _error(rows: list[Row], which: str) -> float | None:
    errors = [
        abs(point[f"{which}_s"] / point["measured_s"] - 1)
        for row in rows
        for point in row["metrics"]["points"]
        if point["held_out"]
    ]
    return 100 * statistics.mean(errors) if errors else None


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws step times against the batch, for each context."""
    del scale
    if not rows:
        return {}
    metrics = rows[0]["metrics"]
    contexts = sorted({point["context"] for point in metrics["points"]})
    figure = Figure(figsize=(3.2 * len(contexts), 3.4), layout="constrained")
    axes = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for ax, context in zip(axes, contexts, strict=True):
        some = [p for p in metrics["points"] if p["context"] == context]
        batches = [p["batch"] for p in some]
        for name, label, color, style in (
            ("physics", "predicted, limits of the machine alone", GREY, "--"),
            ("fitted", "predicted, with fitted overheads", ORANGE, "-"),
            ("measured", "measured", BLUE, "o"),
        ):
            values = [1e3 * p[f"{name}_s"] for p in some]
            ax.plot(batches, values, style, color=color, label=label)
        ax.set_title(f"{context} tokens before it", fontsize=10)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(batches, [str(b) for b in batches])
        ax.set_xlabel("sequences in a step")
    axes[0].set_ylabel("ms a step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    caption = (
        f"Steps of the real engine (SmolLM2-135M, float32), which only decode, on a "
        f"machine of {metrics['gb_per_s']:.1f} GB/s and {metrics['gflops']:.0f} "
        "GFLOP/s, one thread, and what the cost model predicts."
    )
    return {"machine_costs.png": (caption, to_png(figure))}

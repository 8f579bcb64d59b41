"""The cost model beside the real engine on this machine: predicted and measured steps.

The machine's own limits are measured first, in the same process; the cost model knows
it by them, as it knows an A100 by its data sheet. What a step takes beyond that is
fitted on half of the decoding steps, and judged on the others, and on prompts. The
machine that was found is what other studies can run on (`measured_machine`).
"""

import os
import statistics
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.figures import BLUE, GREY, ORANGE, to_png
from experiments.machine_speed import measure_speed
from experiments.simulator.costs import RooflineCosts
from experiments.simulator.hardware import GIB
from experiments.simulator.measured_machine import Machine
from experiments.simulator.model_profiles import profile_of
from experiments.simulator.work import decode_work, prompt_work
from experiments.step_bench import StepBench
from experiments.studies.seeds import Estimate, estimate
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim

TITLE = "The cost model beside the real engine"

_BATCHES, _CONTEXTS, _STEPS = (1, 2, 4, 8, 16, 32, 64), (64, 256, 512), 8
_PROMPTS = (16, 32, 64, 128, 256)


def tasks(scale: Scale) -> list[Task]:
    """Returns one task: steps that are timed must not run side by side."""
    settings = {
        "model": "smollm2-135m",
        "dtype": "float32",
        "batches": list(_BATCHES),
        "contexts": list(_CONTEXTS),
        "prompts": list(_PROMPTS),
        "steps": _STEPS,
        "repeats": 5 if scale.name == "full" else 3,
    }
    return [Task("steps", settings)]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Times steps that only decode, and steps that compute a prompt; predicts them."""
    # Here, since no other study needs a model.
    from experiments.models import load_model
    from paged_jax.models.packed import pack_model

    model = pack_model(load_model(settings["model"], settings["dtype"]))
    decodes = [(b, c) for b in settings["batches"] for c in settings["contexts"]]
    prompts, steps, repeats = (settings[x] for x in ("prompts", "steps", "repeats"))
    speed = measure_speed(2 * repeats)
    bench = StepBench(model, decodes, steps, longest_prompt=max(prompts))
    measured: list[list[float]] = [[] for _ in (*decodes, *prompts)]
    for repeat in range(repeats + 1):
        seconds = [bench.step_seconds(*point, steps) for point in decodes]
        seconds += [bench.prompt_seconds(tokens) for tokens in prompts]
        if repeat:  # the first time warms up
            for times, found in zip(measured, seconds, strict=True):
                times.append(found)
    machine = Machine(speed.bandwidth / 1e9, speed.flops / 1e9, _memory_gib())
    profile = profile_of(settings["model"], model.config)
    costs = RooflineCosts(profile, machine.hardware())
    # In the middle of the steps that are timed; a token sees itself.
    works = [decode_work(batch, seen + 2 + steps // 2) for batch, seen in decodes]
    works += [prompt_work(tokens) for tokens in prompts]
    physics = [float(costs(work)) for work in works]
    rows = [batch for batch, _ in decodes] + [1] * len(prompts)
    half = slice(0, len(decodes), 2)
    step_s, row_s = fit_overheads(
        rows[half], physics[half], [statistics.median(x) for x in measured[half]]
    )
    machine = machine._replace(step_s=step_s, row_s=row_s)
    points = [("decode", *point) for point in decodes]
    points += [("prompt", 1, tokens) for tokens in prompts]
    return machine._asdict() | {
        "points": [
            {
                "computes": computes,
                "batch": batch,
                "context": context,
                "measured_s": measured[i],
                "physics_s": physics[i],
                "fitted_s": physics[i] + step_s + row_s * batch,
                "held_out": computes == "prompt" or i % 2 == 1,
            }
            for i, (computes, batch, context) in enumerate(points)
        ],
    }


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


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
    """Returns the error of the prediction, without and with fitted overheads.

    Of each repeat of the measurement, so that its spread says how far they are apart.
    """
    del scale
    made = []
    for computes, parameter, of in (
        ("decode", "", "a step that decodes, mean of the held-out points"),
        ("prompt", ".prompts", "a step that computes a prompt, mean of all"),
    ):
        for which, kind in (("physics", "predicted"), ("fitted", "fitted")):
            found = _error(rows, computes, which)
            fitted = which == "fitted"
            made.append(
                study_claim(
                    f"machine_costs.error_real.{which}{parameter}",
                    found,
                    paper=None,
                    unit=f"% of {of}",
                    kind=kind,
                    source="the engine on this machine",
                    of_seeds=_of_repeats(found),
                    note="at most 15% is wanted" if fitted else "no constant fitted",
                    at_most=15.0 if fitted else None,
                )
            )
    return made


def _of_repeats(found: Estimate | None) -> str:
    if found is None:
        return ""
    if found.count == 1:
        return "measured once: no spread is known"
    return f"mean of {found.count} measurements, spread {found.spread:.3g}"


def _error(rows: list[Row], computes: str, which: str) -> Estimate | None:
    """Returns the error of each repeat, over the points that nothing is fitted to."""
    points = [
        point
        for row in rows
        for point in row["metrics"]["points"]
        if point["held_out"] and point["computes"] == computes
    ]
    errors = [
        [abs(point[f"{which}_s"] / seconds - 1) for seconds in point["measured_s"]]
        for point in points
    ]
    return estimate(100 * statistics.mean(of) for of in zip(*errors, strict=True))


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws step times against the batch, for each context."""
    del scale
    if not rows:
        return {}
    metrics = rows[0]["metrics"]
    decodes, prompts = (
        [p for p in metrics["points"] if p["computes"] == computes]
        for computes in ("decode", "prompt")
    )
    contexts = sorted({point["context"] for point in decodes})
    panels = [
        (
            f"{context} tokens before it",
            "sequences in a step",
            "batch",
            [p for p in decodes if p["context"] == context],
        )
        for context in contexts
    ]
    panels.append(("a prompt", "its tokens", "context", prompts))
    figure = Figure(figsize=(3.0 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (title, label, key, points) in zip(axes, panels, strict=True):
        _draw_panel(ax, [p[key] for p in points], points)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(label)
    axes[0].set_ylabel("ms a step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    caption = (
        "Steps of the real engine (SmolLM2-135M, float32), which only decode, or "
        f"compute a prompt, on a machine of {metrics['gb_per_s']:.1f} GB/s and "
        f"{metrics['gflops']:.0f} GFLOP/s, one thread; and what the cost model says."
    )
    return {"machine_costs.png": (caption, to_png(figure))}


def _draw_panel(ax: Axes, x: list[int], points: list[dict[str, Any]]) -> None:
    for name, label, color, style in (
        ("physics", "predicted, limits of the machine alone", GREY, "--"),
        ("fitted", "predicted, with fitted overheads", ORANGE, "-"),
        ("measured", "measured", BLUE, "o"),
    ):
        values = [1e3 * float(np.median(p[f"{name}_s"])) for p in points]
        ax.plot(x, values, style, color=color, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(x, [str(value) for value in x])

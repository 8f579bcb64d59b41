"""One simulated run of a system on a trace: what most studies are made of."""

import math
from typing import Any

from experiments.simulator.evaluate import draw_trace, evaluate, normalized_latency


def serve(settings: dict[str, Any]) -> dict[str, Any]:
    """Serves a trace with a system; returns the means of its steps.

    Args:
      settings: `system`, `setup`, `dataset`, `rate` (requests/s), `seconds` (of the
        trace), `window` (seconds of it that count) and `seed`. If need be also `n`,
        `beam_width`, `slots` (see `evaluate`), `engine` (settings other than the
        system's), and `means_only`: nothing past the window is served, and the latency
        is not known.
    """
    trace = draw_trace(
        settings["dataset"],
        settings["rate"],
        settings["seconds"],
        settings["seed"],
        **{key: settings[key] for key in ("n", "beam_width") if key in settings},
    )
    start, stop = settings["window"]
    means_only = settings.get("means_only", False)
    results = evaluate(
        settings["system"],
        settings["setup"],
        trace,
        dataset=settings["dataset"],
        window=(int(start), int(stop)),
        until=stop if means_only else math.inf,
        slots=settings.get("slots"),
        **settings.get("engine", {}),
    )
    latency = None if means_only else normalized_latency(results)
    return {
        **results.means,
        "normalized_latency_s": latency,
        "requests": len(trace),
        "rejected": results.rejected,
        "steps": results.steps,
    }

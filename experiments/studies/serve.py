"""One simulated run of a system on a trace: what most studies are made of."""

from typing import Any

from experiments.simulator.evaluate import draw_trace, evaluate, normalized_latency


def serve(settings: dict[str, Any]) -> dict[str, Any]:
    """Serves a trace with a system; returns the means of its steps.

    Args:
      settings: `system`, `setup`, `dataset`, `rate` (requests/s), `seconds` (of the
        trace), `window` (seconds of it that count) and `seed`; `n` if not 1.
    """
    trace = draw_trace(
        settings["dataset"],
        settings["rate"],
        settings["seconds"],
        settings["seed"],
        settings.get("n", 1),
    )
    start, stop = settings["window"]
    results = evaluate(
        settings["system"],
        settings["setup"],
        trace,
        dataset=settings["dataset"],
        window=(int(start), int(stop)),
    )
    return {
        **results.means,
        "normalized_latency_s": normalized_latency(results),
        "requests": len(trace),
        "rejected": results.rejected,
        "steps": results.steps,
    }

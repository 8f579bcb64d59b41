"""One simulated run of a system on a trace: what most studies are made of."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from experiments.simulator.evaluate import draw_trace, evaluate, normalized_latency
from experiments.simulator.results import Results
from experiments.simulator.simulate import SimulatorProgram
from experiments.simulator.systems import overheads_of
from experiments.studies.victims import RULES


def serve_at(
    settings: Mapping[str, Any],
    rate: float,
    *,
    window: tuple[int, int] | None = None,
    until: float = math.inf,
    give_up_above: float | None = None,
) -> tuple[float, Results]:
    """Serves a trace with a system; returns the normalized latency, and all else.

    Args:
      settings: `system`, `setup`, `dataset`, `seconds` (of the trace) and `seed`. If
        they are not the usual: `n`, `beam_width`, `prefix_len`; `cv` of the arrivals;
        `engine`, settings other than the system's own; `victim`, one of
        `victims.RULES`; `software`, the system whose overheads count; `cost_factors`,
        by which terms of the cost model are multiplied (see `costs.CostTerms`).
      rate: requests a second.
      window: seconds from which on, and up to which, steps count in the means.
      until: seconds after which the run may end; the latency is infinite then, unless
        all has ended.
      give_up_above: of a trace whose latency is certain to be above this many seconds a
        token, the rest is not served, and the latency is infinite.
    """
    prefix_len = settings.get("prefix_len", 0)
    trace = draw_trace(
        settings["dataset"],
        rate,
        settings["seconds"],
        settings["seed"],
        n=settings.get("n", 1),
        beam_width=settings.get("beam_width", 1),
        prefix_len=prefix_len,
        cv=settings.get("cv", 1.0),
    )

    def change(program: SimulatorProgram) -> SimulatorProgram:
        costs: Any = program.costs
        factors = settings.get("cost_factors", {})
        if "software" in settings:
            step_s = overheads_of(settings["software"]).step_s
            costs = dataclasses.replace(costs, step_s=step_s)
        scaled = {name: getattr(costs, name) * x for name, x in factors.items()}
        return dataclasses.replace(
            program,
            costs=dataclasses.replace(costs, **scaled),
            victim=RULES[settings.get("victim", "latest arrival")],
        )

    results = evaluate(
        settings["system"],
        settings["setup"],
        trace,
        dataset=settings["dataset"],
        window=window,
        prefix_len=prefix_len,
        until=until,
        give_up_above=give_up_above,
        change=change,
        **settings.get("engine", {}),
    )
    return normalized_latency(results), results


def serve(settings: dict[str, Any]) -> dict[str, Any]:
    """Serves a trace with a system; returns the means of its steps.

    Args:
      settings: as for `serve_at`, with `rate`, and `window` (seconds of it that count);
        `means_only`, if nothing past the window is to be served, and the latency is not
        known.
    """
    start, stop = settings["window"]
    means_only = settings.get("means_only", False)
    latency, results = serve_at(
        settings,
        settings["rate"],
        window=(int(start), int(stop)),
        until=stop if means_only else math.inf,
    )
    return {
        **results.means,
        "normalized_latency_s": None if means_only else latency,
        "requests": len(results.arrival),
        "rejected": results.rejected,
        "steps": results.steps,
    }

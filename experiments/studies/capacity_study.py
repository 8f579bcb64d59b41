"""The load that a system serves: what Figs 12, 14, 16 and 17 measure.

Normalized latency against request rate, for each panel and system; the capacity is the
rate at which it crosses 0.5 s a token. A claim of the paper, 2 to 4 times the
throughput of the baselines at the same latency, is judged for each of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.simulator.capacity import crossing, find_capacity
from experiments.simulator.results import Results
from experiments.studies.panels import BEAMS_ASSUMED, GUESSES, Panel
from experiments.studies.paper import SOURCE, numbers
from experiments.studies.seeds import Estimate, estimate, over_seeds
from experiments.studies.serve import serve_at
from experiments.studies.study import Scale, Task
from experiments.studies.study_claim import compared_claim, study_claim

# Seconds a token.
THRESHOLD = 0.5
# What the paper promises over the baselines: 2 to 4 times.
LEAST_RATIO = 2.0
# Where the curves are drawn, as shares of the capacity.
_FRACTIONS = (0.3, 0.5, 0.7, 0.85, 0.95, 1.05)
_FEW_FRACTIONS = (0.5, 0.85, 1.1)
# A search begins this far below and above its guess.
_BRACKET = 1.07
# The share of a trace after which steps count in means, as the paper's 600 of 3600 s.
_WARM_UP = 1 / 6
# Points beyond the paper's grid, if the line has not crossed the threshold there.
_MOST_MORE = 8


class Search(NamedTuple):
    """What came of a search for a capacity.

    Attributes:
      metrics: the capacity, and means at the largest load that was served in time.
      at: serves the trace at a rate; returns the latency.
    """

    metrics: dict[str, Any]
    at: Callable[[float], float]


def tasks(panels: Sequence[Panel], scale: Scale) -> list[Task]:
    """Returns one task for each panel, system and seed."""
    return [
        Task(
            f"{panel.name}-{system}-{seed}",
            {
                "panel": panel.name,
                "system": system,
                "setup": panel.setup,
                "dataset": panel.dataset,
                "n": panel.n,
                "beam_width": panel.beam_width,
                "prefix_len": panel.prefix_len,
                "seconds": seconds_of(panel, scale),
                "seed": seed,
                "guess": _guess(panel, system, scale),
                "tolerance": scale.tolerance,
                "rates": _paper_rates(panel, system),
                "fractions": list(_FRACTIONS if scale.grid == 1 else _FEW_FRACTIONS),
            },
        )
        for panel in panels
        for system in panel.systems
        for seed in scale.seeds
    ]


def _guess(panel: Panel, system: str, scale: Scale) -> float:
    short, whole = GUESSES[panel.name, system]
    return short if scale.time_share < 1 else whole


def seconds_of(panel: Panel, scale: Scale) -> float:
    """Returns how long requests arrive.

    Where traces are cut short, beams' are cut to a sixth of that and those of n samples
    to a third: their steps take the longest to simulate.
    """
    seconds = panel.seconds * scale.time_share
    if scale.time_share == 1:
        return seconds
    if panel.beam_width > 1:
        return seconds / 6
    return seconds / 3 if panel.n > 1 else seconds


def mark_of(panel: Panel, scale: Scale) -> str:
    """Returns what is said of how a panel is cut short; empty if it is not."""
    share = seconds_of(panel, scale) / panel.seconds
    cut = dataclasses.replace(scale, time_share=share)
    return scale.marked(cut.shorter, scale.coarser)


def _paper_rates(panel: Panel, system: str) -> list[float]:
    """Returns the rates at which the paper measured; none where it is not known."""
    if panel.name != "fig12a":
        return []
    figure = numbers()["fig12a"]
    rates = {rate for rate, _ in figure["series"][system]}
    # The next point of its grid, above what it draws.
    rates |= set(figure["bracket"].get(system, ()))
    return sorted(rates)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Searches for the capacity, then measures the points of the curve."""
    search = search_capacity(settings)
    capacity = search.metrics["capacity"]
    rates = settings["rates"] or [f * capacity for f in settings["fractions"]]
    curve = [(rate, search.at(rate)) for rate in rates]
    on_grid = None
    if settings["rates"]:
        _extend(curve, search.at)
        on_grid = crossing(curve, THRESHOLD)
    return search.metrics | {"capacity_on_grid": on_grid, "curve": curve}


def search_capacity(settings: dict[str, Any]) -> Search:
    """Finds the load at which a system's latency crosses the threshold.

    Args:
      settings: what `serve_at` takes, and `seconds`, `guess` (a rate) and `tolerance`.
    """
    seconds = settings["seconds"]
    window = int(seconds * _WARM_UP), math.ceil(seconds)

    @functools.cache
    def served(rate: float, give_up_above: float | None) -> tuple[float, Results]:
        return serve_at(settings, rate, window=window, give_up_above=give_up_above)

    found = find_capacity(
        lambda rate: served(rate, THRESHOLD)[0],
        THRESHOLD,
        settings["guess"] / _BRACKET,
        settings["guess"] * _BRACKET,
        settings["tolerance"],
    )
    _, best = served(found.low, THRESHOLD)
    metrics = {
        "capacity": found.rate,
        "capacity_low": found.low,
        "capacity_high": found.high,
        "kv_utilization": best.means["kv_utilization"],
        "mean_running": best.means["mean_running"],
        "mean_step_s": best.means["mean_step_s"],
        "preemptions": best.means["preemptions"],
        "rejected": best.rejected,
        "tries": len(found.probes),
    }
    return Search(metrics, lambda rate: served(rate, None)[0])


def _extend(
    curve: list[tuple[float, float]], latency_at: Callable[[float], float]
) -> None:
    """Goes on with the steps of the grid until the line is above the threshold."""
    for _ in range(_MOST_MORE):
        if curve[-1][1] > THRESHOLD:
            return
        rate = 2 * curve[-1][0] - curve[-2][0]
        curve.append((rate, latency_at(rate)))


def claims(panels: Sequence[Panel], rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the claims of some panels."""
    made = []
    for panel in panels:
        some = [row for row in rows if row["cell"]["panel"] == panel.name]
        made += _capacity_claims(panel, some, scale)
        made += _ratio_claims(panel, some, scale)
        made += _utilization_claims(panel, some, scale)
    return made


def capacities(rows: list[Row], **cell: Any) -> Estimate | None:
    """Returns the capacity over the seeds, of rows with these settings."""
    return over_seeds(rows, lambda metrics: metrics["capacity"], **cell)


def _capacity_claims(panel: Panel, rows: list[Row], scale: Scale) -> list[Claim]:
    known = numbers()["fig12a"] if panel.name == "fig12a" else {}
    made = []
    for system in panel.systems:
        bracket = known.get("bracket", {}).get(system)
        between = (
            f"the paper measured {bracket[0]:g} and {bracket[1]:g}; its drawn line "
            "crosses in between"
            if bracket
            else ""
        )
        made.append(
            _claim(
                f"{panel.name}.capacity.{system}",
                capacities(rows, system=system),
                panel,
                scale,
                paper=known.get("capacity", {}).get(system),
                note=between,
            )
        )
    if not known:
        return made
    for system in panel.systems:
        on_grid = estimate(
            math.nan if (x := row["metrics"]["capacity_on_grid"]) is None else x
            for row in rows
            if row["cell"]["system"] == system
        )
        made.append(
            _claim(
                f"{panel.name}.capacity_on_grid.{system}",
                on_grid,
                panel,
                scale,
                paper=known["capacity"][system],
                note="where the line through the paper's own rates crosses 0.5 s/token",
            )
        )
    return made


def _ratio_claims(panel: Panel, rows: list[Row], scale: Scale) -> list[Claim]:
    ours = capacities(rows, system="vllm")
    made = []
    for system in panel.systems:
        if system == "vllm":
            continue
        note, paper = "capacities at 0.5 s/token", None
        if panel.name == "fig12a":
            capacity = numbers()["fig12a"]["capacity"]
            paper = capacity["vllm"] / capacity[system]
            note += "; the paper's number is that of its drawn lines"
        made.append(
            compared_claim(
                f"{panel.name}.ratio.vllm_over_{system.removeprefix('orca_')}",
                ours,
                capacities(rows, system=system),
                paper=paper,
                at_least=LEAST_RATIO,
                unit="x",
                kind=_kind(panel),
                source=f"{SOURCE}, 2 to 4 times the throughput at the same latency",
                mark=mark_of(panel, scale),
                note=_note(panel, note),
            )
        )
    return made


def _utilization_claims(panel: Panel, rows: list[Row], scale: Scale) -> list[Claim]:
    made = []
    for system in panel.systems:
        judged = _is_judged(panel, system)
        made.append(
            study_claim(
                f"{panel.name}.utilization.{system}",
                over_seeds(rows, lambda m: 100 * m["kv_utilization"], system=system),
                paper=None,
                unit="% of the granted slots, at capacity",
                kind="memory",
                source="vLLM wastes next to nothing"
                if judged
                else f"{SOURCE} {_figure(panel)}",
                note=_note(panel),
                mark=mark_of(panel, scale),
                at_least=95.0 if judged else None,
            )
        )
    return made


def _is_judged(panel: Panel, system: str) -> bool:
    return panel.figure == "fig12" and system == "vllm"


def _claim(
    id: str,
    found: Estimate | None,
    panel: Panel,
    scale: Scale,
    *,
    paper: float | None,
    note: str = "",
) -> Claim:
    return study_claim(
        id,
        found,
        paper=paper,
        unit="requests/s",
        kind=_kind(panel),
        source=f"{SOURCE} {_figure(panel)}",
        mark=mark_of(panel, scale),
        note=_note(panel, note),
    )


def _note(panel: Panel, note: str = "") -> str:
    assumed = BEAMS_ASSUMED if panel.beam_width > 1 else ""
    return "; ".join(filter(None, (note, assumed)))


def _kind(panel: Panel) -> str:
    """Fig 12a is what the overheads of the software are checked against."""
    return "fitted" if panel.name == "fig12a" else "predicted"


def _figure(panel: Panel) -> str:
    return f"Fig {panel.figure.removeprefix('fig')}{panel.letter}"

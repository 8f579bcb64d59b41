"""Ablations: the same workload under rules that differ in one thing."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.simulator.results import Results
from experiments.studies import variant_figures
from experiments.studies.capacity_study import search_capacity
from experiments.studies.seeds import Estimate, over_seeds
from experiments.studies.serve import serve_at
from experiments.studies.study import Figures, Scale, Task, seeds_of
from experiments.studies.study_claim import study_claim
from experiments.studies.variant_quantities import QUANTITIES

# Of each trace, in seconds: long enough for a few hundred requests even in `quick`.
# Capacities of short traces come out higher (see `base_config`), but all alike.
_SECONDS, _LEAST_SECONDS = 1800.0, 300.0
# Full load is this many times the capacity.
_OVERLOAD = 2.0
SOURCE = "this project"


class Variant(NamedTuple):
    """One of the things that are compared.

    Attributes:
      series: drawn as one line; such as `sharegpt`.
      label: the place along the line; such as `16`.
      settings: what differs from `BASE`; see `serve.serve_at`.
    """

    series: str
    label: str
    settings: dict[str, Any]


# vLLM on the paper's smallest set-up, and where its search for a capacity begins.
BASE: dict[str, Any] = {
    "system": "vllm",
    "setup": "opt-13b",
    "dataset": "sharegpt",
    "n": 1,
    "guess": 1.9,
}


class Ablation:
    """The functions of a `study.Study`, for variants of one thing."""

    def __init__(
        self,
        name: str,
        axis: str,
        variants: Callable[[Scale], list[Variant]],
        quantities: Sequence[str] = ("capacity", "tokens_per_s"),
        expected: Callable[[list[Row], str], list[Claim]] | None = None,
    ):
        """Keeps what is compared.

        Args:
          name: of the study.
          axis: what the labels are, such as `block size`.
          variants: all of them, at some scale.
          quantities: keys of `QUANTITIES` that are drawn and claimed.
          expected: makes claims beside the plain numbers, of rows and `mark`.
        """
        self._name, self._axis = name, axis
        self._variants, self._quantities = variants, quantities
        self._expected = expected

    def tasks(self, scale: Scale) -> list[Task]:
        """Returns one task for each variant and seed."""
        seconds = _seconds(scale)
        return [
            Task(
                f"{variant.series}-{variant.label}-{seed}".replace(" ", "_"),
                BASE
                | {"seconds": seconds, "tolerance": scale.tolerance, "seed": seed}
                | {"series": variant.series, "label": variant.label}
                | variant.settings,
            )
            for variant in self._variants(scale)
            for seed in scale.seeds
        ]

    def run(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Measures a variant."""
        return measure(settings)

    def claims(self, rows: list[Row], scale: Scale) -> list[Claim]:
        """Returns the numbers, then what is expected of them."""
        mark = self.mark(scale)
        made = [
            study_claim(
                f"{self._name}.{quantity}.{words(variant.series)}"
                f".{words(variant.label)}",
                of_variant(rows, quantity, variant.series, variant.label),
                paper=None,
                unit=QUANTITIES[quantity][1],
                kind="predicted",
                source=SOURCE,
                mark=mark,
            )
            for quantity in self._quantities
            for variant in self._variants(scale)
        ]
        if self._expected is not None:
            made += self._expected(rows, mark)
        return made

    def mark(self, scale: Scale) -> str:
        """Returns what claims say of how much was run; never empty.

        No trace is one of the paper's: their seconds are always said.
        """
        some = len(self._variants(scale))
        whole = len(self._variants(dataclasses.replace(scale, grid=1.0)))
        return scale.marked(
            f"traces of {_seconds(scale):g} s",
            f"{some} of {whole} variants" if some < whole else "",
            scale.coarser,
        )

    def draw(self, rows: list[Row], scale: Scale) -> Figures:
        """Draws each quantity against the labels."""
        places: dict[str, list[str]] = {}
        for variant in self._variants(scale):
            places.setdefault(variant.series, []).append(variant.label)
        panels = [
            variant_figures.Panel(
                *QUANTITIES[quantity],
                {
                    series: [
                        (label, of_variant(rows, quantity, series, label))
                        for label in labels
                    ]
                    for series, labels in places.items()
                },
            )
            for quantity in self._quantities
        ]
        png = variant_figures.draw_variants(self._axis, panels)
        caption = (
            f"Against {self._axis}; mean of {seeds_of(scale)}, bars from the lowest to "
            f"the highest. {self.mark(scale).capitalize()}."
        )
        return {f"{self._name}.png": (caption, png)}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Finds a variant's capacity, and serves with it at full load.

    Args:
      settings: of `capacity_study.search_capacity`; and `load`, a rate in requests/s at
        which latencies are measured, if that is wanted.

    Returns:
      Metrics, most of them named in `QUANTITIES`.
    """
    search = search_capacity(settings)
    seconds = settings["seconds"]
    # As many requests as at the capacity, and nothing is served once all have arrived.
    end = seconds / _OVERLOAD
    _, busy = serve_at(
        settings | {"seconds": end},
        _OVERLOAD * search.metrics["capacity"],
        window=(int(end / 6), math.ceil(end)),
        until=end,
    )
    metrics = search.metrics | {
        "tokens_per_s": busy.means["tokens_per_s"],
        "utilization": 100 * busy.means["kv_utilization"],
        "full_running": busy.means["mean_running"],
        "preempted": 100 * busy.means["preemptions"] / busy.means["steps"],
    }
    if "load" in settings:
        _, served = serve_at(settings, settings["load"])
        metrics |= latencies(served)
    return metrics


def latencies(results: Results) -> dict[str, float]:
    """Returns means and a percentile of what the requests waited."""
    taken = (results.ended - results.arrival) / results.output_len
    several = results.output_len > 1
    between = (results.ended - results.first_token)[several]
    return {
        "latency_s": float(np.nanmean(taken)),
        "latency_p99_s": float(np.nanpercentile(taken, 99)),
        "ttft_s": float(np.nanmean(results.first_token - results.arrival)),
        "tpot_s": float(np.nanmean(between / (results.output_len[several] - 1))),
    }


def of_variant(
    rows: Iterable[Row], quantity: str, series: str, label: str
) -> Estimate | None:
    """Returns a quantity of a variant, over the seeds."""
    return over_seeds(rows, lambda m: m[quantity], series=series, label=label)


def words(text: str) -> str:
    """Returns a label as a part of a claim's id."""
    return "_".join(text.lower().replace(",", "").replace("+", "").split())


def _seconds(scale: Scale) -> float:
    return max(_SECONDS * scale.time_share, _LEAST_SECONDS)

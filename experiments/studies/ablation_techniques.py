"""Paging, sharing and continuous batching, alone and together: all eight ways.

Without paging each sequence reserves the model's length in one piece, and nothing can
be shared: the two ways with sharing but without paging are those without either. A
static batch is admitted as a whole, computed padded as long as its longest member runs,
and returned together (FasterTransformer's way), but it is as large as memory allows at
the members' true lengths, which favours it.
"""

import itertools
from typing import Any

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.simulator.systems import MAX_MODEL_LEN, MAX_SEQS
from experiments.studies import technique_figures
from experiments.studies.seeds import Estimate, estimate
from experiments.studies.shapley import shapley_factors, shares
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim
from experiments.studies.variant_quantities import QUANTITIES
from experiments.studies.variants import SOURCE, Ablation, Variant, measure

TITLE = "What each technique contributes"

_NAME = "ablation_techniques"
TECHNIQUES = ("paging", "sharing", "continuous batching")
# Workload to its settings, and where searches begin for the least and the most.
WORKLOADS: dict[str, tuple[dict[str, Any], float, float]] = {
    "sharegpt": ({"dataset": "sharegpt"}, 0.25, 1.9),
    "alpaca, n = 4": ({"dataset": "alpaca", "n": 4}, 1.0, 8.0),
}
_MEASURED = ("capacity", "tokens_per_s")


def subsets() -> list[frozenset[str]]:
    """Returns all eight sets of techniques."""
    return [
        frozenset(some)
        for count in range(len(TECHNIQUES) + 1)
        for some in itertools.combinations(TECHNIQUES, count)
    ]


def effective(some: frozenset[str]) -> frozenset[str]:
    """Returns what a set comes to: sharing needs paging."""
    return some if "paging" in some else some - {"sharing"}


def label(some: frozenset[str]) -> str:
    """Returns the name of a set."""
    return " + ".join(t.split()[0] for t in TECHNIQUES if t in some) or "none"


def _variants(scale: Scale) -> list[Variant]:
    del scale  # in every preset the same
    distinct = list(dict.fromkeys(map(effective, subsets())))
    return [
        Variant(name, label(some), base | _settings(some, low, high))
        for name, (base, low, high) in WORKLOADS.items()
        for some in distinct
    ]


def _settings(some: frozenset[str], low: float, high: float) -> dict[str, Any]:
    continuous = "continuous batching" in some
    engine: dict[str, Any] = {
        "memory": "paged" if "paging" in some else "max",
        "sharing": "sharing" in some,
    }
    if not continuous:
        engine |= {"max_seqs": MAX_SEQS, "token_budget": MAX_SEQS * MAX_MODEL_LEN}
    gained = len(some) / len(TECHNIQUES)
    return {
        "system": "vllm" if continuous else "ft",
        "software": "vllm",
        "guess": low * (high / low) ** gained,
        "engine": engine,
    }


_study = Ablation(_NAME, "techniques", _variants, (*_MEASURED, "utilization"))


def tasks(scale: Scale) -> list[Task]:
    """Returns one task for each distinct way, workload and seed."""
    return _study.tasks(scale)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures one way."""
    return measure(settings)


def factors_of(
    rows: list[Row], workload: str, quantity: str
) -> dict[str, Estimate] | None:
    """Returns the factor of each technique, over the seeds; None if rows are missing.

    Args:
      rows: of this study.
      workload: a key of `WORKLOADS`.
      quantity: `capacity` or `tokens_per_s`.
    """
    some = [row for row in rows if row["cell"]["series"] == workload]
    found: dict[str, list[float]] = {name: [] for name in TECHNIQUES}
    for seed in sorted({row["cell"]["seed"] for row in some}):
        values = {
            row["cell"]["label"]: row["metrics"][quantity]
            for row in some
            if row["cell"]["seed"] == seed
        }
        if not {label(effective(s)) for s in subsets()} <= set(values):
            return None
        factors = shapley_factors(
            TECHNIQUES,
            lambda subset, values=values: values[label(effective(subset))],
        )
        for name, factor in factors.items():
            found[name].append(factor)
    estimates = {name: estimate(values) for name, values in found.items()}
    return {k: v for k, v in estimates.items() if v is not None} or None


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the numbers, the factors, their shares, and what all bring together."""
    mark, made = _study.mark(scale), _study.claims(rows, scale)
    for workload in WORKLOADS:
        for quantity in _MEASURED:
            made += _factor_claims(rows, mark, workload, quantity)
    return made


def _factor_claims(
    rows: list[Row], mark: str, workload: str, quantity: str
) -> list[Claim]:
    factors = factors_of(rows, workload, quantity)
    made = []
    where = f"{quantity}.{workload.replace(', n = ', '_n')}"
    about = QUANTITIES[quantity][0]

    def add(id: str, found: Estimate | float | None, unit: str, **expected) -> None:
        settings: dict[str, Any] = {"source": SOURCE} | expected
        made.append(
            study_claim(
                f"{_NAME}.{id}",
                found,
                paper=None,
                unit=unit,
                kind="predicted",
                mark=mark,
                **settings,
            )
        )

    split = None
    if factors is not None:
        split = shares({name: factor.mean for name, factor in factors.items()})
    for name in TECHNIQUES:
        word = name.split()[0]
        add(
            f"factor.{word}.{where}",
            None if factors is None else factors[name],
            f"x, {about}",
            note="geometric mean of its gains over all orders",
        )
        add(
            f"share.{word}.{where}",
            None if split is None else 100 * split[name],
            "% of the whole gain's logarithm",
        )
    whole = None
    if factors is not None:
        whole = 1.0
        for factor in factors.values():
            whole *= factor.mean
    add(
        f"factor.all.{where}",
        whole,
        f"x, {about}",
        at_least=2.0,
        source="SOSP'23, 2 to 4 times",
    )
    return made


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws the eight ways, and the factors."""
    found = {
        (workload, quantity): factors_of(rows, workload, quantity)
        for workload in WORKLOADS
        for quantity in _MEASURED
    }
    known = {key: factors for key, factors in found.items() if factors is not None}
    figures = _study.draw(rows, scale)
    if known:
        caption = (
            "The factor of each technique: the geometric mean of its gains over all "
            "orders in which the three can be added. The factors multiply to the whole."
        )
        figures[f"{_NAME}_factors.png"] = (
            caption,
            technique_figures.draw_factors(known, TECHNIQUES),
        )
    return figures

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
from experiments.studies.seeds import Estimate, estimate, exact
from experiments.studies.shapley import shapley_factors, shares
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import compared_claim, study_claim
from experiments.studies.variant_quantities import QUANTITIES
from experiments.studies.variants import SOURCE, Ablation, Variant, measure, of_variant

TITLE = "What each technique contributes"

_NAME = "ablation_techniques"
TECHNIQUES = ("paging", "sharing", "continuous batching")
# Workload to its settings, and where searches begin for the least and the most.
WORKLOADS: dict[str, tuple[dict[str, Any], float, float]] = {
    "sharegpt": ({"dataset": "sharegpt"}, 0.25, 1.9),
    "alpaca": ({"dataset": "alpaca"}, 1.0, 37.0),
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


def factors_of(rows: list[Row], workload: str, quantity: str) -> list[dict[str, float]]:
    """Returns the factor of each technique, for each seed; none if rows are missing.

    Args:
      rows: of this study.
      workload: a key of `WORKLOADS`.
      quantity: `capacity` or `tokens_per_s`.
    """
    some = [row for row in rows if row["cell"]["series"] == workload]
    found: list[dict[str, float]] = []
    for seed in sorted({row["cell"]["seed"] for row in some}):
        values = {
            row["cell"]["label"]: row["metrics"][quantity]
            for row in some
            if row["cell"]["seed"] == seed
        }
        if not {label(effective(s)) for s in subsets()} <= set(values):
            return []
        found.append(
            shapley_factors(
                TECHNIQUES,
                lambda subset, values=values: values[label(effective(subset))],
            )
        )
    return found


def over_all(some: list[dict[str, float]]) -> dict[str, Estimate | None]:
    """Returns a number of each technique, over the seeds; None if it is not known."""
    return {name: estimate(one[name] for one in some) for name in TECHNIQUES}


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
    per_seed = factors_of(rows, workload, quantity)
    factors = over_all(per_seed)
    split = over_all([{k: 100 * x for k, x in shares(one).items()} for one in per_seed])
    where = f"{quantity}.{workload.replace(', n = ', '_n')}"
    about = f"x, {QUANTITIES[quantity][0]}"
    common: dict[str, Any] = {"paper": None, "kind": "predicted", "mark": mark}
    made = []
    for name in TECHNIQUES:
        word = name.split()[0]
        made.append(
            compared_claim(
                f"{_NAME}.factor.{word}.{where}",
                factors[name],
                exact(1.0),
                unit=about,
                source=SOURCE,
                note="geometric mean of its gains over all orders; compared with 1",
                **common,
            )
        )
        made.append(
            study_claim(
                f"{_NAME}.share.{word}.{where}",
                split[name],
                unit="% of the whole gain's logarithm",
                source=SOURCE,
                **common,
            )
        )
    every, none = (
        of_variant(rows, quantity, workload, label(some))
        for some in (frozenset(TECHNIQUES), frozenset())
    )
    made.append(
        compared_claim(
            f"{_NAME}.factor.all.{where}",
            every if per_seed else None,
            none,
            unit=about,
            at_least=2.0,
            source="SOSP'23, 2 to 4 times",
            **common,
        )
    )
    return made


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws the eight ways, and the factors."""
    found = {
        (workload, quantity): over_all(factors_of(rows, workload, quantity))
        for workload in WORKLOADS
        for quantity in _MEASURED
    }
    known = {
        key: {name: one for name, one in factors.items() if one is not None}
        for key, factors in found.items()
        if None not in factors.values()
    }
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

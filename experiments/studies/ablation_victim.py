"""Whom to preempt when blocks run out: the paper's rule against others."""

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.studies.study import Scale
from experiments.studies.study_claim import compared_claim
from experiments.studies.variants import SOURCE, Ablation, Variant, of_variant
from experiments.studies.victims import RULES

TITLE = "Whom to preempt"

_NAME = "ablation_victim"
# Near what the paper's rule serves, where there is much to preempt.
_LOAD = 1.85


def _variants(scale: Scale) -> list[Variant]:
    del scale  # in every preset the same
    return [
        Variant("recompute", rule, {"victim": rule, "load": _LOAD}) for rule in RULES
    ]


def _expected(rows: list[Row], mark: str) -> list[Claim]:
    """First come, first served is meant to keep the slowest requests from starving."""
    first, other = (
        of_variant(rows, "latency_p99_s", "recompute", label)
        for label in ("latest arrival", "earliest arrival")
    )
    return [
        compared_claim(
            f"{_NAME}.p99_ratio.earliest_over_latest",
            other,
            first,
            paper=None,
            at_least=1.0,
            unit="x, 99th percentile of normalized latency",
            kind="predicted",
            source=SOURCE,
            mark=mark,
        )
    ]


_study = Ablation(
    _NAME,
    "victim",
    _variants,
    ("capacity", "tokens_per_s", "preempted", "latency_p99_s"),
    _expected,
)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

"""Requests that come in bursts: gamma-distributed distances between arrivals."""

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.studies.paper import NAMES
from experiments.studies.study import Scale
from experiments.studies.study_claim import compared_claim
from experiments.studies.variants import SOURCE, Ablation, Variant, of_variant

TITLE = "Burstiness of arrivals"

_NAME = "ablation_burstiness"
_GUESSES = {"vllm": 1.8, "orca_oracle": 1.1, "orca_max": 0.5}
_VARIATIONS = (1.0, 2.0, 4.0)


def _variants(scale: Scale) -> list[Variant]:
    del scale  # in every preset the same
    return [
        Variant(NAMES[system], f"{cv:g}", {"system": system, "guess": guess, "cv": cv})
        for system, guess in _GUESSES.items()
        for cv in _VARIATIONS
    ]


def _expected(rows: list[Row], mark: str) -> list[Claim]:
    """The paper has Poisson arrivals; bursts are not to take vLLM's gain away."""
    made = []
    for cv in _VARIATIONS:
        ours, theirs = (
            of_variant(rows, "capacity", NAMES[system], f"{cv:g}")
            for system in ("vllm", "orca_max")
        )
        made.append(
            compared_claim(
                f"{_NAME}.ratio.vllm_over_max.{cv:g}",
                ours,
                theirs,
                paper=None,
                at_least=2.0,
                unit="x",
                kind="predicted",
                source=SOURCE,
                mark=mark,
            )
        )
    return made


_study = Ablation(
    _NAME,
    "coefficient of variation",
    _variants,
    ("capacity",),
    _expected,
)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

"""Newer accelerators and models: what memory management still brings there.

Llama-3 has an eighth to a quarter of the KV heads, and the accelerators more memory: at
most 256 sequences at once may bind before memory does. The overheads of the software
are those fitted to the paper, of 2023; without them the gain of a batch is another, so
that both are shown.
"""

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.studies.study import Scale
from experiments.studies.study_claim import compared_claim
from experiments.studies.variants import SOURCE, Ablation, Variant, of_variant

TITLE = "H100 and H200, Llama-3"

_NAME = "ablation_hardware"
_SETUPS = {
    "llama-3-8b-h100": "8B, H100",
    "llama-3-8b-h200": "8B, H200",
    "llama-3-70b-4xh100": "70B, 4 H100",
    "llama-3-70b-2xh200": "70B, 2 H200",
}
_NO_OVERHEADS = {"step_s": 0.0, "row_s": 0.0}
_SYSTEMS = {"vllm": "vLLM", "orca_max": "Orca (Max)"}
_SOFTWARE = {"of 2023": {}, "no overheads": _NO_OVERHEADS}
# Near what was found.
_GUESS = 8.0


def _series(system: str, software: str) -> str:
    return f"{_SYSTEMS[system]}, {software}"


def _variants(scale: Scale) -> list[Variant]:
    del scale  # in every preset the same
    return [
        Variant(
            _series(system, software),
            label,
            {
                "system": system,
                "setup": setup,
                "guess": _GUESS,
                "cost_factors": factors,
            },
        )
        for system in _SYSTEMS
        for software, factors in _SOFTWARE.items()
        for setup, label in _SETUPS.items()
    ]


def _expected(rows: list[Row], mark: str) -> list[Claim]:
    """Does the paper's factor hold where memory is no longer as short?"""
    return [
        compared_claim(
            f"{_NAME}.ratio.vllm_over_max.{setup}.{software.replace(' ', '_')}",
            of_variant(rows, "capacity", _series("vllm", software), label),
            of_variant(rows, "capacity", _series("orca_max", software), label),
            paper=None,
            at_least=2.0,
            unit="x",
            kind="predicted",
            source=SOURCE,
            mark=mark,
        )
        for software in _SOFTWARE
        for setup, label in _SETUPS.items()
    ]


_study = Ablation(
    _NAME,
    "model and accelerators",
    _variants,
    ("capacity", "tokens_per_s", "utilization"),
    _expected,
)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

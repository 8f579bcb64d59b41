"""How many blocks admission leaves free: preemptions against memory in use."""

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.studies.seeds import compare
from experiments.studies.study import Scale
from experiments.studies.study_claim import study_claim
from experiments.studies.variants import SOURCE, Ablation, Variant, of_variant

TITLE = "The watermark"

_NAME = "ablation_watermark"
_SHARES = (0.0, 0.01, 0.05, 0.1, 0.2)
_DATASETS = {"sharegpt": 1.9, "alpaca": 25.0}


def _variants(scale: Scale) -> list[Variant]:
    shares = _SHARES if scale.grid == 1 else _SHARES[::2]
    return [
        Variant(
            dataset,
            f"{100 * share:g}%",
            {"dataset": dataset, "guess": guess, "engine": {"watermark": share}},
        )
        for dataset, guess in _DATASETS.items()
        for share in shares
    ]


def _expected(rows: list[Row], mark: str) -> list[Claim]:
    """What a watermark is for: with 5% fewer are preempted than with none."""
    none, some = (
        of_variant(rows, "preempted", "sharegpt", label) for label in ("0%", "5%")
    )
    found = compare(none, some)
    return [
        study_claim(
            f"{_NAME}.fewer_preemptions.vllm.sharegpt",
            found.difference,
            paper=None,
            at_least=0.0,
            unit="preemptions for each 100 iterations, 5% against none",
            kind="predicted",
            source=SOURCE,
            mark=mark,
            note=found.words,
        )
    ]


_study = Ablation(
    _NAME,
    "blocks left free at admission",
    _variants,
    ("capacity", "tokens_per_s", "preempted"),
    _expected,
)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

"""How fast the link to the host must be for swapping to beat recomputing."""

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.studies.study import Scale
from experiments.studies.study_claim import compared_claim
from experiments.studies.variants import SOURCE, Ablation, Variant, of_variant

TITLE = "Bandwidth of the link to the host"

_NAME = "ablation_swap_bandwidth"
# Of PCIe 4 x16; all that a copy takes besides is divided likewise.
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Nothing is left free at admission, so that there is something to preempt.
_ENGINE = {"watermark": 0.0}


def _variants(scale: Scale) -> list[Variant]:
    factors = _FACTORS if scale.grid == 1 else _FACTORS[::2]
    swaps = [
        Variant(
            "swap",
            f"{factor:g}x",
            {
                "engine": _ENGINE | {"preemption": "swap"},
                "cost_factors": {
                    "swapped_in_s": 1 / factor,
                    "swapped_out_s": 1 / factor,
                },
            },
        )
        for factor in factors
    ]
    return [*swaps, Variant("recompute", "recompute", {"engine": _ENGINE})]


def _expected(rows: list[Row], mark: str) -> list[Claim]:
    """The paper, section 7.3: with blocks of 16 the two are about equal."""
    again = of_variant(rows, "tokens_per_s", "recompute", "recompute")
    equal, fast = (
        of_variant(rows, "tokens_per_s", "swap", label) for label in ("1x", "4x")
    )
    unit = "x, output at full load"
    return [
        compared_claim(
            f"{_NAME}.ratio.swap_over_recompute.1x",
            equal,
            again,
            paper=None,
            near=1.0,
            unit=unit,
            kind="predicted",
            source="SOSP'23, section 7.3",
            mark=mark,
            note="the paper compares times of a swap, not throughput",
        ),
        compared_claim(
            f"{_NAME}.ratio.swap_over_recompute.4x",
            fast,
            again,
            paper=None,
            at_least=1.0,
            unit=unit,
            kind="predicted",
            source=SOURCE,
            mark=mark,
        ),
    ]


_study = Ablation(
    _NAME,
    "bandwidth to the host",
    _variants,
    ("capacity", "tokens_per_s", "preempted"),
    _expected,
)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

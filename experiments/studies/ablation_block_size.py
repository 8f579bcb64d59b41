"""Block size, by workload and by what becomes of the preempted.

The same slots in blocks of another size (paper, sections 7.2 and 7.3). A small block
costs more copies for a swap and, below 4 tokens, more bytes that attention reads in
vain (`simulator.costs`); other costs of the kernel are not in the model.
"""

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.simulator.systems import BLOCK_SIZE, SETUPS
from experiments.studies.seeds import compare
from experiments.studies.study import Scale
from experiments.studies.study_claim import compared_claim
from experiments.studies.variants import BASE, SOURCE, Ablation, Variant, of_variant

TITLE = "Block size, workload and preemption"

_NAME = "ablation_block_size"
_SIZES, _FEW_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (4, 16, 64, 256)
_DATASETS = {"sharegpt": 1.9, "alpaca": 25.0}
_POLICIES = ("recompute", "swap")


def _variants(scale: Scale) -> list[Variant]:
    slots = SETUPS[BASE["setup"]].num_blocks * BLOCK_SIZE
    return [
        Variant(
            f"{dataset}, {policy}",
            str(size),
            {
                "dataset": dataset,
                "guess": guess,
                "engine": {
                    "block_size": size,
                    "num_blocks": slots // size,
                    "preemption": policy,
                },
            },
        )
        for dataset, guess in _DATASETS.items()
        for policy in _POLICIES
        for size in (_SIZES if scale.grid == 1 else _FEW_SIZES)
    ]


def _expected(rows: list[Row], mark: str) -> list[Claim]:
    """Large blocks are left half empty: the more so, the shorter the sequences are."""
    found = {
        dataset: [
            of_variant(rows, "capacity", f"{dataset}, recompute", size)
            for size in ("16", "256")
        ]
        for dataset in _DATASETS
    }
    made = [
        compared_claim(
            f"{_NAME}.ratio.16_over_256.{dataset}",
            *pair,
            paper=None,
            at_least=1.0,
            unit="x, capacity",
            kind="predicted",
            source="SOSP'23, section 7.2",
            mark=mark,
        )
        for dataset, pair in found.items()
    ]
    lost = {dataset: compare(*pair).ratio for dataset, pair in found.items()}
    made.append(
        compared_claim(
            f"{_NAME}.alpaca_loses_more",
            lost["alpaca"],
            lost["sharegpt"],
            paper=None,
            at_least=1.0,
            unit="x, of the two ratios",
            kind="predicted",
            source=SOURCE,
            mark=mark,
        )
    )
    return made


_study = Ablation(
    _NAME,
    "block size",
    _variants,
    ("capacity", "tokens_per_s", "utilization"),
    _expected,
)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

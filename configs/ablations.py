"""What the paper does not vary: eight ablations of memory, rules, load and machines.

    python -m experiments.run --config=ablations --preset=quick

One alone: `--config.studies='("ablation_techniques",)'`.
"""

from experiments.studies.base_config import study_config

STUDIES = (
    "ablation_techniques",
    "ablation_block_size",
    "ablation_watermark",
    "ablation_token_budget",
    "ablation_victim",
    "ablation_burstiness",
    "ablation_hardware",
    "ablation_swap_bandwidth",
)


def get_config(preset: str = "quick"):
    return study_config(preset, "ablations", STUDIES)

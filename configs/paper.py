"""All figures of the paper that are a matter of memory and load, and Table 1.

python -m experiments.run --config=paper --preset=quick
"""

from experiments.studies.base_config import study_config

STUDIES = ("fig02", "fig12", "fig14", "fig16", "fig17")


def get_config(preset: str = "quick"):
    return study_config(preset, "paper", STUDIES)

"""TODO.

    python -m experiments.run --config=fig19

Expected: TODO
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig19", ("fig19",))

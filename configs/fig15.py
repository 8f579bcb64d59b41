"""TODO.

    python -m experiments.run --config=fig15

Expected: TODO
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig15", ("fig15",))

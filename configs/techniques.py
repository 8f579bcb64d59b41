"""Paging, sharing and continuous batching, alone and together: the share of each.

    python -m experiments.run --config=techniques

Expected: all three together more than double the capacity; without continuous batching
little is left, and sharing counts where requests have several sequences.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "techniques", ("ablation_techniques",))

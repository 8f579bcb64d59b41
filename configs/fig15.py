"""Fig 15 of the paper: blocks saved by sharing them among sequences.

    python -m experiments.run --config=fig15

Expected: near what steady load gives with prompts and outputs drawn apart, computed
from Fig 11: 6.4, 9.6 and 10.6% for n = 2, 4 and 6 on Alpaca (paper: 6.1, 8.5, 9.8),
16.8 to 28.0% on ShareGPT (paper: 16.2 to 30.5). Beams part as a small model's did.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig15", ("fig15",))

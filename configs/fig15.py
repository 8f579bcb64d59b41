"""Fig 15 of the paper: blocks saved by sharing them among sequences.

    python -m experiments.run --config=fig15

Expected: 6.3, 9.2 and 10.3% for n = 2, 4 and 6 on Alpaca (paper: 6.1, 8.5, 9.8), and
38.8, 57.3 and 62.1% for beams (37.6, 53.1, 55.2), which part as a small model's did. On
ShareGPT, where the load is assumed, n = 6 does not reach the paper's 30.5%.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig15", ("fig15",))

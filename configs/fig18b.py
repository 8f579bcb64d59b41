"""Fig 18b of the paper: latency against block size; predicted.

    python -m experiments.run --config=fig18b

Expected: on ShareGPT 2.2 s/token with blocks of 1, 0.21 to 0.37 with 4 to 64 and 0.97
with 256 (paper: 2.3 with 1, 2.0 with 4, 0.085 with 16 and 64, 1.4 with 256): the ends
are slow, the middle is the length of a queue at the capacity, and one claim holds.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig18b", ("fig18b",))

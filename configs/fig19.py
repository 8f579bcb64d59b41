"""Fig 19 of the paper: swapping against recomputing, by block size.

    python -m experiments.run --config=fig19

Expected: swaps within 7% of the 18 times, to which bandwidth and the costs of a copy
are fitted; computing 256 tokens again takes 38 ms (paper: 36 to 39), to which the time
of a serving step is fitted. The paper's latencies (b) are not known.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig19", ("fig19",))

"""Fig 3 of the paper: kinds of waste in a contiguous pool.

    python -m experiments.run --config=fig03

Expected: Two requests in a pool of 3,072 slots. Of all slots 65% are never used under
Orca (Max), 6% under (Pow2), none under (Oracle) and vLLM. The paper has no numbers.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig03", ("fig03",))

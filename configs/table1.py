"""Table 1 of the paper: slots, KV memory and weights of each model.

    python -m experiments.run --config=table1

Expected: 15,728, 9,712 and 60,176 slots for OPT-13B, 66B and 175B, within 1% of the
paper's 15.7K, 9.7K and 60.1K.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "table1", ("table1",))

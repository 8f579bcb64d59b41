"""Fig 2 of the paper: token states, reservation, fragmentation, by system.

    python -m experiments.run --config=fig02

Expected: of all slots of the KV cache, vLLM fills 96%, Orca (Oracle) 37%, (Pow2) 27%
and (Max) 20%, as in the paper. Fourteen of the sixteen shares are within a percentage
point or 4% of it; Pow2's internal and Oracle's external fragmentation are not.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig02", ("fig02",))

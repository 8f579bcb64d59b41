"""Fig 13 of the paper: how many requests run at once.

    python -m experiments.run --config=fig13

Expected: Orca (Max) 7.0, (Pow2) 9.5, (Oracle) 13.1 and vLLM 32.5 on ShareGPT in the
quick preset (paper: 7.0, 9.8, 13.6, 30.4), within 4% and, for vLLM, 15%. On Alpaca 7.0,
42.0, 74.1 and 106.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig13", ("fig13",))

"""Fig 16 of the paper: latency against request rate, behind a shared prefix.

    python -m experiments.run --config=fig16

Expected: vLLM above Orca (Oracle), and further above for the longer prefix.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig16", ("fig16",))

"""Fig 17 of the paper: latency against request rate, chats of several rounds.

    python -m experiments.run --config=fig17

Expected: vLLM at twice the rate of the three Orcas, which are close to each other.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig17", ("fig17",))

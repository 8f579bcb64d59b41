"""Fig 17 of the paper: latency against request rate, chats of several rounds.

    python -m experiments.run --config=fig17

Expected: vLLM at less than twice the rate of the three Orcas, which are close to each
other: with whole traces 1.60 times Oracle, 1.71 times Pow2 and 1.91 times Max. Prompts
are nearly as long as what Orca reserves, so that it wastes less than elsewhere.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig17", ("fig17",))

"""Fig 14 of the paper: latency against request rate, sampling and beam search.

    python -m experiments.run --config=fig14

Expected: the more sequences a request has, the larger vLLM's gain; larger for beams,
which share more (their ancestry is taken from another model: an assumption).
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig14", ("fig14",))

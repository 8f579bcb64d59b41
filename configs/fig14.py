"""Fig 14 of the paper: latency against request rate, sampling and beam search.

    python -m experiments.run --config=fig14

Expected: vLLM above the three Orcas, and by more for beams, which share more (their
ancestry is taken from another model: an assumption). That more sequences gain more, as
in the paper, does not come out: over Orca (Oracle) 1.61, 1.56 and 1.49 times with 2, 4
and 6 samples, 1.77, 1.76 and 1.72 with beams (`quick`); so two claims do not hold.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig14", ("fig14",))

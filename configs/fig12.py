"""Fig 12 of the paper: latency against request rate, one sequence a request.

    python -m experiments.run --config=fig12

Expected: in each panel the order of the paper, vLLM above Orca (Oracle, Pow2, Max) and
FasterTransformer. In panel a, capacities at 0.5 s/token near its own lines. More than
twice the capacity of all but Oracle, which knows the output lengths.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig12", ("fig12",))

"""Fig 12 of the paper: latency against request rate, one sequence a request.

    python -m experiments.run --config=fig12

Expected: in each panel the order of the paper, vLLM above Orca (Oracle, Pow2, Max) and
FasterTransformer; but in f, where the limit is 256 sequences, it equals Oracle. In a,
capacities at 0.5 s/token near the paper's own lines. With whole traces more than twice
the capacity of Orca (Max) and FasterTransformer in all panels; of Orca (Pow2) in all
but c (1.93) and f (1.09); of Oracle, which knows the output lengths, in a and b only.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig12", ("fig12",))

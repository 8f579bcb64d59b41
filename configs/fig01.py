"""Fig 1 of the paper: what fills a GPU, and the throughput of a batch.

    python -m experiments.run --config=fig01

Expected: Throughput within 15% of the ten points, to which the overheads are fitted
(measured: within 2.5%). A request of the existing systems has 1.68 GB (paper 1.63). One
of vLLM has 0.37 GB (paper 0.34), which does not hold: see docs/reproduction.md.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "fig01", ("fig01",))

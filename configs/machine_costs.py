"""The cost model of the simulator beside the real engine: step times on this machine.

    python -m experiments.run --config=machine_costs

The machine's bandwidth and arithmetic are measured, step times of SmolLM2 predicted
from them for 1 to 64 sequences and 64 to 512 tokens before, and measured, on one
thread. Two overheads are fitted on half of the points; the error on the others is
reported. Nothing else should run on the machine meanwhile.
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "machine_costs", ("machine_costs",))

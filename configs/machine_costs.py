"""The cost model of the simulator beside the real engine: step times on this machine.

    python -m experiments.run --config=machine_costs

The machine's bandwidth and arithmetic are measured, step times of SmolLM2 predicted
from them and measured, on one thread: of 1 to 64 sequences that decode with 64 to 512
tokens before, and of prompts of 16 to 256 tokens. Two overheads are fitted on half of
the steps that decode; the error on the others, and on prompts, is reported. Nothing
else should run on the machine meanwhile. Recorded traces can then be served on it:

    python -m experiments.run --config=recorded --config.options.recording.path=FILE \
        --config.options.serving.model=smollm2-135m \
        --config.options.serving.hardware=results/FOLDER/summary.json \
        --config.options.serving.overheads=measured
"""

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    return study_config(preset, "machine_costs", ("machine_costs",))

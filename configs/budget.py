"""The gain of paged + continuous over max + static against the KV budget.

    python -m experiments.run --config=configs/budget.py

The budget is counted in full-length requests. A small one makes both systems wait for
memory; a large one makes both wait for the processor.

Expected (quick): the gain falls as the budget grows, and is about 2x at 8 requests.
Each budget compiles programs of its own.
"""

from experiments.base_config import base_config


def get_config(preset: str = "quick"):
    config = base_config(preset)
    config.name = "budget"
    config.claims = "budget"
    config.cells = (
        {"engine.memory": "max", "engine.batching": "static"},
        {"engine.memory": "paged", "engine.batching": "continuous"},
    )
    config.sweep = ("engine.full_length_requests=2,4,8,16",)
    return config

"""A recorded trace of your own: memory managers, and a prefix cache where it has names.

    python -m experiments.run --config=recorded --config.options.recording.path=FILE

with `--config.options.recording.format=azure` or another.

Formats: `azure` (Azure LLM inference), `burstgpt`, `lengths` (start_offset_s,
input_tokens, output_tokens), `mooncake` (with names of blocks, so that the prefix cache
is served, too), and `sharegpt` and `alpaca`, JSON of texts, which SmolLM2's tokenizer
counts; these have no times and need `rate` or `clients`. The quick preset serves the
first 2,000 requests, `full` all of them; either reads the file a piece at a time.
"""

from ml_collections import ConfigDict

from experiments.studies.base_config import study_config


def get_config(preset: str = "quick"):
    config = study_config(preset, "recorded", ("recorded",))
    config.options = ConfigDict()
    config.options.recording = ConfigDict(
        {
            "path": "",
            "format": "azure",
            # The first so many; 0: all.
            "num_requests": 2000 if preset == "quick" else 0,
            # Whether a malformed line is an error, and not just counted and named.
            "strict": False,
            # Requests come so much faster than recorded.
            "speedup": 1.0,
            # Random arrivals of so many requests/s in place of the recorded times,
            # and how bursty: 1 is Poisson.
            "rate": 0.0,
            "cv": 1.0,
            # A closed loop: so many clients, who wait for an answer and think a while.
            "clients": 0,
            "think_s": 0.0,
        }
    )
    config.options.serving = ConfigDict(
        {
            "model": "llama-3-8b",
            # Or the summary.json of a run of --config=machine_costs, for that machine.
            "hardware": "h100",
            "num_devices": 1,
            # What a step takes beside the hardware's limits: none; paper, those of the
            # paper's software of 2023; measured, those of machine_costs.
            "overheads": "none",
            "block_size": 16,
            "max_seqs": 256,
            "token_budget": 2048,
            # Some of: paged; paged, prefix cache; oracle; pow2; max. Empty: all.
            "memory": (),
        }
    )
    return config

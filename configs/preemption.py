"""Preempted sequences: swapped to the host or computed again (Fig 19).

    python -m experiments.run --config=preemption

More requests than memory holds (lengths like ShareGPT's, a KV budget of 2 full-length
requests and next to no watermark), so that running ones are preempted, by either way
and with several block sizes. After each run it is measured what preempting one
sequence of 256 tokens takes: its blocks copied to the host's memory and back, and
computed again as a prompt on an idle engine. Each block size compiles its own programs.

Expected (quick): 256 tokens are swapped out and in within 2 to 6 ms and computed again
in a third of a second; serving is 1.0 to 1.25 times as fast with swapping. That the two
take about as long, as on the paper's GPU, is reported as not holding. 4 min 30 s on two
cores, most of it compiling.
"""

from experiments.base_config import base_config


def get_config(preset: str = "quick"):
    config = base_config(preset)
    config.name = "preemption"
    config.claims = "preemption"
    config.engine.full_length_requests = 2.0
    config.engine.max_model_len = {"quick": 512, "full": 1024}[preset]
    config.engine.watermark = 0.01
    config.workload.num_requests = {"quick": 24, "full": 60}[preset]
    config.workload.preempted_tokens = 256
    config.cells = (
        {"engine.preemption": "recompute"},
        {"engine.preemption": "swap"},
    )
    sizes = {"quick": "4,16,64", "full": "1,2,4,8,16,32,64,128,256"}[preset]
    config.sweep = (f"engine.block_size={sizes}",)
    return config

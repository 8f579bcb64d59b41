"""Block sizes 1 to 256: utilisation, throughput, tables, scheduling, copy-on-write.

    python -m experiments.run --config=configs/block_size.py

Paged memory and continuous batching, requests behind one shared system prompt, whose
partly filled last block is copied when a sequence first writes to it. The KV budget in
slots is the same for all block sizes.
"""

from experiments.base_config import base_config


def get_config(preset: str = "quick"):
    config = base_config(preset)
    config.name = "block_size"
    config.claims = "block_size"
    config.workload.name = "system_prompt"
    config.workload.sharing = True
    config.sweep = ("engine.block_size=1,2,4,8,16,32,64,128,256",)
    return config

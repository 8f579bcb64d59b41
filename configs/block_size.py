"""Block sizes 1 to 256: utilisation, throughput, tables, scheduling, copy-on-write.

    python -m experiments.run --config=configs/block_size.py

Paged memory and continuous batching, requests behind one shared system prompt, whose
partly filled last block is copied when a sequence first writes to it. The KV budget in
slots is the same for all block sizes.

Expected (quick): 100% of the reserved slots are used at block size 1, 92% at 16, 80% at
64, 47% at 256, and 18, 16, 11 and 6 sequences run; the bytes copied on write grow with
the block, the tables shrink with it. Each block size compiles programs of its own.
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

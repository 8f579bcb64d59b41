"""Prompts behind the same examples: registered, found, or not shared (Fig 16).

    python -m experiments.run --config=shared_prefix

Sentences to translate from English into German, greedy, behind one worked example
(about 80 tokens with the instruction) or five (about 340), as in the paper's runs on
WMT16. Outputs are forced to the length of a translation. The common text is registered
as a prefix; or nothing is said of it, and the prefix cache finds its blocks; or each
request computes and stores it. The baseline is the same paged memory without sharing,
and not the paper's Orca (Oracle).

Expected (quick): output tokens per second, over no sharing: 1.8x registered and 1.7x
found with one example, 5.0x with five; 49 and 82% of the blocks are saved. 2 minutes on
two cores.
"""

from experiments.base_config import base_config


def get_config(preset: str = "quick"):
    config = base_config(preset)
    config.name = "shared_prefix"
    config.claims = "shared_prefix"
    config.engine.max_model_len = 512
    config.engine.full_length_requests = 8.0
    config.workload.length_scale = 1.0
    config.workload.num_requests = {"quick": 48, "full": 240}[preset]
    config.cells = tuple(
        {
            "workload.name": workload,
            "workload.sharing": way == "registered",
            "engine.prefix_caching": way == "automatic",
        }
        for workload in ("one_shot", "few_shot")
        for way in ("none", "registered", "automatic")
    )
    return config

"""Several samples of one prompt, which is computed and stored once (Fig 15).

    python -m experiments.run --config=parallel_sampling

1, 2, 4 and 6 sequences a request, sampled at temperature 1, with lengths like Alpaca's:
outputs forced to the length drawn, prompts as plain text, since a chat template would
double their length. Blocks of the prompt are shared among the sequences of a request,
or not. All requests are there at time 0; the KV budget is 8 full-length requests.

Expected (quick): 4, 7 and 9% of the blocks are saved for n = 2, 4 and 6 (the paper: 6,
9 and 10%), and 6 to 10 kB copied on write for each token.
"""

from experiments.base_config import alpaca_config


def get_config(preset: str = "quick"):
    config = alpaca_config(preset)
    config.name = "parallel_sampling"
    config.claims = "parallel_sampling"
    config.engine.max_n = 6
    config.workload.temperature = 1.0
    config.cells = (
        {"workload.n": 1, "engine.sharing": True},
        *(
            {"workload.n": n, "engine.sharing": sharing}
            for n in (2, 4, 6)
            for sharing in (False, True)
        ),
    )
    return config

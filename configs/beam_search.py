"""Beam search, whose beams share all blocks before they part (Fig 15).

    python -m experiments.run --config=beam_search
    python -m experiments.beam_traces results/FOLDER FILE

Beam widths 2, 4 and 6, with lengths like Alpaca's: outputs forced to the length drawn,
prompts as plain text. Which beam each survivor continues is the model's choice, and is
kept with the outputs (`beam_parents`); `experiments.beam_traces` makes a compact file
of it. All requests are there at time 0; the KV budget is 8 full-length requests. Beside
it, as many samples of each prompt, which share nothing: what the same decoding costs
without a search.

Expected (quick): 39, 58 and 63% of the blocks are saved for widths 2, 4 and 6 (the
paper: 38, 53 and 55%), and 95 to 140 kB copied on write for each token.
"""

from experiments.base_config import alpaca_config


def get_config(preset: str = "quick"):
    config = alpaca_config(preset)
    config.name = "beam_search"
    config.claims = "beam_search"
    config.engine.max_beam_width = 6
    config.cells = (
        *(
            {
                "workload.n": n,
                "workload.temperature": 1.0,
                "engine.max_n": 6,
                "engine.max_beam_width": 1,
                "engine.sharing": False,
            }
            for n in (2, 4, 6)
        ),
        *(
            {"workload.beam_width": width, "engine.sharing": True}
            for width in (2, 4, 6)
        ),
    )
    return config

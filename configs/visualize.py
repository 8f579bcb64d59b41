"""The interactive page: a small workload under seven systems, every iteration seen.

    python -m experiments.run --config=visualize

writes results/visualize.html in a few minutes on two cores, as `python -m
experiments.visualize` does, which can show it on localhost as well. More requests:
`--preset=full`, or `--config.page.requests=30`.

Expected: all answers are the same, token by token, under all seven systems.
"""

from experiments.visualize.settings import page_config


def get_config(preset: str = "quick"):
    return page_config(preset)

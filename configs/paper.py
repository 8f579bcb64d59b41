"""The paper's evaluation: Table 1 and Figs 1, 2, 3 and 12 to 19, from one command.

    python -m experiments.run --config=paper --preset=quick
    python -m experiments.run --config=paper --preset=full

Looked for: what is a matter of memory alone within 4% of the paper, what is fitted
within 15%, and vLLM serving twice the load of each baseline. Some of it does not hold:
twice Orca (Oracle) mostly not, twice Orca (Pow2) not with OPT-175B, and twice any Orca
not with whole chats. `quick` took 7 minutes on two cores (docs/reproduction.md has what
came out).
"""

from experiments.studies.base_config import study_config

# The longest first, so that no worker is left with one at the end.
STUDIES = (
    "fig12",
    "fig14",
    "fig17",
    "fig16",
    "fig18b",
    "fig19",
    "fig13",
    "fig15",
    "fig02",
    "fig01",
    "fig03",
    "table1",
)


def get_config(preset: str = "quick"):
    return study_config(preset, "paper", STUDIES)

"""The panels of Figs 12, 14, 16 and 17: who is served what on which machine."""

from typing import NamedTuple

from experiments.simulator.model_profiles import MODELS
from experiments.simulator.systems import SETUPS

# Of every number of beam searches (`simulator.beams`).
BEAMS_ASSUMED = "assumed: beams part as those of SmolLM2-135M did, on texts of our own"
_BASIC = ("vllm", "orca_oracle", "orca_pow2", "orca_max")


class Panel(NamedTuple):
    """One panel.

    Attributes:
      figure: such as `fig12`.
      letter: such as `a`; empty if the figure has one panel.
      setup: key of `systems.SETUPS`.
      dataset: that lengths are like.
      systems: in the order in which they are drawn.
      seconds: how long the paper's trace lasts.
      start: a rate, in requests/s, near what the systems serve; a search begins there.
      n: sequences of a request, sampled.
      beam_width: of a beam search.
      prefix_len: tokens that all prompts begin with.
    """

    figure: str
    letter: str
    setup: str
    dataset: str
    systems: tuple[str, ...]
    seconds: int
    start: float
    n: int = 1
    beam_width: int = 1
    prefix_len: int = 0

    @property
    def name(self) -> str:
        """Such as `fig12a`."""
        return self.figure + self.letter

    @property
    def title(self) -> str:
        """What stands above the panel."""
        model = MODELS[SETUPS[self.setup].model].name
        words = [f"{model}, {_DATASETS[self.dataset]}"]
        if self.n > 1:
            words.append(f"n = {self.n}")
        if self.beam_width > 1:
            words.append(f"beam width {self.beam_width}")
        if self.prefix_len:
            words.append(f"prefix of {self.prefix_len} tokens")
        return ", ".join(words)


_DATASETS = {
    "sharegpt": "ShareGPT",
    "alpaca": "Alpaca",
    "wmt16": "WMT16 En-De",
    "chat": "ShareGPT, whole chats",
}

FIG12 = tuple(
    Panel("fig12", letter, setup, dataset, (*_BASIC, "ft"), seconds, start)
    for letter, setup, dataset, seconds, start in (
        ("a", "opt-13b", "sharegpt", 3600, 1.0),
        ("b", "opt-66b", "sharegpt", 3600, 0.5),
        ("c", "opt-175b", "sharegpt", 900, 1.5),
        ("d", "opt-13b", "alpaca", 3600, 15.0),
        ("e", "opt-66b", "alpaca", 3600, 10.0),
        ("f", "opt-175b", "alpaca", 900, 15.0),
    )
)
FIG14 = tuple(
    Panel("fig14", letter, "opt-13b", "alpaca", _BASIC, 3600, 24.0 / width, **several)
    for letter, width, several in (
        ("a", 2, {"n": 2}),
        ("b", 4, {"n": 4}),
        ("c", 6, {"n": 6}),
        ("d", 2, {"beam_width": 2}),
        ("e", 4, {"beam_width": 4}),
        ("f", 6, {"beam_width": 6}),
    )
)
FIG16 = tuple(
    Panel(
        "fig16",
        letter,
        "llama-13b",
        "wmt16",
        ("vllm", "orca_oracle"),
        1200,
        15.0,
        prefix_len=prefix,
    )
    for letter, prefix in (("a", 80), ("b", 341))
)
FIG17 = (Panel("fig17", "", "opt-13b", "chat", _BASIC, 3600, 0.5),)

# Where a search for a capacity begins, in requests/s: near what came out of it before.
# Any other start gives the same within the tolerance, after a few more tries.
GUESSES: dict[tuple[str, str], float] = {
    ("fig12a", "vllm"): 2.0,
    ("fig12a", "orca_oracle"): 1.0,
    ("fig12a", "orca_pow2"): 0.75,
    ("fig12a", "orca_max"): 0.55,
    ("fig12a", "ft"): 0.21,
    ("fig16a", "vllm"): 44.0,
    ("fig16a", "orca_oracle"): 24.0,
    ("fig16b", "vllm"): 34.0,
    ("fig16b", "orca_oracle"): 11.0,
    ("fig17", "vllm"): 1.1,
    ("fig17", "orca_oracle"): 0.67,
}

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
    Panel("fig12", letter, setup, dataset, (*_BASIC, "ft"), seconds)
    for letter, setup, dataset, seconds in (
        ("a", "opt-13b", "sharegpt", 3600),
        ("b", "opt-66b", "sharegpt", 3600),
        ("c", "opt-175b", "sharegpt", 900),
        ("d", "opt-13b", "alpaca", 3600),
        ("e", "opt-66b", "alpaca", 3600),
        ("f", "opt-175b", "alpaca", 900),
    )
)
FIG14 = tuple(
    Panel("fig14", letter, "opt-13b", "alpaca", _BASIC, 3600, **several)
    for letter, several in (
        ("a", {"n": 2}),
        ("b", {"n": 4}),
        ("c", {"n": 6}),
        ("d", {"beam_width": 2}),
        ("e", {"beam_width": 4}),
        ("f", {"beam_width": 6}),
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
        prefix_len=prefix,
    )
    for letter, prefix in (("a", 80), ("b", 341))
)
FIG17 = (Panel("fig17", "", "opt-13b", "chat", _BASIC, 3600),)

# Where a search for a capacity begins, in requests/s: near what came out of it before,
# with traces that are cut short and with whole ones. Any other start gives the same but
# for a few percent, after a few more tries: each rate draws a trace of its own.
GUESSES: dict[tuple[str, str], tuple[float, float]] = {
    ("fig12a", "vllm"): (2.3, 2.03),
    ("fig12a", "orca_oracle"): (1.2, 0.982),
    ("fig12a", "orca_pow2"): (0.89, 0.73),
    ("fig12a", "orca_max"): (0.72, 0.546),
    ("fig12a", "ft"): (0.22, 0.185),
    ("fig12b", "vllm"): (1.5, 1.28),
    ("fig12b", "orca_oracle"): (0.71, 0.542),
    ("fig12b", "orca_pow2"): (0.49, 0.396),
    ("fig12b", "orca_max"): (0.34, 0.275),
    ("fig12b", "ft"): (0.1, 0.104),
    ("fig12c", "vllm"): (7.8, 4.21),
    ("fig12c", "orca_oracle"): (5.3, 2.76),
    ("fig12c", "orca_pow2"): (4.1, 2.19),
    ("fig12c", "orca_max"): (3.1, 1.76),
    ("fig12c", "ft"): (0.36, 0.191),
    ("fig12d", "vllm"): (37, 37.1),
    ("fig12d", "orca_oracle"): (24, 23.8),
    ("fig12d", "orca_pow2"): (17, 16.0),
    ("fig12d", "orca_max"): (3.4, 3.27),
    ("fig12d", "ft"): (1.5, 1.47),
    ("fig12e", "vllm"): (28, 27.9),
    ("fig12e", "orca_oracle"): (15, 15.1),
    ("fig12e", "orca_pow2"): (9.8, 9.44),
    ("fig12e", "orca_max"): (1.8, 1.62),
    ("fig12e", "ft"): (1.0, 0.968),
    ("fig12f", "vllm"): (39, 33.1),
    ("fig12f", "orca_oracle"): (39, 33.1),
    ("fig12f", "orca_pow2"): (36, 30.4),
    ("fig12f", "orca_max"): (12, 10.7),
    ("fig12f", "ft"): (1.4, 1.0),
    ("fig14a", "vllm"): (21, 18.6),
    ("fig14a", "orca_oracle"): (14, 11.8),
    ("fig14a", "orca_pow2"): (9.2, 7.91),
    ("fig14a", "orca_max"): (1.9, 1.58),
    ("fig14b", "vllm"): (10, 8.92),
    ("fig14b", "orca_oracle"): (6.6, 5.81),
    ("fig14b", "orca_pow2"): (4.2, 3.84),
    ("fig14b", "orca_max"): (0.89, 0.725),
    ("fig14c", "vllm"): (6.5, 5.83),
    ("fig14c", "orca_oracle"): (4.4, 3.82),
    ("fig14c", "orca_pow2"): (2.9, 2.4),
    ("fig14c", "orca_max"): (0.62, 0.449),
    ("fig14d", "vllm"): (26, 20.9),
    ("fig14d", "orca_oracle"): (15, 12),
    ("fig14d", "orca_pow2"): (9.6, 8.18),
    ("fig14d", "orca_max"): (1.7, 1.35),
    ("fig14e", "vllm"): (13, 10.7),
    ("fig14e", "orca_oracle"): (6.9, 5.75),
    ("fig14e", "orca_pow2"): (5, 3.79),
    ("fig14e", "orca_max"): (0.49, 0.415),
    ("fig14f", "vllm"): (9.1, 7.02),
    ("fig14f", "orca_oracle"): (5, 3.7),
    ("fig14f", "orca_pow2"): (3.5, 2.44),
    ("fig14f", "orca_max"): (0.5, 0.415),
    ("fig16a", "vllm"): (52, 41.8),
    ("fig16a", "orca_oracle"): (27, 22.0),
    ("fig16b", "vllm"): (39, 32.0),
    ("fig16b", "orca_oracle"): (13, 10.2),
    ("fig17", "vllm"): (1.3, 0.994),
    ("fig17", "orca_oracle"): (0.73, 0.622),
    ("fig17", "orca_pow2"): (0.74, 0.58),
    ("fig17", "orca_max"): (0.65, 0.521),
}

"""Blocks that sharing saves: one bar of the paper's Fig 15."""

from experiments.simulator.evaluate import draw_trace, evaluate


def block_saving(
    *,
    n: int = 1,
    beam_width: int = 1,
    dataset: str = "alpaca",
    rate: float = 20.0,
    seconds: float = 900.0,
    window: tuple[int, int] = (300, 900),
    seed: int = 0,
    correlation: float = 0.0,
) -> float:
    """Returns 1 - 1 / mean(logical / physical blocks), the mean over iterations.

    vLLM serves OPT-13B on the paper's GPU; by default at the load of its Fig 15. How
    beams part is taken from another model (see `beams`): an assumption.

    Args:
      n: sequences of each request.
      beam_width: beams of each, if they are beam searches; then n is 1.
      dataset: `sharegpt` or `alpaca`.
      rate: requests a second.
      seconds: how long requests arrive.
      window: seconds from which on, and up to which, iterations count.
      seed: decides lengths, arrivals, and which search each request repeats.
      correlation: of prompt and output lengths, see `draw_lengths`.

    Raises:
      UserError: no search of that width is recorded, or several sequences of beams.
    """
    trace = draw_trace(
        dataset, rate, seconds, seed, n, beam_width, correlation=correlation
    )
    results = evaluate("vllm", "opt-13b", trace, dataset=dataset, window=window)
    return results.means["block_saving"]

"""One point of the paper's evaluation: a system, a load, and what comes of it."""

import numpy as np

from experiments.errors import UserError
from experiments.lengths import draw_lengths
from experiments.simulator import systems
from experiments.simulator.arrivals import poisson_arrivals
from experiments.simulator.beams import draw_searches, recorded_parents
from experiments.simulator.run import Results, simulate
from experiments.simulator.systems import MAX_MODEL_LEN, SETUPS
from experiments.simulator.trace import Trace


def draw_trace(
    dataset: str,
    rate: float,
    seconds: float,
    seed: int,
    n: int = 1,
    beam_width: int = 1,
    correlation: float = 0.0,
) -> Trace:
    """Returns requests with lengths like a dataset's, and Poisson arrivals.

    All sequences of a request are as long, since their lengths are forced. The ancestry
    of beams is that of recorded searches (see `beams`): an assumption.

    Args:
      dataset: `sharegpt` or `alpaca`.
      rate: requests a second.
      seconds: how long requests arrive.
      seed: decides lengths and arrivals, and which search each request repeats.
      n: sequences of each request.
      beam_width: beams of each request, if it is a beam search; then n is 1.
      correlation: of prompt and output lengths, see `draw_lengths`.

    Raises:
      UserError: no search of that width is recorded, or several sequences of beams.
    """
    if n > 1 and beam_width > 1:
        raise UserError(f"n is {n} and beam_width {beam_width}; one of them must be 1")
    count = max(round(rate * seconds), 1)
    arrivals_rng, lengths_rng, searches_rng = (
        np.random.default_rng((seed, i)) for i in range(3)
    )
    lengths = draw_lengths(lengths_rng, count, dataset, 1.0, MAX_MODEL_LEN, correlation)
    outputs = np.repeat(lengths[:, 1:], max(n, beam_width), axis=1)
    search = None
    if beam_width > 1:
        search = draw_searches(searches_rng, count, recorded_parents(beam_width))
    arrival = poisson_arrivals(arrivals_rng, count, rate)
    return Trace(arrival, lengths[:, 0], outputs, search=search)


def evaluate(
    system: str,
    setup_name: str,
    trace: Trace,
    *,
    dataset: str = "sharegpt",
    window: tuple[int, int] | None = None,
) -> Results:
    """Serves a trace with one of the paper's systems.

    Args:
      system: one of `systems.SYSTEMS`.
      setup_name: key of `systems.SETUPS`.
      trace: the requests.
      dataset: that the lengths are like, for `ft`.
      window: seconds from which on, and up to which, steps count in the means.
    """
    setup = SETUPS[setup_name]
    # Powers of two, so that runs of similar size share a compiled program.
    slots = 1 << max(len(trace) * trace.n - 1, 255).bit_length()
    width = trace.beam_width
    config = systems.engine_config(
        system,
        setup,
        dataset=dataset,
        n=trace.n if width == 1 else 1,
        beam_width=width,
        slots=slots,
    )
    program = systems.program(system, setup, config)
    where = {} if window is None else {"window": window}
    return simulate(config, trace, program, **where)


def normalized_latency(results: Results) -> float:
    """Returns the mean of latency / output tokens, in seconds (paper, section 6.1).

    Requests that were rejected are left out.
    """
    latency = (results.ended - results.arrival) / results.output_len
    return float(np.nanmean(latency))

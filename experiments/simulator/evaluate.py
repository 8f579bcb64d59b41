"""One point of the paper's evaluation: a system, a load, and what comes of it."""

import numpy as np

from experiments.lengths import draw_lengths
from experiments.simulator import systems
from experiments.simulator.arrivals import poisson_arrivals
from experiments.simulator.run import Results, simulate
from experiments.simulator.systems import MAX_MODEL_LEN, SETUPS
from experiments.simulator.trace import Trace


def draw_trace(
    dataset: str, rate: float, seconds: float, seed: int, n: int = 1
) -> Trace:
    """Returns requests with lengths like a dataset's, and Poisson arrivals.

    All sequences of a request are as long, since their lengths are forced.

    Args:
      dataset: `sharegpt` or `alpaca`.
      rate: requests a second.
      seconds: how long requests arrive.
      seed: decides lengths and arrivals.
      n: sequences of each request.
    """
    count = max(round(rate * seconds), 1)
    arrivals_rng, lengths_rng = (np.random.default_rng((seed, i)) for i in range(2))
    lengths = draw_lengths(lengths_rng, count, dataset, 1.0, MAX_MODEL_LEN)
    outputs = np.repeat(lengths[:, 1:], n, axis=1)
    return Trace(poisson_arrivals(arrivals_rng, count, rate), lengths[:, 0], outputs)


def evaluate(
    system: str,
    setup_name: str,
    trace: Trace,
    *,
    dataset: str = "sharegpt",
    window: tuple[int, int] | None = None,
    give_up_above: float | None = None,
) -> Results:
    """Serves a trace with one of the paper's systems.

    Args:
      system: one of `systems.SYSTEMS`.
      setup_name: key of `systems.SETUPS`.
      trace: the requests.
      dataset: that the lengths are like, for `ft`.
      window: seconds from which on, and up to which, steps count in the means.
      give_up_above: normalized latency above which the run need not be finished.
    """
    setup = SETUPS[setup_name]
    # As many slots whatever the trace: so runs share a compiled program.
    config = systems.engine_config(system, setup, dataset=dataset, n=trace.n)
    program = systems.program(system, setup, config)
    where = {} if window is None else {"window": window}
    return simulate(config, trace, program, give_up_above=give_up_above, **where)


def normalized_latency(results: Results) -> float:
    """Returns the mean of latency / output tokens, in seconds (paper, section 6.1).

    Requests that were rejected are left out. Infinite for a run that was given up.
    """
    if results.gave_up:
        return float("inf")
    latency = (results.ended - results.arrival) / results.output_len
    return float(np.nanmean(latency))

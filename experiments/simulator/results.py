"""What comes of a simulation."""

from typing import NamedTuple

import numpy as np

from experiments.simulator.request_times import Latencies


class Results(NamedTuple):
    """What became of a trace.

    Columns of requests are empty if they were not kept.

    Attributes:
      arrival: f64[N]. Seconds, of the requests in the order of their arrival.
      first_token: f64[N]. When the first token was there; NaN if rejected.
      ended: f64[N]. When all sequences were done; NaN if rejected.
      output_len: i64[N]. Tokens generated, of the longest sequence.
      latencies: means and quantiles.
      rejected: requests that can never fit.
      seconds: when the last one ended.
      steps: in all.
      means: over the steps that count, see `totals.summarise_totals`.
      log: f32[G, F], rows of the step log, if they were asked for.
      gave_up: whether the run was cut short, see `simulate`. What had not ended then
        has infinite times, and what had not arrived is missing.
    """

    arrival: np.ndarray
    first_token: np.ndarray
    ended: np.ndarray
    output_len: np.ndarray
    latencies: Latencies
    rejected: int
    seconds: float
    steps: int
    means: dict[str, float]
    log: np.ndarray
    gave_up: bool = False

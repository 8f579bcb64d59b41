"""Giving up: runs whose latency is sure to end above a threshold are not run out."""

import numpy as np

from experiments.simulator.trace import Trace
from paged_jax.config import EngineConfig


def least_latency(trace: Trace, ended: np.ndarray, now: float) -> float:
    """Returns what the mean of latency / output tokens cannot end below, in s/token.

    Who has arrived and not ended will end after now, and who has not arrived takes no
    less than no time. As the clock goes on the bound rises to the mean itself.

    Args:
      trace: all requests.
      ended: f64[M], seconds, of the first M of them, infinite where not ended; none of
        the others has.
      now: the clock.
    """
    until = np.full(len(trace), now)
    until[: len(ended)] = np.minimum(ended, now)
    taken = np.maximum(until - trace.arrival, 0.0)
    return float(np.mean(taken / trace.output_len.max(axis=1)))


def all_fit(config: EngineConfig) -> bool:
    """Returns whether no request can be rejected, so that each counts in the mean.

    So it is if all sequences of a request have room at full length, beside prefixes.
    """
    sequences = max(config.max_n, config.max_beam_width) + config.max_prefixes
    return sequences * config.blocks_per_request <= config.total_blocks

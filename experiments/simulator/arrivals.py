"""When requests arrive: at random, in bursts, or as they were recorded."""

import numpy as np

from experiments.errors import UserError


def poisson_arrivals(rng: np.random.Generator, count: int, rate: float) -> np.ndarray:
    """Returns f64[N] seconds, ascending, of a Poisson process.

    Args:
      rng: source of randomness.
      count: N.
      rate: requests a second.
    """
    return gamma_arrivals(rng, count, rate, 1.0)


def gamma_arrivals(
    rng: np.random.Generator, count: int, rate: float, cv: float
) -> np.ndarray:
    """Returns f64[N] seconds, ascending, whose distances are gamma-distributed.

    Args:
      rng: source of randomness.
      count: N.
      rate: requests a second.
      cv: coefficient of variation of the distances: 1 is a Poisson process, more comes
        in bursts, less is more regular.

    Raises:
      UserError: a rate or a variation that is not above 0 and finite.
    """
    _check_positive("rate", rate)
    _check_positive("cv", cv)
    shape = 1.0 / cv**2
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), count))


def stretch(arrivals: np.ndarray, rate: float) -> np.ndarray:
    """Returns recorded arrivals, stretched to a mean rate.

    Args:
      arrivals: f64[N], seconds, ascending, not all the same.
      rate: requests a second, from the first to the last.

    Raises:
      UserError: all arrive at once, or a rate that is not above 0 and finite.
    """
    _check_positive("rate", rate)
    if len(arrivals) < 2 or not arrivals[-1] > arrivals[0]:
        raise UserError(
            f"{len(arrivals)} arrivals with no time between the first and the last "
            "have no rate; take more of the recording"
        )
    span = arrivals[-1] - arrivals[0]
    return (arrivals - arrivals[0]) * ((len(arrivals) - 1) / (rate * span))


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{name} is {value}; it must be above 0 and finite")

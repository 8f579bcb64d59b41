"""When requests arrive: at random, or in bursts."""

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


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{name} is {value}; it must be above 0 and finite")

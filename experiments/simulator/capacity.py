"""Capacity: the load at which a latency crosses a threshold (paper, section 6)."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.errors import UserError

# 2**20 of what was asked for: whatever crosses, crosses within that.
_MOST_DOUBLINGS = 20


class Probe(NamedTuple):
    """What was found at one load.

    Attributes:
      rate: requests a second.
      latency: seconds a token; infinite where it is only known to be above the
        threshold.
    """

    rate: float
    latency: float


class Capacity(NamedTuple):
    """Where a latency crosses a threshold.

    Attributes:
      rate: requests a second, the geometric middle of `low` and `high`.
      low: a rate at which the latency is at most the threshold.
      high: a rate at which it is above.
      probes: all that was tried, ascending in the rate.
    """

    rate: float
    low: float
    high: float
    probes: tuple[Probe, ...]


def find_capacity(
    latency_at: Callable[[float], float],
    threshold: float,
    low: float,
    high: float,
    tolerance: float = 0.02,
) -> Capacity:
    """Finds the rate at which a latency crosses a threshold.

    The bracket is halved downwards or doubled upwards until the latency is at most the
    threshold at its lower end and above it at its upper end, and then bisected,
    geometrically. Where the latency does not rise steadily with the rate, one of its
    crossings is found. No rate is tried twice.

    Args:
      latency_at: the latency at a rate; may be infinite if it is above the threshold.
      threshold: in the latency's unit.
      low: a first guess of a rate below, above 0.
      high: a first guess of a rate above, more than `low`.
      tolerance: the upper end is at most so much above the lower one, as a share of it.

    Raises:
      UserError: a bad bracket or tolerance, a latency that is no number, or one that
        does not cross within a factor of 2**20 of the bracket.
    """
    if not 0 < low < high < math.inf:
        raise UserError(
            f"the bracket is from {low} to {high}; it must ascend from above 0"
        )
    if not tolerance > 0:
        raise UserError(f"tolerance is {tolerance}; it must be above 0")
    probes: list[Probe] = []

    def crosses(rate: float) -> bool:
        latency = float(latency_at(rate))
        if math.isnan(latency):
            raise UserError(f"there is no latency at {rate:g} requests a second")
        probes.append(Probe(rate, latency))
        return latency > threshold

    def give_up_after(rate: float) -> None:
        if len(probes) > _MOST_DOUBLINGS:
            raise UserError(
                f"the latency is on the same side of {threshold:g} at all rates from "
                f"{probes[0].rate:g} to {rate:g} requests a second: no capacity"
            )

    if crosses(low):
        low, high = low / 2, low
        while crosses(low):
            low, high = low / 2, low
            give_up_after(low)
    else:
        while not crosses(high):
            low, high = high, high * 2
            give_up_after(high)
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        if crosses(middle):
            high = middle
        else:
            low = middle
    return Capacity(math.sqrt(low * high), low, high, tuple(sorted(probes)))


def crossing(points: Sequence[tuple[float, float]], threshold: float) -> float | None:
    """Returns where a drawn line first rises above a threshold; None if nowhere.

    Straight lines from point to point in the plot's own coordinates, which are linear
    in the paper's latency plots. So a capacity is read off its figures, and off a
    measurement on the same grid of rates, which makes the two comparable: the lines
    are far from a true curve that bends up steeply between two points.

    Args:
      points: (rate, latency), ascending in the rate.
      threshold: in the latency's unit.
    """
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x1 < x0:
            raise UserError(f"rate {x1:g} follows {x0:g}; the points must ascend")
        if y0 <= threshold < y1:
            share = 0.0 if math.isinf(y1) else (threshold - y0) / (y1 - y0)
            return x0 + share * (x1 - x0)
    return None

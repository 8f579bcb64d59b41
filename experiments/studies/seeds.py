"""Numbers over several seeds: their mean, their spread, and what differs."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from experiments.attribution import Row


class Estimate(NamedTuple):
    """A number that was found with several seeds.

    Attributes:
      mean: over the seeds.
      spread: largest less smallest; 0, and not known, with one seed.
      count: of seeds; 0 of a number that depends on nothing random.
      low: smallest; None if it is not known, as of a number that is made of others.
      high: largest; likewise.
    """

    mean: float
    spread: float
    count: int
    low: float | None = None
    high: float | None = None

    @property
    def reach(self) -> tuple[float, float]:
        """How far low and high are from the mean; half the spread if not known."""
        if self.low is None or self.high is None:
            return self.spread / 2, self.spread / 2
        # A mean of equal numbers may be off by a rounding.
        return max(self.mean - self.low, 0.0), max(self.high - self.mean, 0.0)

    def differs(self, other: "Estimate") -> bool:
        """Returns whether the means are further apart than half of both spreads.

        So intervals as wide as the spreads, with the means in their middles, lie apart.
        """
        return abs(self.mean - other.mean) > (self.spread + other.spread) / 2


class Comparison(NamedTuple):
    """Two numbers beside each other.

    Attributes:
      ratio: of the first to the second; None if one is missing, or the second is 0.
      difference: the first less the second; None if one is missing.
      words: whether they differ by more than their spread over the seeds; empty if one
        is missing, or neither depends on a seed.
    """

    ratio: Estimate | None
    difference: Estimate | None
    words: str


def exact(value: float) -> Estimate:
    """Returns a number that depends on nothing random."""
    return Estimate(float(value), 0.0, 0)


def estimate(values: Iterable[float]) -> Estimate | None:
    """Returns the estimate; None without values, or with one that is no number."""
    found = np.array(list(values), dtype=float)
    if not found.size or not np.isfinite(found).all():
        return None
    low, high = float(found.min()), float(found.max())
    return Estimate(float(found.mean()), high - low, int(found.size), low, high)


def over_seeds(
    rows: Iterable[Row], read: Callable[[dict[str, Any]], float], **cell: Any
) -> Estimate | None:
    """Returns the estimate of a metric, over the rows whose cells have these values.

    Args:
      rows: of a study; those without a seed depend on nothing random.
      read: takes the number out of a row's metrics.
      cell: settings and their values.
    """
    some = [
        row
        for row in rows
        if all(row["cell"].get(key) == value for key, value in cell.items())
    ]
    found = estimate(read(row["metrics"]) for row in some)
    if found is not None and not any("seed" in row["cell"] for row in some):
        return found._replace(count=0)
    return found


def compare(first: Estimate | None, second: Estimate | None) -> Comparison:
    """Compares two numbers: ratio, difference, and whether that exceeds the spread.

    The spreads of ratio and difference are what those of the two allow, to first order.

    Args:
      first: the one; None if it is missing.
      second: the other.
    """
    if first is None or second is None:
        return Comparison(None, None, "")
    counts = [one.count for one in (first, second) if one.count]
    count = min(counts, default=0)
    difference = Estimate(
        first.mean - second.mean, math.hypot(first.spread, second.spread), count
    )
    ratio = None
    if second.mean != 0:
        mean = first.mean / second.mean
        spread = math.hypot(first.spread, mean * second.spread) / abs(second.mean)
        ratio = Estimate(mean, spread, count)
    return Comparison(ratio, difference, _words(first, second, count))


def _words(first: Estimate, second: Estimate, count: int) -> str:
    if count == 0:
        return ""
    if count == 1:
        return "one seed: whether the difference exceeds the spread is not known"
    how = "exceeds" if first.differs(second) else "is within"
    return f"the difference {how} the spread over {count} seeds"

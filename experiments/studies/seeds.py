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
      spread: largest less smallest.
      count: of seeds.
    """

    mean: float
    spread: float
    count: int

    def differs(self, other: "Estimate") -> bool:
        """Returns whether the ranges of the two numbers lie apart."""
        return abs(self.mean - other.mean) > (self.spread + other.spread) / 2


def estimate(values: Iterable[float]) -> Estimate | None:
    """Returns the estimate; None without values, or with one that is no number."""
    found = np.array(list(values), dtype=float)
    if not found.size or not np.isfinite(found).all():
        return None
    return Estimate(float(found.mean()), float(np.ptp(found)), int(found.size))


def over_seeds(
    rows: Iterable[Row], read: Callable[[dict[str, Any]], float], **cell: Any
) -> Estimate | None:
    """Returns the estimate of a metric, over the rows whose cells have these values.

    Args:
      rows: of a study.
      read: takes the number out of a row's metrics.
      cell: settings and their values.
    """
    return estimate(
        read(row["metrics"])
        for row in rows
        if all(row["cell"].get(key) == value for key, value in cell.items())
    )


def ratio(over: Estimate | None, under: Estimate | None) -> Estimate | None:
    """Returns a ratio; its spread is what those of the two allow, to first order."""
    if over is None or under is None or under.mean == 0:
        return None
    mean = over.mean / under.mean
    relative = math.hypot(over.spread / over.mean, under.spread / under.mean)
    return Estimate(mean, abs(mean) * relative, min(over.count, under.count))

"""What is kept of requests that have ended: their times, or sums of them."""

import numpy as np

# Buckets of the histograms are so much wider each than the one before, from the least
# to the most seconds that are told apart: a quantile is off by half of it.
_GROWTH, _LEAST, _MOST = 1.02, 1e-6, 1e8
_BUCKETS = int(np.log(_MOST / _LEAST) / np.log(_GROWTH)) + 1


class Latencies:
    """Means and quantiles of latencies, in memory that does not grow with requests.

    Names of latencies: `normalized` (of a request, for each output token; the paper's
    section 6.1), `first_token` and `total`, all in seconds from the arrival on.

    Attributes:
      count: requests that have ended, rejected ones left out.
    """

    NAMES = ("normalized", "first_token", "total")

    def __init__(self):
        self.count = 0
        self._sums = np.zeros(len(self.NAMES))
        self._buckets = np.zeros((len(self.NAMES), _BUCKETS), np.int64)

    def add(
        self,
        arrival: np.ndarray,
        first_token: np.ndarray,
        ended: np.ndarray,
        output_len: np.ndarray,
    ) -> None:
        """Adds requests, f64[N] seconds and i64[N] tokens; not those with NaN."""
        total = ended - arrival
        rows = np.stack([total / output_len, first_token - arrival, total])
        rows = rows[:, np.isfinite(rows).all(axis=0)]
        self.count += rows.shape[1]
        self._sums += rows.sum(axis=1)
        scaled = np.log(np.maximum(rows / _LEAST, 1)) / np.log(_GROWTH)
        places = np.minimum(scaled.astype(np.int64), _BUCKETS - 1)
        for buckets, place in zip(self._buckets, places):
            buckets += np.bincount(place, minlength=_BUCKETS)

    def mean(self, name: str) -> float:
        """Returns the mean of one of `NAMES`; NaN without requests."""
        if not self.count:
            return float("nan")
        return float(self._sums[self.NAMES.index(name)] / self.count)

    def quantile(self, name: str, share: float) -> float:
        """Returns what a share of the requests stays below, within 1% of it.

        Args:
          name: one of `NAMES`.
          share: from 0 to 1.

        Returns:
          Seconds; NaN without requests. What is below a microsecond is one.
        """
        if not self.count:
            return float("nan")
        reached = np.cumsum(self._buckets[self.NAMES.index(name)])
        place = np.searchsorted(reached, max(share * self.count, 1))
        return float(_LEAST * _GROWTH ** (place + 0.5))


class RequestTimes:
    """The times of all requests, by their number: 32 bytes of each.

    Attributes:
      columns: f64[4, M], M at least the number of requests: arrival, first token, end,
        and output length.
    """

    def __init__(self):
        self.columns = np.full((4, 1024), np.nan)

    def add(self, numbers: np.ndarray, *columns: np.ndarray) -> None:
        """Writes down requests i64[N], arrays of N rows in the order of `columns`."""
        most, room = int(numbers.max(initial=-1)) + 1, self.columns.shape[1]
        if most > room:
            # Half as many more at least: all in all, each is copied twice.
            grown = np.full((4, max(most, room + room // 2)), np.nan)
            grown[:, :room] = self.columns
            self.columns = grown
        self.columns[:, numbers] = columns

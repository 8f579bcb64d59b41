"""What a simulation serves: arrivals and lengths, and nothing of the texts."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Trace(NamedTuple):
    """Requests in the order of their arrival.

    Attributes:
      arrival: f64[N]. Seconds since the start, ascending.
      prompt_len: i64[N]. Tokens, 1 or more.
      output_len: i64[N, n]. Tokens of each of a request's sequences, 1 or more.
    """

    arrival: np.ndarray
    prompt_len: np.ndarray
    output_len: np.ndarray

    def __len__(self) -> int:
        return self.arrival.shape[0]

    @property
    def n(self) -> int:
        """Sequences of each request."""
        return self.output_len.shape[1]

    def part(self, start: int, stop: int) -> "Trace":
        """Returns requests `start` to `stop`."""
        return Trace(*(column[start:stop] for column in self))


def pieces(trace: Trace, size: int) -> Iterator[Trace]:
    """Yields a trace in pieces, as it comes that is too long to be held whole."""
    for start in range(0, len(trace), size):
        yield trace.part(start, start + size)

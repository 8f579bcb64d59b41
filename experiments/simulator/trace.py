"""What a simulation serves: arrivals and lengths, and nothing of the texts."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from experiments.simulator.block_names import PieceNames


class Trace(NamedTuple):
    """Requests in the order of their arrival.

    Attributes:
      arrival: f64[N]. Seconds since the start, ascending.
      prompt_len: i64[N]. Tokens, 1 or more.
      output_len: i64[N, n]. Tokens of each of a request's sequences, 1 or more.
      search: of beam searches, i64[N], which recorded one each repeats (see `beams`);
        a request's n sequences are its beams, and equally long. None for others.
      names: what the prefix cache knows the prompts' blocks by; None: nothing.
    """

    arrival: np.ndarray
    prompt_len: np.ndarray
    output_len: np.ndarray
    search: np.ndarray | None = None
    names: PieceNames | None = None

    def __len__(self) -> int:
        return self.arrival.shape[0]

    @property
    def n(self) -> int:
        """Sequences of each request."""
        return self.output_len.shape[1]

    @property
    def beam_width(self) -> int:
        """Beams of each request; 1 if it is no search."""
        return 1 if self.search is None else self.n

    def part(self, start: int, stop: int) -> "Trace":
        """Returns requests `start` to `stop`."""
        columns: list[Any] = [None if c is None else c[start:stop] for c in self]
        return Trace(*columns)


def pieces(trace: Trace, size: int) -> Iterator[Trace]:
    """Yields a trace in pieces, as it comes that is too long to be held whole."""
    for start in range(0, len(trace), size):
        yield trace.part(start, start + size)

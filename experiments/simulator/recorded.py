"""Recorded requests as traces: a piece of the file at a time."""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from experiments.errors import UserError
from experiments.simulator.block_names import UNNAMED, PieceNames
from experiments.simulator.readers import MOONCAKE_PIECE, Row
from experiments.simulator.trace import Trace


def to_traces(
    rows: Iterable[Row], size: int = 1024, arrivals: Iterable[float] | None = None
) -> Iterator[Trace]:
    """Yields recorded requests, so many at a time.

    Names of the prompts' pieces are handed on where the recording has them.

    Args:
      rows: the requests, from `read_trace`.
      size: how many make a piece.
      arrivals: seconds, of each of them; None: as recorded.

    Raises:
      UserError: a recording without times, and no arrivals.
    """
    times = None if arrivals is None else iter(arrivals)
    requests = iter(rows)
    while part := list(itertools.islice(requests, size)):
        if times is not None:
            at = list(itertools.islice(times, len(part)))
        else:
            at = [row.arrival for row in part]
        if len(at) < len(part) or None in at:
            raise UserError(
                "the recording has no times, and there are not enough arrivals for it; "
                "give one for each request"
            )
        yield Trace(
            np.array(at, np.float64),
            np.array([row.prompt_len for row in part]),
            np.array([[row.output_len] for row in part]),
            names=_names(part),
        )


def _names(rows: list[Row]) -> PieceNames | None:
    most = max(len(row.hash_ids) for row in rows)
    if most == 0:
        return None
    ids = np.full((len(rows), most), UNNAMED, np.int32)
    for names, row in zip(ids, rows):
        names[: len(row.hash_ids)] = row.hash_ids
    return PieceNames(ids, MOONCAKE_PIECE)


def longest(rows: Iterable[Row]) -> int:
    """Returns the tokens of the longest request, prompt and output; 1 or more."""
    return max((row.prompt_len + row.output_len for row in rows), default=1)

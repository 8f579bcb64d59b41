"""What each technique brings: its marginal gain, in both orders."""

from collections.abc import Iterable
from typing import Any, NamedTuple

Row = dict[str, Any]


class Gain(NamedTuple):
    """A ratio of output tokens per second.

    Attributes:
      technique: what was added.
      beside: what was there already.
      ratio: with / without; None if a cell is missing.
    """

    technique: str
    beside: str
    ratio: float | None


def find(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """Returns the first row whose cell has these values, or None."""
    for row in rows:
        if all(row["cell"].get(key) == value for key, value in wanted.items()):
            return row
    return None


def ratio(new: Row | None, old: Row | None) -> float | None:
    """Returns the ratio of two rows' output tokens per second; None without either."""
    if new is None or old is None:
        return None
    rate = "output_tokens_per_s"
    return new["metrics"][rate] / old["metrics"][rate]


def groups(rows: list[Row], keys: Iterable[str]) -> dict[str, list[Row]]:
    """Returns rows by the values of swept keys: `{"block_size.8": [...], ...}`.

    Args:
      rows: as in `summary.json`.
      keys: dotted keys that the cells have.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        values = [f"{k.rsplit('.', 1)[-1]}.{row['cell'][k]}" for k in keys]
        found.setdefault(".".join(values), []).append(row)
    return found


def gains(rows: list[Row]) -> list[Gain]:
    """Returns the marginal gains that rows of one sweep value allow.

    Args:
      rows: as in `summary.json`.

    Returns:
      Paging beside static and continuous batching; continuous batching beside `max` and
      paged memory; sharing beside both; all of paging and batching together.
    """

    def offline(memory: str, batching: str) -> Row | None:
        return find(rows, workload="offline", memory=memory, batching=batching)

    def shared(sharing: bool) -> Row | None:
        return find(rows, workload="system_prompt", sharing=sharing)

    base = offline("max", "static")
    paging, batching = offline("paged", "static"), offline("max", "continuous")
    both = offline("paged", "continuous")
    return [
        Gain("paging", "static batching", ratio(paging, base)),
        Gain("paging", "continuous batching", ratio(both, batching)),
        Gain("continuous batching", "max memory", ratio(batching, base)),
        Gain("continuous batching", "paged memory", ratio(both, paging)),
        Gain("sharing", "paging and continuous", ratio(shared(True), shared(False))),
        Gain("paging and continuous batching", "max + static", ratio(both, base)),
    ]

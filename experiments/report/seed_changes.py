"""Two runs side by side, over seeds: which changes exceed the spread."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from experiments import tables
from experiments.report.claim_lines import difference
from experiments.report.run_record import is_number, label, leaves
from experiments.studies.seeds import Estimate, estimate

_SEED = "seed"


class SeedLine(NamedTuple):
    """A metric over seeds, as text.

    Attributes:
      name: of the metric, dotted.
      before: its mean in the first run.
      after: its mean in the second.
      difference: after - before, with its share of before.
      exceeds: whether that exceeds the spread, `yes` or `no`.
    """

    name: str
    before: str
    after: str
    difference: str
    exceeds: str


class SeedChanges(NamedTuple):
    """Cells of both runs that are the same but for their seeds.

    Attributes:
      label: of the cells.
      seeds: how many there are in each run, such as `3 seeds`.
      lines: of the metrics whose means differ.
    """

    label: str
    seeds: str
    lines: list[SeedLine]


def exceeds_spread(before: Estimate | None, after: Estimate | None) -> str:
    """Returns whether a change exceeds the spread over the seeds, `yes` or `no`.

    Args:
      before: the number; a dash is returned if its spread, or the other's, is not
        known: it is None or of fewer than two seeds.
      after: what became of it.
    """
    if before is None or after is None or min(before.count, after.count) < 2:
        return "–"
    return "yes" if before.differs(after) else "no"


def seed_changes(
    before: Iterable[dict[str, Any]], after: Iterable[dict[str, Any]]
) -> list[SeedChanges]:
    """Returns what changed in the means over seeds, where both runs have several."""
    old, new = _by_cell(before), _by_cell(after)
    found = []
    for key in old:
        counts = len(old[key]), len(new.get(key, ()))
        if min(counts) < 2:
            continue
        words = [f"{count} seeds" for count in dict.fromkeys(counts)]
        lines = _lines(old[key], new[key])
        found.append(SeedChanges(_label(new[key][0]), " and ".join(words), lines))
    return found


def _by_cell(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows that have a seed, by all else that their cells are."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if _SEED in row["cell"]:
            rest = {k: v for k, v in row["cell"].items() if k != _SEED}
            found.setdefault(json.dumps(rest, sort_keys=True), []).append(row)
    return found


def _lines(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[SeedLine]:
    before, after = _estimates(old), _estimates(new)
    lines = []
    for name in before:
        a, b = before[name], after.get(name)
        if a is None or b is None or a.mean == b.mean:
            continue
        lines.append(
            SeedLine(
                name,
                tables.number(a.mean),
                tables.number(b.mean),
                difference(a.mean, b.mean),
                exceeds_spread(a, b),
            )
        )
    return lines


def _estimates(rows: list[dict[str, Any]]) -> dict[str, Estimate | None]:
    """Returns the metrics that are numbers in all rows."""
    metrics = [leaves(row["metrics"]) for row in rows]
    return {
        name: estimate(one[name] for one in metrics)
        for name in metrics[0]
        if all(is_number(one.get(name)) for one in metrics)
    }


def _label(row: dict[str, Any]) -> str:
    """Returns what rows are called that differ in the seed alone."""
    rest = {k: v for k, v in row["cell"].items() if k != _SEED}
    words = label(row | {"cell": rest})
    return words.removesuffix(f"-{row['cell'][_SEED]}")

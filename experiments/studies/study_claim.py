"""Claims of studies: a number over seeds beside the paper's."""

from typing import Any

from experiments.claim import Claim, claim
from experiments.studies.seeds import Estimate, compare, exact
from experiments.studies.study import Scale

# How far from the paper a number may be (issue and docs/reproduction.md): counted in
# percentage points for shares, relative for the rest.
POINTS = 1.0
MEMORY, FITTED, PREDICTED = 0.04, 0.15, 0.15


def study_claim(
    id: str,
    found: Estimate | float | None,
    *,
    paper: float | None,
    unit: str,
    kind: str,
    source: str,
    scale: Scale | None = None,
    mark: str = "",
    of_seeds: str | None = None,
    note: str = "",
    points: bool = False,
    at_least: float | None = None,
    at_most: float | None = None,
    near: float | None = None,
) -> Claim:
    """Returns a claim about a number.

    Args:
      id: `figNN[panel].quantity.system[.parameter]`.
      found: what came out.
      paper: the paper's number, which is expected unless something else is; None if
        there is none to compare with. A claim that nothing is expected of reports, and
        neither holds nor fails.
      unit: of both.
      kind: `memory`, `fitted` or `predicted`, which decides the tolerance.
      source: where the paper's number is from.
      scale: how much of the paper's traces was run; None if that changes nothing.
      mark: what else was cut short, or, without a scale, all that was.
      of_seeds: what is said of the seeds, if the number is no mean of them.
      note: what a reader should know.
      points: whether a memory number may differ by a percentage point, if that is more.
      at_least: what is expected instead of the paper's number.
      at_most: likewise.
      near: likewise, within the tolerance.
    """
    number = exact(found) if isinstance(found, (int, float)) else found
    relative = {"memory": MEMORY, "fitted": FITTED, "predicted": PREDICTED}[kind]
    expected: dict[str, float] = {}
    if at_least is not None:
        expected = {"at_least": at_least}
    elif at_most is not None:
        expected = {"at_most": at_most}
    elif (wanted := paper if near is None else near) is not None:
        tolerance = relative * abs(wanted)
        if points:
            tolerance = max(tolerance, POINTS)
        expected = {"near": wanted, "tolerance": tolerance}
    if of_seeds is None:
        of_seeds = _of_seeds(number, paper) if number else ""
    notes = (
        note,
        of_seeds,
        scale.mark if scale else "",
        mark,
    )
    return claim(
        id,
        number.mean if number else None,
        source=source,
        unit=unit,
        kind=kind,
        paper=paper,
        spread=number.spread if number and number.count > 1 else None,
        seeds=number.count or None if number else None,
        note="; ".join(filter(None, notes)),
        **expected,
    )


def compared_claim(
    id: str,
    first: Estimate | None,
    second: Estimate | None,
    *,
    note: str = "",
    **expected: Any,
) -> Claim:
    """Returns a claim about the ratio of two numbers, which says if they differ.

    Args:
      id: as in `study_claim`.
      first: the one; None if it is missing.
      second: that it is divided by.
      note: what a reader should know.
      expected: what else `study_claim` takes.
    """
    found = compare(first, second)
    note = "; ".join(filter(None, (note, found.words)))
    return study_claim(id, found.ratio, note=note, **expected)


def _of_seeds(number: Estimate, paper: float | None) -> str:
    if number.count == 0:
        return ""
    if number.count == 1:
        return "one seed: no spread is known"
    words = f"mean of {number.count} seeds, spread {number.spread:.3g}"
    if paper is None:
        return words
    how = "exceeds" if number.differs(exact(paper)) else "is within"
    return f"{words}; the deviation from the paper {how} it"

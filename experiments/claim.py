"""A claim: what should come out, what did, and whether it holds."""

from typing import Any

from experiments.attribution import Row
from experiments.token_check import TIE, Difference

Claim = dict[str, Any]

PAPER = "SOSP'23"


def claim(
    id: str,
    measured: float | None,
    *,
    source: str,
    unit: str,
    kind: str,
    at_least: float | None = None,
    at_most: float | None = None,
    near: float | None = None,
    tolerance: float = 0.0,
    paper: float | None = None,
    spread: float | None = None,
    seeds: int | None = None,
    note: str = "",
) -> Claim:
    """Returns a claim; it holds if `measured` is on the right side of what is expected.

    Without an expectation it reports a number, and `holds` is None.

    Args:
      id: `experiment.quantity.system[.parameter]`.
      measured: what came out; None if a cell is missing, and then it does not hold.
      source: where the expectation comes from.
      unit: of all its numbers.
      kind: `memory`, `speed` or `exact`: what kind of quantity it is; of a simulation
        also `fitted`, where constants were chosen so that it comes out, or `predicted`.
      at_least: expected to be this or more.
      at_most: expected to be this or less.
      near: expected to be this.
      tolerance: how far off still holds, in the same unit.
      paper: the paper's own number, which may be another than what is expected; None
        if there is none to compare with.
      spread: largest less smallest over the seeds, or over the measurements; None if it
        is not known, or if nothing was drawn at random or measured again.
      seeds: how many seeds, or measurements; None if nothing was drawn at random or
        measured again.
      note: what a reader should know.
    """
    given = {">=": at_least, "<=": at_most, "=": near}
    given = {name: value for name, value in given.items() if value is not None}
    assert len(given) <= 1, "a claim has one expectation"
    relation, expected = next(iter(given.items()), (None, None))
    holds = _holds(measured, relation, expected, tolerance)
    return {
        "id": id,
        "source": source,
        "unit": unit,
        "paper": paper,
        "relation": relation,
        "expected": expected,
        "tolerance": tolerance,
        "measured": measured,
        "spread": spread,
        "seeds": seeds,
        "kind": kind,
        "holds": holds,
        "note": note,
    }


def _holds(
    measured: float | None,
    relation: str | None,
    expected: float | None,
    tolerance: float,
) -> bool | None:
    if expected is None:
        return None
    if measured is None:
        return False
    if relation == ">=":
        return bool(measured >= expected - tolerance)
    if relation == "<=":
        return bool(measured <= expected + tolerance)
    return bool(abs(measured - expected) <= tolerance)


def nothing_compiled(experiment: str, rows: list[Row]) -> Claim:
    """Returns the claim that no cell compiled anything while it served."""
    return claim(
        f"{experiment}.compilations.all",
        float(sum(r["metrics"]["compilations"] for r in rows)),
        source="nothing compiles after the warm-up",
        unit="programs",
        kind="exact",
        near=0.0,
    )


def tokens_equal(
    experiment: str, rows: list[Row], differences: list[Difference]
) -> Claim:
    """Returns the claim that greedy tokens do not depend on the cell.

    Where two logits tie, either token is right: such a request is named, not counted.
    """
    served = sum(row["details"]["workload"]["requests"] for row in rows)
    note = f"of {served} requests in {len(rows)} cells"
    if differences:
        gaps = [d.gap for d in differences if d.gap is not None]
        ties = sum(d.is_tie for d in differences)
        largest = f", largest gap {max(gaps):.1e}" if gaps else ""
        note += (
            f", {len(differences)} have other tokens than in the first cell that "
            f"served the same; {ties} of them part at a tie of two logits (gap at most "
            f"{TIE:.0e}{largest})"
        )
    return claim(
        f"{experiment}.tokens_equal",
        float(sum(not d.is_tie for d in differences)),
        source="memory and batching only move tokens about",
        unit="requests with other tokens, ties apart",
        kind="exact",
        near=0.0,
        note=note,
    )

"""Claims of studies: a number over seeds beside the paper's."""

from experiments.claim import Claim, claim
from experiments.studies.seeds import Estimate
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
      scale: how much was run; None if that changes nothing.
      note: what a reader should know.
      points: whether a memory number may differ by a percentage point, if that is more.
      at_least: what is expected instead of the paper's number.
      at_most: likewise.
      near: likewise, within the tolerance.
    """
    if isinstance(found, Estimate) and found.count > 1:
        spread = f"mean of {found.count} seeds, spread {found.spread:.3g}"
    else:
        spread = ""
    mean = found.mean if isinstance(found, Estimate) else found
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
    notes = (note, spread, scale.mark if scale else "")
    return claim(
        id,
        mean,
        source=source,
        unit=unit,
        kind=kind,
        paper=paper,
        note="; ".join(filter(None, notes)),
        **expected,
    )

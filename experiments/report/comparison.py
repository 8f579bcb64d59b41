"""Two runs side by side: what changed from the first to the second."""

import json
from typing import Any, NamedTuple

from experiments import tables
from experiments.errors import UserError
from experiments.report.claim_lines import difference, expected, measured
from experiments.report.run_record import RunRecord, is_number, label, leaves
from experiments.report.seed_changes import exceeds_spread, seed_changes
from experiments.studies.seeds import Estimate

# Shown first, for each cell; all others are below.
_MAIN = (
    "output_tokens_per_s",
    "kv_utilization",
    "mean_running",
    "normalized_latency_s",
    "ttft_s.p50",
    "preemptions",
    "block_saving",
)
_FEWEST_MAIN = 2
# Of a claim, what an estimate is made of.
_OVER_SEEDS = ("measured", "spread", "seeds")
# How claims stand to each other, in the order in which they are shown. A claim holds,
# does not, or reports a number that nothing is expected of; or it is not there.
_HOLDS, _FAILS, _REPORTS, _ABSENT = "holds", "does not hold", "reports", "absent"
_STANDINGS = {
    (_HOLDS, _FAILS): "no longer holds",
    (_FAILS, _HOLDS): "holds now",
    (_HOLDS, _REPORTS): "no longer judged, held",
    (_FAILS, _REPORTS): "no longer judged, did not hold",
    (_REPORTS, _HOLDS): "judged now, holds",
    (_REPORTS, _FAILS): "judged now, does not hold",
    (_HOLDS, _ABSENT): "only before, held",
    (_FAILS, _ABSENT): "only before, did not hold",
    (_REPORTS, _ABSENT): "only before",
    (_ABSENT, _HOLDS): "only after, holds",
    (_ABSENT, _FAILS): "only after, does not hold",
    (_ABSENT, _REPORTS): "only after",
    (_FAILS, _FAILS): "does not hold, as before",
    (_HOLDS, _HOLDS): "holds, as before",
    (_REPORTS, _REPORTS): "not judged",
}


def _state(claim: dict[str, Any] | None) -> str:
    if claim is None:
        return _ABSENT
    return {True: _HOLDS, False: _FAILS, None: _REPORTS}[claim["holds"]]


class Line(NamedTuple):
    """A metric of a cell, as text.

    Attributes:
      name: of the metric, dotted.
      before: in the first run.
      after: in the second.
      difference: after - before, with its share of before.
      ratio: after / before.
    """

    name: str
    before: str
    after: str
    difference: str
    ratio: str


class CellPair(NamedTuple):
    """A cell that both runs have.

    Attributes:
      label: of the cell.
      changed: its metrics that differ.
      equal: names of those that do not.
      ratios: after / before, by metric.
    """

    label: str
    changed: list[Line]
    equal: list[str]
    ratios: dict[str, str]


def compare(before: RunRecord, after: RunRecord) -> dict[str, Any]:
    """Returns the values that `comparison.html.jinja` shows.

    Cells are paired by what they are, claims by their ids.

    Raises:
      UserError: the runs have no cell and no claim in common.
    """
    old, new = _by_identity(before.rows), _by_identity(after.rows)
    pairs = [_pair(old[key], new[key]) for key in old if key in new]
    claims = compare_claims(before.claims, after.claims)
    if not pairs and not any(c["before"] and c["after"] for c in claims):
        raise UserError(
            f"--compare: the runs ({before.name}, {after.name}) have no cell and no "
            "claim in common"
        )
    columns = _main_metrics(pairs)
    return {
        "pairs": pairs,
        "seeds": seed_changes(before.rows, after.rows),
        "columns": [_words(name) for name in columns],
        "overview": [
            (pair.label, [pair.ratios.get(name, "–") for name in columns])
            for pair in pairs
        ],
        "only_before": [label(old[key]) for key in old if key not in new],
        "only_after": [label(new[key]) for key in new if key not in old],
        "claims": claims,
        "changed_claims": sum(claim["changed"] for claim in claims),
        "config": differences(before.config, after.config),
        "environment": differences(before.environment, after.environment),
    }


def compare_claims(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the claims of two runs by id, those that changed first.

    Each has `id`, `unit`, `expected`, `before` and `after` (claims or None), their
    numbers `old` and `new`, `difference`, `exceeds` (see `exceeds_spread`), `standing`,
    and `changed`: whether one holds and the other does not.
    """
    old = {claim["id"]: claim for claim in before}
    new = {claim["id"]: claim for claim in after}
    order = list(_STANDINGS)
    found = []
    for id in dict.fromkeys([*old, *new]):
        a, b = old.get(id), new.get(id)
        standing = _state(a), _state(b)
        shown = b or a
        assert shown is not None
        found.append(
            {
                "id": id,
                "unit": shown["unit"],
                "expected": expected(shown),
                "before": a,
                "after": b,
                "old": measured(a) if a else "–",
                "new": measured(b) if b else "–",
                "difference": difference(a and a["measured"], b and b["measured"]),
                "exceeds": exceeds_spread(_estimate(a), _estimate(b)),
                "standing": _STANDINGS[standing],
                "changed": standing in ((_HOLDS, _FAILS), (_FAILS, _HOLDS)),
                "order": order.index(standing),
            }
        )
    return sorted(found, key=lambda claim: claim["order"])


def _estimate(claim: dict[str, Any] | None) -> Estimate | None:
    """Returns the number of a claim with its spread; None if that is not known."""
    if claim is None or not all(map(is_number, map(claim.get, _OVER_SEEDS))):
        return None
    return Estimate(*(claim[key] for key in _OVER_SEEDS))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the dotted keys whose values differ, with both; a dash where one is not.

    The time of the start, which always differs, is left out.
    """
    a, b = leaves(old), leaves(new)
    return [
        (key, _text(a, key), _text(b, key))
        for key in dict.fromkeys([*a, *b])
        if key != "started" and (key not in a or key not in b or a[key] != b[key])
    ]


def _by_identity(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns rows by what their cell is; equal cells are numbered."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        key = json.dumps(row["cell"], sort_keys=True)
        while key in found:
            key += "+"
        found[key] = row
    return found


def _pair(before: dict[str, Any], after: dict[str, Any]) -> CellPair:
    old, new = leaves(before["metrics"]), leaves(after["metrics"])
    changed, equal, ratios = [], [], {}
    for name in dict.fromkeys([*old, *new]):
        a, b = old.get(name), new.get(name)
        if not (is_number(a) or is_number(b)):
            continue
        ratios[name] = _ratio(a, b)
        if a == b:
            equal.append(name)
            continue
        changed.append(
            Line(name, _number(a), _number(b), difference(a, b), ratios[name])
        )
    words = label(after)
    workload = str(after["cell"].get("workload", "")).replace("_", " ")
    if after.get("label") and workload:
        words = f"{workload}: {words}"
    return CellPair(words, changed, equal, ratios)


def _main_metrics(pairs: list[CellPair]) -> list[str]:
    """Returns the metrics of the overview: the usual ones, or else the first few."""
    known = list(dict.fromkeys(name for pair in pairs for name in pair.ratios))
    usual = [name for name in _MAIN if name in known]
    return usual if len(usual) >= _FEWEST_MAIN else known[: len(_MAIN)]


def _ratio(old: Any, new: Any) -> str:
    if not (is_number(old) and is_number(new)) or not old:
        return "1.00x" if old == new and is_number(old) else "–"
    return f"{new / old:.2f}x"


def _number(value: Any) -> str:
    return tables.number(value) if is_number(value) else "–"


def _text(values: dict[str, Any], key: str) -> str:
    if key not in values:
        return "–"
    value = values[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _words(name: str) -> str:
    return name.replace("_", " ").replace(".", " ")

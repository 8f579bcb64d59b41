"""Claims as the report shows them."""

from typing import Any

from experiments import tables
from experiments.report.run_record import is_number

KINDS = {
    "memory": "counted in blocks or slots, and much the same on any machine",
    "speed": "a time or a rate of this machine",
    "exact": "follows from the rules",
    "predicted": "comes out of a model that was not fitted to it",
    "fitted": "a constant was fitted to it, so that it is no evidence",
}


def claim_lines(claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns claims with their numbers as text.

    `expected`, `paper`, `found`, and `difference`: what was measured less the paper's
    number, or, where there is none, less what was expected.
    """
    return [
        claim
        | {
            "expected": expected(claim),
            "paper": tables.number(claim["paper"]),
            "found": measured(claim),
            "difference": difference(_reference(claim), claim["measured"]),
        }
        for claim in claims
    ]


def measured(claim: dict[str, Any]) -> str:
    """Returns what came out; with how far the seeds are apart, such as `2 (±0.1)`."""
    text = tables.number(claim["measured"])
    if is_number(claim["spread"]):
        text += f" (±{tables.number(claim['spread'] / 2)})"
    return text


def _reference(claim: dict[str, Any]) -> Any:
    return claim["expected"] if claim["paper"] is None else claim["paper"]


def kinds(claims: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns the kinds that claims have, and what each means."""
    found = {claim["kind"] for claim in claims}
    return [(kind, text) for kind, text in KINDS.items() if kind in found]


def expected(claim: dict[str, Any]) -> str:
    """Returns what a claim expects and how far off it may be, such as `6.09 ± 3`."""
    return tables.expected(claim)


def difference(old: Any, new: Any) -> str:
    """Returns how much more a number is than another, such as `−1.66 (−27%)`.

    Args:
      old: the one; a dash is returned if it, or the other, is no finite number.
      new: the other.
    """
    if not (is_number(old) and is_number(new)):
        return "–"
    change = new - old
    if not change:
        return "0"
    share = f" ({_signed(100 * change / abs(old))}%)" if old else ""
    return _signed(change) + share


def _signed(value: float) -> str:
    """Returns a number with its sign, by a true minus sign."""
    return ("+" if value > 0 else "−") + tables.number(abs(value))

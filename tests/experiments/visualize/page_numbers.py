"""Numbers as the page writes them."""

import math


def percent(share: float) -> str:
    """Returns a share as the page writes it."""
    return f"{math.floor(100 * share + 0.5)}%"


def shares_in_percent(shares: list[float]) -> list[str]:
    """Returns parts of a whole, which add up to 100%; the first is rounded as ever."""
    first = math.floor(100 * shares[0] + 0.5)
    others = [100 * share for share in shares[1:]]
    parts = [math.floor(other) for other in others]
    missing = 100 - first - sum(parts)
    largest = sorted(range(len(parts)), key=lambda i: parts[i] - others[i])
    for i in largest[:missing]:
        parts[i] += 1
    assert first + sum(parts) == 100
    return [f"{part}%" for part in (first, *parts)]

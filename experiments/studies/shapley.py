"""What each of several techniques contributes to a ratio that they reach together."""

import itertools
import math
from collections.abc import Callable, Sequence


def shapley_factors(
    techniques: Sequence[str], value: Callable[[frozenset[str]], float]
) -> dict[str, float]:
    """Returns the factor of each technique; their product is the ratio of all to none.

    How much a technique gains depends on which are there already. Its factor is the
    geometric mean of its gains over all orders in which the techniques can be added
    (the Shapley value of the logarithm): of the ways to share the whole, the one
    that treats all orders alike.

    Args:
      techniques: their names.
      value: of any subset of them, above 0.
    """
    orders = list(itertools.permutations(techniques))
    logs = dict.fromkeys(techniques, 0.0)
    for order in orders:
        for place, technique in enumerate(order):
            before = frozenset(order[:place])
            logs[technique] += math.log(value(before | {technique}) / value(before))
    return {name: math.exp(log / len(orders)) for name, log in logs.items()}


def shares(factors: dict[str, float]) -> dict[str, float]:
    """Returns the share of each factor in the logarithm of their product; sum 1.

    NaN if the product is 1: there is nothing to share.
    """
    logs = {name: math.log(factor) for name, factor in factors.items()}
    total = sum(logs.values())
    return {name: log / total if total else math.nan for name, log in logs.items()}

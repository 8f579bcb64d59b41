"""Whether an engine's tokens are those of a plain greedy decode."""

from collections.abc import Sequence
from typing import NamedTuple

# Two logits this close are a tie, and which token is taken is a matter of rounding. In
# bfloat16, with 8 bits, sums of hundreds of products stray by hundredths.
TIES = {"float32": 1e-4, "bfloat16": 0.1}


class Reference(NamedTuple):
    """What a plain decode generates.

    Attributes:
      tokens: of each request.
      gaps: for each of them, how far the second-best logit was below the best.
    """

    tokens: list[list[int]]
    gaps: list[list[float]]


class Equality(NamedTuple):
    """How many requests got the reference's tokens.

    Attributes:
      requests: in all.
      equal: those with the same tokens.
      near_ties: those that first differ where two logits were as good as equal.
      gaps: of all that differ, where they first do, largest first.
    """

    requests: int
    equal: int
    near_ties: int
    gaps: list[float]


def compare_tokens(
    reference: Reference, outputs: Sequence[Sequence[int]], dtype: str
) -> Equality:
    """Compares outputs with the reference's.

    Args:
      reference: computed in float32.
      outputs: tokens of each request, as many as the reference's.
      dtype: in which they were computed.
    """
    gaps = []
    for expected, all_gaps, found in zip(
        reference.tokens, reference.gaps, outputs, strict=True
    ):
        pairs = enumerate(zip(expected, found, strict=True))
        place = next((i for i, (a, b) in pairs if a != b), None)
        if place is not None:
            gaps.append(all_gaps[place])
    ties = sum(gap <= TIES[dtype] for gap in gaps)
    equal = len(outputs) - len(gaps)
    return Equality(len(outputs), equal, ties, sorted(gaps, reverse=True))

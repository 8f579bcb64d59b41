"""Whose tokens count as equal, and which differences are ties."""

import pytest

from experiments.engine_bench.equality import Reference, compare_tokens

REFERENCE = Reference(
    tokens=[[1, 2, 3], [4, 5], [6]],
    gaps=[[1.0, 5e-5, 1.0], [0.2, 0.05], [2.0]],
)


def test_equal_tokens():
    found = compare_tokens(REFERENCE, REFERENCE.tokens, "float32")
    assert (found.requests, found.equal, found.near_ties, found.gaps) == (3, 3, 0, [])


@pytest.mark.parametrize(
    "dtype, outputs, equal, ties, gaps",
    [
        # Only where they first differ counts: what follows has another past.
        ("float32", [[1, 9, 9], [4, 5], [6]], 2, 1, [5e-5]),
        ("float32", [[9, 2, 3], [4, 5], [6]], 2, 0, [1.0]),
        ("float32", [[1, 2, 3], [4, 9], [9]], 1, 0, [2.0, 0.05]),
        ("bfloat16", [[1, 2, 3], [4, 9], [9]], 1, 1, [2.0, 0.05]),
    ],
)
def test_a_difference_is_a_tie_or_not(dtype, outputs, equal, ties, gaps):
    found = compare_tokens(REFERENCE, outputs, dtype)
    assert (found.equal, found.near_ties, found.gaps) == (equal, ties, gaps)


def test_other_lengths_are_refused():
    with pytest.raises(ValueError):
        compare_tokens(REFERENCE, [[1, 2], [4, 5], [6]], "float32")

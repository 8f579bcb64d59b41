"""Which of many cases the oldest Python runs, too."""

from collections.abc import Container, Iterable

import pytest


def newest_but(kept: Container, cases: Iterable, reason: str) -> list:
    """Returns cases for `parametrize`, those that are not kept for the newest Python.

    Args:
      kept: cases that every Python runs.
      cases: all cases.
      reason: why the others need not be run twice.
    """
    newest = pytest.mark.newest(reason=reason)
    return [pytest.param(case, marks=[] if case in kept else newest) for case in cases]


# Of a test whose program is of a kind that other tests compile for the oldest Python.
SAME_KIND = pytest.mark.newest(reason="a program of a kind that other tests compile")

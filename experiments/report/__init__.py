"""The HTML report of runs: one file that needs no other.

`experiments.run` renders that of its run; `python -m experiments.report` renders those
of several results folders, and compares two.
"""

from experiments.report.pages import render

__all__ = ["render"]

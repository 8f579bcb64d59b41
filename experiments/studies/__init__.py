"""Studies by simulation: the figures of the PagedAttention paper, and ablations.

One file a study, named as its claims are. It says which tasks there are, runs one, and
makes claims and figures of what came out; `study.py` has the interface.
"""

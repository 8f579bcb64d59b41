"""The library's scheduler on a virtual clock: a cost model stands for the model.

`simulate.py` has the loop, `run.py` the host's side, `costs.py` what a step takes.
"""

"""Fig 12: latency against request rate, basic sampling, ShareGPT and Alpaca."""

from experiments.studies.capacity_module import CapacityStudy
from experiments.studies.panels import FIG12

TITLE = "Normalized latency against request rate: one sequence a request"

_study = CapacityStudy(FIG12)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

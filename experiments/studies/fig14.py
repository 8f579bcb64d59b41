"""Fig 14: latency against request rate, several sequences a request, on Alpaca."""

from experiments.studies.capacity_module import CapacityStudy
from experiments.studies.panels import FIG14

TITLE = "Normalized latency against request rate: parallel sampling and beam search"

_study = CapacityStudy(FIG14)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

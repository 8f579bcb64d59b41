"""Fig 17: latency against request rate, chats of several rounds, OPT-13B."""

from experiments.studies.capacity_module import CapacityStudy
from experiments.studies.panels import FIG17

TITLE = "Normalized latency against request rate: chats of several rounds"

_study = CapacityStudy(FIG17)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

"""Fig 16: latency against request rate, translation behind a shared prefix."""

from experiments.studies.capacity_module import CapacityStudy
from experiments.studies.panels import FIG16

TITLE = "Normalized latency against request rate: a prefix that all prompts share"

_study = CapacityStudy(FIG16)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw

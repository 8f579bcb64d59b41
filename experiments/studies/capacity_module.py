"""A study of capacities, made of its panels."""

from collections.abc import Sequence
from typing import Any

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.studies import capacity_figures, capacity_study
from experiments.studies.panels import Panel
from experiments.studies.study import Figures, Scale, Task


class CapacityStudy:
    """The four functions of a `study.Study`, for some panels."""

    def __init__(self, panels: Sequence[Panel]):
        """Keeps the panels, all of one figure."""
        self._panels = panels

    def tasks(self, scale: Scale) -> list[Task]:
        """Returns one task for each panel, system and seed."""
        return capacity_study.tasks(self._panels, scale)

    def run(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Searches for a capacity, and measures the curve."""
        return capacity_study.run(settings)

    def claims(self, rows: list[Row], scale: Scale) -> list[Claim]:
        """Returns capacities, ratios between them, and utilization."""
        return capacity_study.claims(self._panels, rows, scale)

    def draw(self, rows: list[Row], scale: Scale) -> Figures:
        """Draws latency against rate, a panel beside the other."""
        return capacity_figures.draw(self._panels, rows, scale)

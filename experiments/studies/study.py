"""What a study is: tasks that run apart from each other, claims and figures."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import experiments.studies
from experiments.attribution import Row
from experiments.claim import Claim
from experiments.errors import UserError

# What the names of modules that are studies begin with.
_STUDIES = ("ablation", "fig", "machine", "recorded", "table")
# Capacities are to be found to this, relative.
FINE = 0.02
# File name to caption and PNG.
Figures = dict[str, tuple[str, bytes]]


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of a study is run.

    Attributes:
      name: of the preset, `quick` or `full`.
      seeds: of the random draws; each task that draws anything is there once for each.
      time_share: of the seconds that the paper's traces last.
      tolerance: of a search for a rate, relative.
      grid: points of a curve or a grid are cut to about this share.
      options: settings of a study's own, with dotted keys; most have none.
    """

    name: str
    seeds: tuple[int, ...]
    time_share: float
    tolerance: float
    grid: float
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def mark(self) -> str:
        """What a claim says of it: empty where nothing is cut short."""
        return self.marked(self.shorter)

    @property
    def shorter(self) -> str:
        """How the paper's traces are cut short; empty if they are not."""
        if self.time_share == 1.0:
            return ""
        return f"{self.time_share:.2g} of the paper's traces"

    @property
    def coarser(self) -> str:
        """How roughly a capacity is searched; empty if as finely as it should be."""
        if self.tolerance <= FINE:
            return ""
        return f"capacities to {100 * self.tolerance:g}%"

    def marked(self, *cuts: str) -> str:
        """Returns what a claim says of what was cut short; empty if nothing was."""
        cut = ", ".join(filter(None, cuts))
        return f"{self.name}: {cut}" if cut else ""


def seeds_of(scale: Scale) -> str:
    """Returns how many seeds there are, such as `3 seeds`."""
    return "one seed" if len(scale.seeds) == 1 else f"{len(scale.seeds)} seeds"


class Task(NamedTuple):
    """One simulation, or a few that belong together.

    Attributes:
      key: unique in its study; names the row.
      settings: what `run` gets; JSON values, all that the result depends on.
    """

    key: str
    settings: dict[str, Any]


class Study(Protocol):
    """A module of this package."""

    TITLE: str

    def tasks(self, scale: Scale) -> list[Task]:
        """Returns all tasks, those that share a compiled program side by side."""
        ...

    def run(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Runs a task, in a process of its own; returns metrics, JSON values."""
        ...

    def claims(self, rows: list[Row], scale: Scale) -> list[Claim]:
        """Returns the claims; a row that is missing makes one that does not hold.

        Args:
          rows: of this study, each with `key`, `cell` (the settings) and `metrics`.
          scale: how much was run.
        """
        ...

    def draw(self, rows: list[Row], scale: Scale) -> Figures:
        """Returns the figures, drawn like the paper's own, its points overlaid."""
        ...


def study_names() -> list[str]:
    """Returns the studies that there are, by the names of their modules."""
    found = pkgutil.iter_modules(experiments.studies.__path__)
    return [module.name for module in found if module.name.startswith(_STUDIES)]


def load_study(name: str) -> Study:
    """Returns a study.

    Raises:
      UserError: there is none of this name.
    """
    if name not in study_names():
        raise UserError(f"study {name!r} is not one of {', '.join(study_names())}")
    module: Any = importlib.import_module(f"experiments.studies.{name}")
    return module

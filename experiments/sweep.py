"""Cells: what one run of the engine is given, and the product of a sweep."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from experiments.command_line import check_key, flat
from experiments.errors import UserError
from experiments.settings import WITH_PREFIX, WorkloadSettings
from paged_jax import EngineConfig

# What names a cell, in this order; other settings that differ are added to the name.
NAMING = ("workload.name", "engine.memory", "engine.batching")

# What a cell may set and its label need not say: it follows from the rest.
_UNSAID = (
    "workload.part",
    "workload.temperature",
    "engine.max_n",
    "engine.max_beam_width",
)

_TRUE = ("true", "1", "yes")
_FALSE = ("false", "0", "no")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One engine, one workload.

    Attributes:
      key: names the cell in files and tables, and is the same in every run.
      model: name or path of the model.
      seed: decides lengths, texts and arrivals.
      engine: the engine's settings.
      workload: the workload's.
      swept: values of the keys of the sweep, empty without one.
      varied: those of the other keys that the experiment sets cell by cell, but for
        what `identity` has anyway.
    """

    key: str
    model: str
    seed: int
    engine: EngineConfig
    workload: WorkloadSettings
    swept: dict[str, Any]
    varied: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """What `summary.json` calls the cell."""
        engine, workload = self.engine, self.workload
        return (
            {
                "memory": engine.memory,
                "batching": engine.batching,
                "sharing": workload.sharing,
                "block_size": engine.block_size,
                "workload": workload.name,
            }
            | self.varied
            | self.swept
        )

    @property
    def label(self) -> str:
        """Short name, beside that of the workload."""
        words = [f"{self.engine.memory} + {self.engine.batching}"]
        named = set(NAMING) | {"workload.sharing"}
        if self.workload.name in WITH_PREFIX:
            words.append(self._sharing)
            named.add("engine.prefix_caching")
        words += [
            _in_words(key, value)
            for key, value in (self.varied | self.swept).items()
            if key not in named
        ]
        return ", ".join(words)

    @property
    def _sharing(self) -> str:
        if self.workload.sharing:
            return "shared"
        return "found" if self.engine.prefix_caching else "not shared"


def _in_words(key: str, value: Any) -> str:
    name = key.rsplit(".", 1)[-1]
    if key == "engine.preemption":
        return str(value)
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"


def parse_sweeps(config: ConfigDict, lines: Iterable[str]) -> dict[str, tuple]:
    """Reads the lines of `--sweep`.

    Args:
      config: settings, which say what types the values have.
      lines: each `key=value,value,...`.

    Returns:
      Values by key, in the order given.

    Raises:
      UserError: an unknown key, no value, or one that cannot be read.
    """
    sweeps: dict[str, tuple] = {}
    for line in filter(None, lines):
        key, equals, values = line.partition("=")
        key = key.strip().removeprefix("config.")
        if not equals or not values.strip():
            raise UserError(f"--sweep={line}: write it as KEY=VALUE,VALUE,...")
        check_key(config, key)
        if key in ("cells", "sweep", "claims", "name", "seed", "preset"):
            raise UserError(f"--sweep={line}: {key} cannot be swept")
        if key in sweeps:
            raise UserError(f"--sweep={line}: {key} is swept twice; give one list")
        kind = _type_of(config, key)
        try:
            parsed = [_parse(kind, value.strip()) for value in values.split(",")]
        except ValueError:
            raise UserError(
                f"--sweep={line}: {key} takes values of type {kind.__name__}"
            ) from None
        sweeps[key] = tuple(dict.fromkeys(parsed))
    return sweeps


def expand(
    config: ConfigDict, sweeps: dict[str, tuple], overridden: Iterable[str] = ()
) -> list[Cell]:
    """Returns the cells of an experiment, one for each combination of the sweep.

    A key that is swept overrides what the cells say of it; cells that become equal by
    that run once.

    Args:
      config: settings, with `cells`.
      sweeps: values by key, from `parse_sweeps`.
      overridden: keys that the user has set, which no cell may set again.

    Raises:
      UserError, ConfigError: a cell is malformed or out of range, or sets a key that
        the user has set.
    """
    specs = _cell_specs(config)
    for key in overridden:
        if any(key in spec for spec in specs):
            raise UserError(
                f"--config.{key}: the cells of this experiment set it one by one; use "
                f"--sweep {key}=VALUE,..."
            )
    cells: dict[str, Cell] = {}
    for values in itertools.product(*sweeps.values()):
        swept = dict(zip(sweeps, values))
        for spec in specs:
            cell = _make_cell(config, spec | swept, swept)
            cells.setdefault(cell.key, cell)
    return list(cells.values())


def _cell_specs(config: ConfigDict) -> list[dict[str, Any]]:
    cells: Any = config.cells
    if not cells or not all(isinstance(cell, dict) for cell in cells):
        raise UserError("cells must be a tuple of {'dotted.key': value}, and not empty")
    for cell in cells:
        for key in cell:
            check_key(config, key)
    return [dict(cell) for cell in cells]


def _make_cell(config: ConfigDict, spec: dict[str, Any], swept: dict) -> Cell:
    values = flat(config) | spec
    for key, value in spec.items():
        kind = _type_of(config, key)
        if not isinstance(value, (float, int) if kind is float else kind):
            raise UserError(f"cells: {key}={value!r} is not of type {kind.__name__}")
    parts = [str(values[key]) for key in NAMING]
    if values["workload.name"] in WITH_PREFIX:
        parts.append("shared" if values["workload.sharing"] else "unshared")
    named = (*NAMING, "workload.sharing")
    constant = (*named, *_UNSAID, *swept)
    parts += [
        f"{key.rsplit('.', 1)[-1]}={value}"
        for key, value in spec.items()
        if key not in named
    ]
    cell = Cell(
        key="-".join(part.replace("/", "_") for part in parts),
        model=values["model"],
        seed=values["seed"],
        engine=EngineConfig(**_group(values, "engine.")),
        workload=WorkloadSettings(**_group(values, "workload.")),
        swept=swept,
        varied={key: value for key, value in spec.items() if key not in constant},
    )
    for asked, most in (("n", "max_n"), ("beam_width", "max_beam_width")):
        wanted, room = getattr(cell.workload, asked), getattr(cell.engine, most)
        if wanted > room:
            raise UserError(
                f"workload.{asked} is {wanted} and engine.{most} {room}; set "
                f"--config.engine.{most}={wanted}"
            )
    if cell.workload.sharing and cell.engine.memory != "paged":
        raise UserError(
            f"workload.sharing is on and engine.memory is {cell.engine.memory}; only "
            "paged memory can share blocks"
        )
    return cell


def _group(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)
    }


def _type_of(config: ConfigDict, key: str) -> type:
    *groups, last = key.split(".")
    inner: Any = config
    for group in groups:
        inner = inner[group]
    return inner.get_type(last)


def _parse(kind: type, value: str) -> Any:
    if kind is bool:
        if value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        raise ValueError(value)
    return kind(value)

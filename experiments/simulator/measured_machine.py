"""A machine that was measured, as the cost model sees it; kept in a run's summary.

`python -m experiments.run --config=machine_costs` measures one, and other studies read
it from the `summary.json` that it leaves.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from experiments.errors import UserError
from experiments.simulator.costs import Overheads
from experiments.simulator.hardware import GIB, Hardware

# The study that measures, and how it says so in each row of its summary.
STUDY = "machine_costs"


class Machine(NamedTuple):
    """What was measured of a machine, and fitted to the steps of the engine on it.

    Attributes:
      gb_per_s: read from memory, in 1e9 bytes.
      gflops: arithmetic in float32.
      memory_gib: of the host.
      step_s: overhead of a step, in seconds; fitted.
      row_s: overhead of each sequence in it; fitted.
    """

    gb_per_s: float
    gflops: float
    memory_gib: float
    step_s: float = 0.0
    row_s: float = 0.0

    def hardware(self) -> Hardware:
        """Returns the machine as one device.

        There is no link to others. A swap is taken for a copy within its memory, at the
        same bandwidth: an assumption.
        """
        return Hardware(
            "a machine that was measured",
            memory_bytes=self.memory_gib * GIB,
            bandwidth=1e9 * self.gb_per_s,
            flops=1e9 * self.gflops,
            link_bandwidth=math.inf,
            host_bandwidth=1e9 * self.gb_per_s,
        )

    def overheads(self) -> Overheads:
        """Returns the overheads that were fitted."""
        return Overheads(step_s=self.step_s, row_s=self.row_s)


def read_machine(path: Path | str) -> Machine:
    """Returns the machine of a run of the study `machine_costs`.

    Args:
      path: its `summary.json`.

    Raises:
      UserError: a file that cannot be read, or is another.
    """
    try:
        summary = json.loads(Path(path).read_text("utf-8"))
        (row,) = (row for row in summary["rows"] if row["cell"]["study"] == STUDY)
        machine = Machine(*(float(row["metrics"][name]) for name in Machine._fields))
    except OSError as error:
        raise UserError(f"the machine {path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} has no measured machine; give the summary.json of a run of "
            f"--config={STUDY}"
        ) from None
    _check(machine, path)
    return machine


def _check(machine: Machine, path: Path | str) -> None:
    values: dict[str, Any] = machine._asdict()
    for name, value in values.items():
        least = 0.0 if name in Machine._field_defaults else math.ulp(0.0)
        if not least <= value < math.inf:
            raise UserError(f"{path}: {name} is {value}, which no machine has")

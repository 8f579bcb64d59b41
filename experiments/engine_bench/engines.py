"""The engines that can be compared, where they are, and what each wants."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = ROOT / "scripts/engines"
# As in `scripts/setup_engines`.
HOME = ROOT / os.environ.get("ENGINES", ".cache/engines")
OURS = "paged_jax"


class Engine(NamedTuple):
    """One engine, used in one way.

    Attributes:
      name: as in the results.
      runner: its file in `scripts/engines`.
      folder: of its environment, as `scripts/setup_engines` names it; empty for ours.
      form: of the model that it loads: directory, gguf or openvino; `any` takes what
        the model comes as.
      mode: passed to the runner.
      program: what serves, in its environment; empty if that is a package.
      compiles: whether a first start takes longer than later ones.
      note: how it is used, for the table.
    """

    name: str
    runner: str
    folder: str
    form: str
    mode: str = ""
    program: str = ""
    compiles: bool = False
    note: str = ""


ENGINES = (
    Engine(OURS, "paged_jax_runner.py", "", "any", compiles=True),
    Engine("vllm", "vllm_runner.py", "vllm", "directory", compiles=True),
    Engine("openvino", "openvino_runner.py", "openvino", "openvino"),
    Engine(
        "llamacpp",
        "llamacpp_runner.py",
        "llamacpp",
        "gguf",
        program="build/bin/llama-server",
        note="no preemption: each slot holds the longest request",
    ),
    Engine(
        "transformers",
        "transformers_runner.py",
        "transformers",
        "directory",
        mode="continuous",
        note="continuous batching",
    ),
    Engine(
        "transformers_static",
        "transformers_runner.py",
        "transformers",
        "directory",
        mode="static",
        note="padded batches",
    ),
)
BY_NAME = {engine.name: engine for engine in ENGINES}


def command(engine: Engine) -> list[str]:
    """Returns how its runner is started."""
    python = str(HOME / engine.folder / "bin/python")
    return [python if engine.folder else sys.executable, str(RUNNERS / engine.runner)]


def missing(engine: Engine) -> str | None:
    """Returns one line that says why an engine cannot be used; None if it can."""
    if not engine.folder or (HOME / engine.folder / "ready").exists():
        return None
    failed = HOME / f"{engine.folder}.failed"
    if failed.exists():
        return f"could not be installed: {' '.join(failed.read_text().split())}"
    return f"not installed; run ./scripts/setup_engines {engine.folder}"

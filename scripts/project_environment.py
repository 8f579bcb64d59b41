"""Lets a script run from any folder, by any Python: it goes on in the project's own."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def enter() -> None:
    """Makes the project importable; starts the script again in `.venv` without jax."""
    sys.path.insert(0, str(ROOT))
    if importlib.util.find_spec("jax"):
        return
    environment = ROOT / os.environ.get("VENV", ".venv")
    python = environment / "bin/python"
    if not python.exists() or Path(sys.prefix) == environment:
        sys.exit(f"{Path(sys.argv[0]).name}: no jax here; run ./scripts/setup first")
    os.execv(python, [str(python), *sys.argv])

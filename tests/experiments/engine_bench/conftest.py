"""An engine that needs no installation, and a place of its own for what is made."""

import sys
from pathlib import Path

import pytest

from experiments.engine_bench import engines

FAKE = Path(__file__).parent / "fake_runner.py"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of engines and models, with nothing installed."""
    monkeypatch.setattr(engines, "HOME", tmp_path)
    return tmp_path


@pytest.fixture
def fake_command():
    return [sys.executable, str(FAKE)]

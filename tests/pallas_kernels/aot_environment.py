"""Runs `experiments.aot` as `scripts/aot_report` does, for the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def report(*arguments: str) -> dict:
    """Returns what the report says, as JSON; skips where there is no compiler."""
    setup = subprocess.run(
        [ROOT / "scripts/setup_aot", sys.executable],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if setup.returncode:
        reason = (setup.stderr.strip().splitlines() or ["no reason given"])[-1]
        # CI has made it before: what it cannot install must not pass for tested.
        if os.environ.get("CI") and setup.returncode != 3:
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "experiments.aot", "--json", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    found["exit"] = done.returncode
    return found

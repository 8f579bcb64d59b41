"""The benchmarks and checks start from any folder, and without any preparation."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.newest(
    reason="what starts a script is the same on each Python"
)

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
SCRIPTS_IN_PYTHON = (
    "bench_allocator",
    "bench_attention",
    "bench_beams",
    "bench_engines",
    "bench_schedule",
    "bench_simulator.py",
    "bench_step",
    "equality",
    "soak",
)


def start(python, script, folder, **environment):
    given = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VENV")}
    return subprocess.run(
        [python, SCRIPTS / script, "--help"],
        cwd=folder,
        env=given | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A Python without the project's packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin/python"


@pytest.mark.parametrize("script", SCRIPTS_IN_PYTHON)
def test_a_script_starts_from_any_folder_with_another_python(
    script, bare_python, tmp_path
):
    """It goes on in the environment, started once more with the Python there."""
    done = start(bare_python, script, tmp_path, VENV=sys.prefix)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script}")
    assert os.access(SCRIPTS / script, os.X_OK)


def test_a_script_starts_with_the_python_of_the_environment(tmp_path):
    """Whatever VENV says: that Python needs no other."""
    script = SCRIPTS_IN_PYTHON[0]
    done = start(sys.executable, script, tmp_path, VENV="nowhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script}")


@pytest.mark.parametrize("script", SCRIPTS_IN_PYTHON)
def test_without_an_environment_the_way_to_make_one_is_named(
    script, bare_python, tmp_path
):
    for nowhere in (tmp_path, bare_python.parents[1]):
        done = start(bare_python, script, tmp_path, VENV=str(nowhere))
        assert done.returncode == 1
        assert done.stderr == f"{script}: no jax here; run ./scripts/setup first\n"


def test_what_set_up_says_is_not_in_the_aot_report(tmp_path):
    """In a tree whose set-up speaks, and whose Python only names its arguments."""
    tree = tmp_path / "scripts"
    tree.mkdir()
    (tree / "aot_report").write_bytes((SCRIPTS / "aot_report").read_bytes())
    for name in ("setup", "setup_aot"):
        (tree / name).write_text(f"#!/bin/sh\necho {name} speaks\n")
    python = tmp_path / "made/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "{}" "$@"\n')
    for file in (*tree.iterdir(), python):
        file.chmod(0o755)
    done = subprocess.run(
        [tree / "aot_report", "--json"],
        env=os.environ | {"VENV": str(tmp_path / "made")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "{} -m experiments.aot --json\n"
    assert "setup speaks" in done.stderr

"""Work in several processes, and on a local Ray."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from experiments.errors import UserError
from experiments.workers import run_all


def double(x):
    return 2 * x, os.getpid()


def fail(x):
    raise UserError(f"no {x}")


def die(x):
    os._exit(3)


def sleep(x):
    time.sleep(60)


def test_every_item_is_done_once_and_in_other_processes():
    found = dict(run_all(double, range(6), workers=2))
    assert {i: value for i, (value, _) in found.items()} == {i: 2 * i for i in range(6)}
    assert os.getpid() not in {pid for _, pid in found.values()}


def test_nothing_to_do_starts_nothing():
    assert not list(run_all(double, []))


def test_an_error_of_a_worker_is_the_callers():
    with pytest.raises(UserError, match="no 1"):
        list(run_all(fail, [1], workers=1))


def test_a_worker_that_dies_is_named():
    with pytest.raises(UserError, match="killed"):
        list(run_all(die, [1], workers=1))


def test_stopping_ends_the_workers():
    started = time.monotonic()
    found = run_all(double_or_sleep, [1, None], workers=2)
    assert next(found)[0] == 0
    found.close()
    assert time.monotonic() - started < 30


def double_or_sleep(x):
    return sleep(x) if x is None else double(x)


PARENT = """
import sys
sys.path.insert(0, {here!r})
from test_workers import run_all, write_pid
list(run_all(write_pid, [{path!r}], workers=1))
"""


def write_pid(path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    path = tmp_path / "pid"
    script = tmp_path / "parent.py"
    here = str(Path(__file__).parent)
    code = PARENT.format(here=here, path=str(path))
    # Spawned processes import the main module again.
    script.write_text(f"if __name__ == '__main__':\n{textwrap.indent(code, '    ')}")
    paths = os.pathsep.join([here, *sys.path])
    parent = subprocess.Popen(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": paths}
    )
    while not path.exists() or not path.read_text():
        assert parent.poll() is None
        time.sleep(0.1)
    worker = int(path.read_text())
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not is_running(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its parent")


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_an_unknown_launcher_is_refused():
    with pytest.raises(UserError, match="slurm.*processes, ray"):
        list(run_all(double, [1], launcher="slurm"))


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="pip install"):
        list(run_all(double, [1], launcher="ray"))


def test_a_local_ray_gives_the_same():
    found = dict(run_all(double, range(4), workers=2, launcher="ray"))
    assert {i: value for i, (value, _) in found.items()} == {i: 2 * i for i in range(4)}

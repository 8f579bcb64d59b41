"""Processes that serve: the protocol, what they may use, and how they end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import usage
from experiments.engine_bench.runners import Runner, RunnerError

FIELDS = {
    "program": "",
    "mode": "",
    "dtype": "float32",
    "threads": 1,
    "kv_tokens": 64,
    "max_seqs": 2,
    "max_model_len": 32,
    "cache": "",
    "requests": [[[5], 3], [[6], 2]],
}


@pytest.fixture
def start(fake_command, tmp_path):
    started = []

    def start(model="good"):
        runner = Runner(fake_command, 1, tmp_path / "log")
        started.append(runner)
        return runner, lambda: runner.ask("start", model=model, **FIELDS)

    yield start
    for runner in started:
        runner.close()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A child whose parent has not looked yet is dead all the same.
    return state(pid) != "Z"


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_a_run_returns_tokens_and_time(start):
    runner, ready = start()
    assert ready()["version"] == "fake 1.0"
    for _ in range(2):
        answer = runner.ask("run")
        assert answer["tokens"] == [[5, 5, 5], [6, 6]]
        assert 0.01 <= answer["wall_s"] < 5
        assert answer["details"]["gaps"] == [[0.5] * 3, [0.5] * 2]


def test_it_may_use_the_cores_it_was_given(start):
    _, ready = start()
    assert ready()["settings"]["cores"] == 1


def test_what_an_engine_prints_does_not_reach_the_protocol(start, tmp_path):
    _, ready = start()
    ready()
    assert "this goes to the log" in (tmp_path / "log").read_text()


def test_paused_it_computes_nothing(start):
    runner, ready = start("spinning")
    ready()
    wait_for(lambda: runner.cpu_seconds() > 0.1)
    runner.pause()
    wait_for(lambda: all(state(pid) == "T" for pid in usage.family(runner.pid)))
    before = runner.cpu_seconds()
    time.sleep(0.2)
    assert runner.cpu_seconds() == before
    assert runner.ask("run")["tokens"] == [[5, 5, 5], [6, 6]]


def test_memory_and_time_are_those_of_all_its_processes(start):
    runner, ready = start()
    child = ready()["settings"]["child"]
    assert child in usage.family(runner.pid)
    assert runner.peak_rss_bytes() > usage.peak_rss_bytes(child) > 0


def test_closed_while_paused_it_leaves_no_process_behind(start):
    runner, ready = start()
    child = ready()["settings"]["child"]
    assert is_alive(child)
    runner.pause()
    runner.close()
    wait_for(lambda: not is_alive(child))


@pytest.mark.parametrize(
    "model, message",
    [
        ("no_start", r"^ValueError: no such model \(see .*log\)$"),
        ("no_run", r"^RuntimeError: out of blocks \(see .*log\)$"),
        ("death", "^it died: see .*log$"),
    ],
)
def test_a_failure_is_one_line_that_names_the_log(start, model, message):
    runner, ready = start(model)
    with pytest.raises(RunnerError, match=message):
        ready()
        runner.ask("run")


def test_paused_it_does_not_outlive_the_command(fake_command, tmp_path):
    code = (
        "import json, os, signal, sys; from pathlib import Path;"
        "from experiments.engine_bench.runners import Runner;"
        "runner = Runner(sys.argv[1:3], 1, Path(sys.argv[3]));"
        "runner.ask('start', model='good', **json.loads(sys.argv[4])); runner.pause();"
        "print(runner.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *fake_command, tmp_path / "log"]
        + [json.dumps(FIELDS)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    wait_for(lambda: not is_alive(pid))

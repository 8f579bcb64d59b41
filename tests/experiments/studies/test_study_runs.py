"""The command with studies: results, resumption, workers, bad values."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_study

from experiments import run
from experiments.results import ResultsFolder
from experiments.studies import run as study_run
from experiments.studies import table1

CONFIG = '''"""Tiny: a study of two systems."""
from experiments.studies.base_config import study_config


def get_config(preset="quick"):
    return study_config(preset, "tiny", ("tiny",))
'''
ROOT = Path(__file__).resolve().parents[3]
KEYS = [f"tiny-{system}-{seed}" for system in ("ft", "vllm") for seed in range(3)]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Returns a function that runs the command; it returns the code, and what it said.

    Its `done()` returns the tasks that were run since the last time.
    """
    config = tmp_path / "tiny.py"
    config.write_text(CONFIG)
    done = tmp_path / "done"
    monkeypatch.setenv(tiny_study.DONE, str(done))
    monkeypatch.setattr(study_run, "load_study", lambda name: tiny_study)
    monkeypatch.setattr(study_run, "run_piece", tiny_study.run_piece)
    in_processes = study_run.run_all

    def run_all(function, items, *, workers, launcher):
        """Takes no process for one worker: that would import everything anew."""
        if workers != 1:
            yield from in_processes(function, items, workers=workers, launcher=launcher)
            return
        for number, item in reversed(list(enumerate(items))):
            yield number, function(item)

    monkeypatch.setattr(study_run, "run_all", run_all)

    def call(*words):
        code = run.main([f"--config={config}", *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    def take():
        lines = done.read_text().splitlines() if done.exists() else []
        done.unlink(missing_ok=True)
        return sorted(lines)

    call.done = take
    return call


def without_times(path):
    summary = json.loads((path / "summary.json").read_text())
    del summary["environment"]
    for row in summary["rows"]:
        del row["details"]["wall_s"]
    return json.dumps(summary)


def test_a_run_leaves_a_folder_that_says_all(command, tmp_path):
    out = tmp_path / "out"
    code, printed, err = command(f"--out={out}", "--workers=1")
    assert code == 0, err
    summary = json.loads((out / "summary.json").read_text())
    assert [row["key"] for row in summary["rows"]] == KEYS
    assert summary["rows"][4]["cell"] == {"study": "tiny", "system": "vllm", "seed": 1}
    assert summary["rows"][4]["metrics"] == {"rate": pytest.approx(4.1)}
    assert summary["config"]["preset"] == "quick"
    claims = {claim["id"]: claim for claim in summary["claims"]}
    assert claims["tiny.rate.ft"]["holds"] is True
    assert claims["tiny.rate.vllm"]["holds"] is False
    # What is cut short says so.
    assert "quick" in claims["tiny.rate.ft"]["note"]
    assert "3 seeds, spread 0.2" in claims["tiny.rate.ft"]["note"]
    assert (out / "figures/tiny.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "cells.csv").read_text().splitlines()) == 1 + len(KEYS)
    html = (out / "report.html").read_text()
    assert "1 of 2 hold" in html and "6 points" in html
    assert str(out) in printed


def test_the_same_seed_gives_the_same_with_any_workers(command, tmp_path):
    for name, workers in (("a", 1), ("b", 2)):
        code, _, err = command(f"--out={tmp_path / name}", f"--workers={workers}")
        assert code == 0, err
    assert without_times(tmp_path / "a") == without_times(tmp_path / "b")
    assert command("--seed=3", f"--out={tmp_path / 'c'}", "--workers=1")[0] == 0
    other = json.loads((tmp_path / "c/summary.json").read_text())
    assert [row["cell"]["seed"] for row in other["rows"][:3]] == [3, 4, 5]


@pytest.mark.long
def test_a_simulation_gives_the_same_in_another_run_with_any_workers(tmp_path):
    """Of the whole command, in processes of its own, as a user runs it twice."""
    words = ["--config=fig13", "--config.time_share=0.01", "--config.num_seeds=1"]
    for workers in (1, 2):
        out = [f"--out={tmp_path / str(workers)}", f"--workers={workers}"]
        done = subprocess.run(
            [sys.executable, "-m", "experiments.run", *words, *out],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
    first, second = (without_times(tmp_path / name) for name in ("1", "2"))
    assert first == second
    summary = json.loads(first)
    assert len(summary["rows"]) > 3
    assert all(row["metrics"] for row in summary["rows"])
    measured = [claim["measured"] for claim in summary["claims"]]
    assert measured and None not in measured


def test_what_was_interrupted_goes_on_where_it_stopped(
    command, tmp_path, monkeypatch, capsys
):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert command(f"--out={whole}", "--workers=1")[0] == 0
    assert len(command.done()) == len(KEYS)
    add_row = ResultsFolder.add_row

    def interrupt(self, key, row):
        if len(self.rows) == 2:
            raise KeyboardInterrupt
        add_row(self, key, row)

    with monkeypatch.context() as patch:
        patch.setattr(ResultsFolder, "add_row", interrupt)
        code, _, err = command(f"--out={out}", "--workers=1")
    assert code == run.EXIT_INTERRUPTED
    assert "2 of 6" in err and "--resume" in err
    assert not (out / "summary.json").exists()
    command.done()
    with (out / "cells.jsonl").open("a") as file:
        file.write('{"key": "tiny-vllm-0", "met')  # as a kill in mid-write leaves it
    code, printed, err = command(f"--out={out}", "--resume", "--workers=1")
    assert code == 0, err
    assert "2 of 6 tasks are done already" in printed
    assert command.done() == ["ft-0", "ft-1", "ft-2", "vllm-0"]
    assert without_times(out) == without_times(whole)


def test_other_settings_are_not_gone_on_with(command, tmp_path):
    out = tmp_path / "out"
    assert command(f"--out={out}", "--workers=1")[0] == 0
    words = "--resume", "--workers=1", "--config.num_seeds=2"
    code, _, err = command(f"--out={out}", *words)
    assert code == run.EXIT_BAD_INPUT
    assert "num_seeds was 3 and is 2" in err


@pytest.mark.long
def test_the_whole_command_on_a_local_ray(tmp_path):
    out = tmp_path / "out"
    words = ["--config=table1", "--launcher=ray", "--workers=1", f"--out={out}"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.run", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((out / "summary.json").read_text())["rows"]
    assert len(rows) > 1
    for row in rows:
        setup = row["cell"]["setup"]
        assert row["metrics"] == pytest.approx(table1.divide(setup))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--config.num_seeds=0"], "num_seeds is 0"),
        (["--config.time_share=0.0"], "time_share is 0.0"),
        (["--config.tolerance=2.0"], "tolerance is 2.0"),
        (["--config.grid=-1.0"], "grid is -1.0"),
        (["--config.nothing=1"], "unknown config key 'nothing'"),
        (["--sweep=num_seeds=1,2"], "grids of their own"),
        (["--workers=-1"], "workers"),
        (["--launcher=slurm"], "launcher"),
        (["--preset=long"], "--preset=long"),
    ],
)
def test_bad_values_are_refused_in_one_line(command, tmp_path, words, message):
    out = tmp_path / "out"
    code, _, err = command(f"--out={out}", *words)
    assert code == run.EXIT_BAD_INPUT
    assert message in err and len(err.strip().splitlines()) == 1
    assert not out.exists() and command.done() == []


def test_an_unknown_study_is_refused_by_name(tmp_path, capsys):
    words = ["--config=fig02", f"--out={tmp_path / 'out'}"]
    assert run.main([*words, '--config.studies=("fig99",)']) == run.EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert "'fig99' is not one of" in err and "fig02" in err


@pytest.mark.skipif(sys.platform == "win32", reason="needs mode bits")
def test_a_folder_that_cannot_be_written_is_refused(command, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, _, err = command(f"--out={blocked / 'out'}", "--workers=1")
    assert code == run.EXIT_BAD_INPUT
    assert len(err.strip().splitlines()) == 1 and command.done() == []

import csv
import errno
import io
import json

import pytest
from test_metrics import run_of

from experiments import results
from experiments.base_config import base_config
from experiments.errors import UserError
from experiments.results import ResultsFolder, to_csv
from experiments.sweep import expand

ASKED = {"experiment": "x", "config": {"engine": {"block_size": 16}, "seed": 0}}
WHERE = {"python": "3.13", "git": {"commit": "abc", "dirty": False}}


@pytest.fixture
def cells():
    config = base_config()
    config.seed = 0
    return expand(config, {"engine.block_size": (8, 16)})


def row_of(value=1.0):
    return {
        "label": "a",
        "cell": {"memory": "max"},
        "metrics": {"ttft_s": {"p50": value, "p99": 2.0}},
        "details": {"workload": {"digest": "d"}, "memory_plan": []},
    }


def create(path):
    return ResultsFolder.create(path, ASKED, WHERE)


def test_a_finished_cell_is_read_back(tmp_path, cells):
    folder = create(tmp_path / "r")
    run = run_of()
    folder.add(cells[0], row_of(), run)
    again = ResultsFolder.resume(folder.path, ASKED, WHERE)
    assert again.rows == {cells[0].key: {"key": cells[0].key} | row_of()}
    outputs = again.outputs(cells[0].key)
    assert [o["token_ids"] for o in outputs] == [[1, 2, 3, 4], [1]]
    log, times = again.log(cells[0].key)
    assert (log == run.log).all() and (times == run.log_times).all()


def test_a_line_that_a_killed_run_left_unfinished_is_dropped(tmp_path, cells):
    folder = create(tmp_path / "r")
    for cell in cells:
        folder.add(cell, row_of(), run_of())
    path = folder.path / "cells.jsonl"
    path.write_text(path.read_text()[:-20])
    again = ResultsFolder.resume(folder.path, ASKED, WHERE)
    assert list(again.rows) == [cells[0].key]
    again.add(cells[1], row_of(), run_of())
    lines = path.read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == [c.key for c in cells]


def test_a_damaged_line_is_named(tmp_path, cells):
    folder = create(tmp_path / "r")
    (folder.path / "cells.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        ResultsFolder.resume(folder.path, ASKED, WHERE)


def test_results_of_another_config_are_refused_with_what_differs(tmp_path):
    create(tmp_path / "r")
    other = {"experiment": "x", "config": {"engine": {"block_size": 32}, "seed": 0}}
    with pytest.raises(UserError) as raised:
        ResultsFolder.resume(tmp_path / "r", other, WHERE)
    assert "config.engine.block_size was 16 and is 32" in str(raised.value)
    assert "seed" not in str(raised.value) and "\n" not in str(raised.value)


def test_many_differences_are_cut_short(tmp_path):
    create(tmp_path / "r")
    other = {str(i): i for i in range(9)} | ASKED
    with pytest.raises(UserError, match="and 5 more"):
        ResultsFolder.resume(tmp_path / "r", other, WHERE)


def test_a_folder_without_results_cannot_be_resumed(tmp_path):
    with pytest.raises(UserError, match="holds no results"):
        ResultsFolder.resume(tmp_path / "nothing", ASKED, WHERE)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        ResultsFolder.resume(tmp_path, ASKED, WHERE)


def test_a_folder_in_use_is_not_overwritten(tmp_path):
    create(tmp_path / "r")
    with pytest.raises(UserError, match="add --resume"):
        create(tmp_path / "r")
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="not empty; give a new folder"):
        create(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"--out=.*: Not a directory"):
        create(tmp_path / "file" / "r")
    with pytest.raises(UserError, match=r"--out=/proc/r: "):
        create(results.Path("/proc/r"))


def test_too_little_space_is_told_before_anything_runs(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(results.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="1 MiB of space are left and 64 are needed"):
        create(tmp_path / "r")


def test_space_that_runs_out_later_is_told_in_one_line(tmp_path, cells, monkeypatch):
    folder = create(tmp_path / "r")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device; give a folder"):
        folder.add(cells[0], row_of(), run_of())
    monkeypatch.undo()
    assert ResultsFolder.resume(folder.path, ASKED, WHERE).rows == {}


def test_a_new_folder_without_results_can_be_discarded(tmp_path, cells):
    unused, used = create(tmp_path / "unused"), create(tmp_path / "used")
    used.add(cells[0], row_of(), run_of())
    resumed = ResultsFolder.resume(create(tmp_path / "old").path, ASKED, WHERE)
    for folder in (unused, used, resumed):
        folder.discard_if_unused()
    assert [f.path.exists() for f in (unused, used, resumed)] == [False, True, True]


def test_what_changed_between_two_runs_is_noted(tmp_path):
    folder = create(tmp_path / "r")
    assert folder.environment() == WHERE
    now = WHERE | {"git": {"commit": "def", "dirty": False}}
    again = ResultsFolder.resume(folder.path, ASKED, now)
    noted = again.environment()["resumed"]
    assert noted == [["git.commit was 'abc' and is 'def'"]]


def test_the_table_has_a_column_for_each_value():
    table = list(csv.DictReader(io.StringIO(to_csv([row_of(1.5), row_of(2.5)]))))
    assert [line["ttft_s.p50"] for line in table] == ["1.5", "2.5"]
    assert table[0]["memory"] == "max"
    assert table[0]["details.workload.digest"] == "d"


def test_the_newest_folder_is_the_one_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no results/x-"):
        results.newest_folder("x")
    for name in ("x-1", "x-2", "y-3"):
        create(results.Path("results") / name)
    results.os.utime(tmp_path / "results/x-1/config.json", (1, 1))
    assert results.newest_folder("x").name == "x-2"

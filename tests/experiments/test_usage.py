"""What others use of the machine while something is timed."""

import types

import pytest

from experiments import tables, usage


def test_cores_of_others_are_what_this_process_has_not_used(monkeypatch, tmp_path):
    ticks = usage._TICKS
    times = types.SimpleNamespace(wall=10.0, own=5.0)
    monkeypatch.setattr(usage, "_PROC", tmp_path)
    monkeypatch.setattr(
        usage,
        "time",
        types.SimpleNamespace(
            process_time=lambda: times.own, perf_counter=lambda: times.wall
        ),
    )
    stat = tmp_path / "stat"
    # user, nice, system, idle, iowait, irq, softirq, steal
    stat.write_text(f"cpu {100 * ticks} 0 0 {50 * ticks} 0 0 0 0\ncpu0 1 2 3\n")
    meter = usage.OthersMeter()
    times.wall, times.own = 20.0, 15.0
    now = [ticks * seconds for seconds in (113, 2, 1, 54, 0, 0, 0, 1)]
    stat.write_text(f"cpu {' '.join(map(str, now))}\ncpu0 1 2 3\n")
    assert meter.cores() == pytest.approx((13 + 2 + 1 + 1 - 10) / 10)
    # Ticks are coarse: what this process computed may come to more.
    times.own = 100.0
    assert meter.cores() == 0.0


def test_where_the_system_does_not_say_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(usage, "_PROC", tmp_path)
    assert usage.OthersMeter().cores() is None


@pytest.mark.parametrize(
    "cores, line",
    [
        ([0.02, 0.1, None], ""),
        ([], ""),
        ([0.02, 0.11, 1.26], "2 of 3 cells were disturbed: other programs "),
    ],
)
def test_disturbed_cells_are_said(cores, line):
    found = tables.disturbed_line([{"details": {"other_cores": c}} for c in cores])
    assert found.startswith(line) and bool(found) is bool(line)
    assert not line or "up to 1.3 cores" in found


def test_a_run_of_before_says_nothing_of_it():
    assert tables.disturbed_line([{"details": {}}]) == ""

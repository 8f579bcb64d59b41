"""The bars of a run: how long the rest may take."""

import io
import re

import pytest
from rich.console import Console
from rich.progress import TextColumn

from experiments.progress import Lines, add_bar, make_progress


def test_what_is_left_follows_the_pieces_of_this_run_however_long_they_take():
    now = 0.0
    console = Console(file=io.StringIO(), width=120)
    progress = make_progress(console, get_time=lambda: now)

    def line():
        console.print(progress.make_tasks_table(progress.tasks))
        return console.file.getvalue().splitlines()[-1]

    bar = add_bar(progress, "cells", total=8, done=3)
    assert "3/8" in line() and "left: -:--:--" in line()
    now = 100.0
    progress.advance(bar)
    assert "4/8" in line() and "0:01:40 left: 0:06:40" in line()
    now = 300.0
    progress.advance(bar)
    assert "5/8" in line() and "0:05:00 left: 0:07:30" in line()
    progress.advance(bar, 3)
    assert "8/8" in line() and "left: 0:00:00" in line()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_numbers_are_whole_where_a_label_has_no_room(width):
    now = 0.0
    console = Console(file=io.StringIO(), width=width)
    note = TextColumn("{task.fields[note]}")
    progress = make_progress(console, note, get_time=lambda: now)
    label = "system prompt: paged + continuous, not shared"
    cells = add_bar(progress, "cells", total=14, note="")
    add_bar(progress, label, total=120, done=66, note="104.8 tokens/s")
    now = 3700.0
    progress.advance(cells, 7)
    console.print(progress.make_tasks_table(progress.tasks))
    first, second = console.file.getvalue().splitlines()
    assert re.fullmatch(r"cells +[━╸╺ ]+ +7/14 +1:01:40 left: 1:01:40 +", first)
    assert re.search(r" 66/120 +1:01:40 left: -:--:-- +104.8 tokens/s", second)
    assert second.startswith("system pro") and (label in second) is (width == 160)
    assert width == 160 or "…" in second


def test_a_file_gets_a_line_now_and_then():
    now = 0.0
    console = Console(file=io.StringIO(), width=40)
    with make_progress(console, get_time=lambda: now) as progress:
        bar = add_bar(progress, "tasks", total=4)
        lines = Lines(progress, bar, every_s=20)
        for now in (30.0, 40.0, 60.0, 61.0):
            progress.advance(bar)
            lines.say(f"[b]at {now:.0f}[/b]")
    assert console.file.getvalue().splitlines() == [
        "1/4 tasks, 0:00:30, left: 0:01:30; [b]at 30[/b]",
        "3/4 tasks, 0:01:00, left: 0:00:20; [b]at 60[/b]",
        "4/4 tasks, 0:01:01; [b]at 61[/b]",
    ]


def test_a_terminal_gets_no_lines():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    progress = make_progress(console)
    bar = add_bar(progress, "tasks", total=1)
    progress.advance(bar)
    Lines(progress, bar).say("something")
    assert console.file.getvalue() == ""

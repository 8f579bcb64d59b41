"""The bars of a run: how long the rest may take."""

import io

from rich.console import Console

from experiments.progress import add_bar, make_progress


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

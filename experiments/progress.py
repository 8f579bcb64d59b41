"""Bars that say what is done, how long that took, and how long the rest may take."""

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Seconds over which a bar's speed is taken. With the usual 30 there would be none for
# work of which each piece takes a minute.
_PERIOD = 7 * 24 * 3600.0


def make_progress(
    console: Console, *columns: ProgressColumn, **options: Any
) -> Progress:
    """Returns bars without a line yet, to be used as a context.

    Args:
      console: where they are drawn.
      *columns: what stands at the end of each line.
      **options: others of `rich.progress.Progress`.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        *columns,
        console=console,
        speed_estimate_period=_PERIOD,
        **options,
    )


def add_bar(
    progress: Progress, description: str, total: int, done: int = 0, **fields: Any
) -> TaskID:
    """Adds a line, and returns its name.

    Args:
      progress: the bars.
      description: at the start of the line.
      total: how much there is to do.
      done: how much of it an earlier run has done; that tells nothing of the speed.
      **fields: for the columns.
    """
    bar = progress.add_task(description, total=total, completed=done, **fields)
    # The speed is counted from the first time that a bar advances: from here.
    progress.advance(bar, 0)
    return bar

"""What is done, how long that took, and how long the rest may take: bars, or lines."""

import datetime
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

# Seconds over which a bar's speed is taken. With the usual 30 there would be none for
# work of which each piece takes a minute.
_PERIOD = 7 * 24 * 3600.0


class _Label(TextColumn):
    """What a line is about; where there is no room, it is cut, and no number is."""

    def __init__(self):
        super().__init__("{task.description}", table_column=Column())

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


def make_progress(
    console: Console, *columns: ProgressColumn, **options: Any
) -> Progress:
    """Returns bars without a line yet, to be used as a context.

    Args:
      console: where they are drawn; nothing is if it is no terminal (see `Lines`).
      *columns: what stands at the end of each line.
      **options: others of `rich.progress.Progress`.
    """
    whole = Column(no_wrap=True)
    return Progress(
        _Label(),
        BarColumn(),
        MofNCompleteColumn(table_column=whole),
        TimeElapsedColumn(table_column=whole),
        TextColumn("left:"),
        TimeRemainingColumn(table_column=whole),
        *columns,
        console=console,
        speed_estimate_period=_PERIOD,
        disable=not console.is_terminal,
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


class Lines:
    """The same for a file or a pipe, where no bars are drawn: a line now and then."""

    def __init__(self, progress: Progress, bar: TaskID, every_s: float = 0.0):
        """Says nothing yet.

        Args:
          progress: the bars.
          bar: the one whose advance is told.
          every_s: least seconds between two lines; the last one always comes.
        """
        self._progress, self._bar, self._every_s = progress, bar, every_s
        self._said = 0.0

    def say(self, what: str = "") -> None:
        """Prints how far the bar is, and what was just done."""
        progress = self._progress
        if progress.console.is_terminal:
            return
        (task,) = (task for task in progress.tasks if task.id == self._bar)
        elapsed = task.elapsed or 0.0
        if not task.finished and elapsed < self._said + self._every_s:
            return
        self._said = elapsed
        left = task.time_remaining
        progress.console.print(
            f"{task.completed:.0f}/{task.total:.0f} {task.description}, "
            f"{_clock(elapsed)}" + (f", left: {_clock(left)}" if left else ""),
            *([what] if what else []),
            sep="; ",
            markup=False,
            soft_wrap=True,
        )


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))

"""What there is to do, in order, until the time is up."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

# The sections of what is found, and what a job is worth: those of the lowest rank come
# first. What others' kernels do comes after what ours do, the slow `xla` backend last.
SECTIONS = ("numbers", "copy", "bandwidth", "prefill", "cascade")
CHECKED, OURS, CONTIGUOUS, CUDNN, TRITON, ROWS, XLA = range(7)
NO_TIME = "no time left"


class Job(NamedTuple):
    """Something to check or to time.

    Attributes:
        section: where its row belongs.
        title: what it is, in a line.
        rank: when it comes; jobs of a rank keep their order.
        row: what is known of its row before.
        run: returns the rest of the row.
        ours: whether it must run. Others' kernels are private, or refuse a shape.
    """

    section: str
    title: str
    rank: int
    row: dict[str, Any]
    run: Callable[[], dict[str, Any]]
    ours: bool = True


class Deadline:
    """When to stop.

    Args:
        seconds: from now on.
        clock: says how late it is, in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._start = clock()
        self._seconds = seconds

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def passed(self) -> bool:
        """Whether nothing may begin any more."""
        return self.spent >= self._seconds

    def part(self, share: float) -> "Deadline":
        """Returns one with the same start, and a share of the seconds."""
        part = Deadline(0, self._clock)
        part._start, part._seconds = self._start, self._seconds * share
        return part


def run(jobs: Iterable[Job], deadline: Deadline) -> Iterator[tuple[Job, dict]]:
    """Yields each job, in order, and its row.

    A job that fails has the reason in its row, as `why_not`, and does not stop the
    others. If it is ours, `holds` is False. What has no time left has `skipped`.
    """
    for job in sorted(jobs, key=lambda job: job.rank):
        yield job, _row(job, deadline)


def _row(job: Job, deadline: Deadline) -> dict[str, Any]:
    if deadline.passed:
        return job.row | dict(skipped=True, why_not=NO_TIME)
    try:
        return job.row | job.run()
    except Exception as error:
        row = job.row | dict(why_not=reason(error))
        return row | dict(holds=False) if job.ours else row


def reason(error: Exception) -> str:
    """Returns the first line of what an error says, not too much of it."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0][:120]

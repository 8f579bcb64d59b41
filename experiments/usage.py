"""What processes use of the machine, read from Linux's /proc."""

import os
import time
from pathlib import Path

# Cores that other programs may use while something is timed. What has threads that wait
# for each other loses far more than that share.
DISTURBED = 0.1
_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/stat's first line: what is neither idle nor waiting for a disk, and
# stolen time, in which another machine had the core.
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def family(pid: int) -> list[int]:
    """Returns a process and all its living descendants."""
    found, waiting = [], [pid]
    while waiting:
        process = waiting.pop()
        found.append(process)
        for children in _PROC.glob(f"{process}/task/*/children"):
            waiting += [int(child) for child in _read(children).split()]
    return found


def cpu_seconds(pid: int) -> float:
    """Returns the time that a process and its descendants have computed."""
    ticks = 0
    for process in family(pid):
        # The name, in parentheses, may hold anything.
        fields = _read(_PROC / str(process) / "stat").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12]) if fields else 0
    return ticks / _TICKS


def peak_rss_bytes(pid: int) -> int:
    """Returns the sum of the most memory that each of a family has held."""
    total = 0
    for process in family(pid):
        for line in _read(_PROC / str(process) / "status").splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def busy_seconds() -> float:
    """Returns the time that all cores together have been busy since the start."""
    values = _read(_PROC / "stat").splitlines()[0].split()[1:]
    ticks = dict(zip(_FIELDS, map(int, values)))
    return sum(ticks[name] for name in _BUSY) / _TICKS


class OthersMeter:
    """How many cores other programs use while this process computes."""

    def __init__(self):
        """Starts to measure."""
        self._start = self._now()

    def cores(self) -> float | None:
        """Returns the mean since the start; None where the system does not say."""
        (busy, own, wall), (now_busy, now_own, now) = self._start, self._now()
        if busy is None or now_busy is None:
            return None
        return max(now_busy - busy - (now_own - own), 0.0) / max(now - wall, 1e-9)

    def _now(self) -> tuple[float | None, float, float]:
        busy = busy_seconds() if (_PROC / "stat").is_file() else None
        return busy, time.process_time(), time.perf_counter()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended meanwhile
        return ""

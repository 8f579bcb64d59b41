"""The processes that serve, one for each engine; see `scripts/engines/runner.py`."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import usage

# Longest wait for an answer, in seconds: compiling, or the slowest engine's round.
PATIENCE_S = 1800.0
_ENDING_S = 10.0
# Threads that one of these would start beside the ones that are asked for; and what
# machines set to pin older kernels, which slow NumPy down.
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LEFT_OUT = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONPATH")


class RunnerError(Exception):
    """An engine could not serve; the message is one line."""


class Runner:
    """A running engine, which computes only while it is asked to.

    In between all of its processes are stopped: OpenMP threads wait by spinning, and
    would take a core from the engine that is being timed.
    """

    def __init__(self, command: Sequence[str], threads: int, log: Path):
        """Starts the process.

        Args:
          command: the runner.
          threads: how many it will compute with.
          log: file for what it prints.
        """
        environment = {k: v for k, v in os.environ.items() if k not in _LEFT_OUT}
        environment |= dict.fromkeys(_THREAD_COUNTS, str(threads))
        environment |= {"HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
                text=True,
            )

    @property
    def pid(self) -> int:
        """The process, which leads a group of all that it starts."""
        return self._process.pid

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Sends a command; returns the answer.

        Raises:
          RunnerError: the engine failed, died, or did not answer in time.
        """
        assert self._process.stdin and self._process.stdout
        watchdog = threading.Timer(PATIENCE_S, self._signal, [signal.SIGKILL])
        self._signal(signal.SIGCONT)
        watchdog.start()
        try:
            self._process.stdin.write(json.dumps({"command": command} | fields) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            overdue = not watchdog.is_alive()
            watchdog.cancel()
        if not line:
            reason = f"no answer in {PATIENCE_S:.0f} s" if overdue else "it died"
            raise RunnerError(f"{reason}: see {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            raise RunnerError(f"{answer['error']} (see {self._log})")
        return answer

    def pause(self) -> None:
        """Stops its processes until the next command."""
        self._signal(signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """Returns what its processes have computed."""
        return usage.cpu_seconds(self.pid)

    def peak_rss_bytes(self) -> int:
        """Returns the most memory that its processes have held."""
        return usage.peak_rss_bytes(self.pid)

    def close(self) -> None:
        """Ends its processes, all of them."""
        assert self._process.stdin and self._process.stdout
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.close()
            self._process.wait(_ENDING_S)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

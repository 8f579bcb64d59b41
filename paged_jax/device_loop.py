"""The device's side of an engine: its state, and the programs that act on it."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import debug
from paged_jax.config import EngineConfig
from paged_jax.kv_cache import init_kv_cache
from paged_jax.memory_managers import MemoryManager
from paged_jax.models.config import ModelConfig
from paged_jax.programs import (
    Outputs,
    Programs,
    Report,
    compile_programs,
    make_orders,
)
from paged_jax.requests import RequestStatus
from paged_jax.state import EngineState
from paged_jax.stats import EngineStats
from paged_jax.step import Params, Program
from paged_jax.submit import NewRequest, init_state, pack_requests

# How long the host sleeps before it looks again whether a piece of a run is done.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.0002, 0.005


class DeviceLoop:
    """Holds the state of a serving loop, and runs it.

    Each method hands arrays to a compiled program that donates the state. Reads happen
    in `run` and `collect` only, and are counted.

    Attributes:
      state: the state; the next call donates its buffers.
      stats: what was counted.
      has_work: whether a step would do anything, as last read.
      width: W, requests handed over at a time.
    """

    def __init__(
        self,
        program: Program,
        manager: MemoryManager,
        config: EngineConfig,
        model: ModelConfig,
        params: Params,
    ):
        """Allocates the state; nothing is compiled yet."""
        # A batch of requests must not go round the queue, which has room for R.
        self.width = min(config.max_seqs, program.config.num_requests)
        self.has_work = False
        self._program = program
        self._params = params
        self._debug = config.debug
        self._null = program.config.num_requests
        self._programs: Programs | None = None
        self._iteration = 0
        self._unread = 0  # steps that no report has told of
        self._log_length = config.most_steps
        self._piece = config.steps_per_sync
        # Of the last run: steps taken since the start, and when they were done.
        self._marks: list[tuple[int, float]] = [(0, 0.0)]
        cache = init_kv_cache(
            model.num_layers,
            program.config.num_blocks,
            program.config.block_size,
            model.num_kv_heads,
            model.head_dim,
            jnp.dtype(config.kv_dtype or model.dtype),
        )
        self.state: EngineState = init_state(
            program.config, manager, cache, config.batching == "static"
        )
        self.stats = EngineStats(block_nbytes=cache.block_nbytes)

    @property
    def programs(self) -> Programs:
        """The compiled programs; compiles them if that has not been done."""
        if self._programs is None:
            self._programs = compile_programs(
                self._program, self._params, self.state, self._pack([])
            )
        return self._programs

    def reset_stats(self) -> None:
        """Starts counting anew."""
        self.stats = EngineStats(block_nbytes=self.stats.block_nbytes)

    def warmup(self) -> None:
        """Runs each program once on nothing, so that serving compiles nothing."""
        padding = self._slots([])
        state = self.programs.submit(self.state, self._pack([]))
        state = self.programs.cancel(state, padding, jnp.zeros_like(padding))
        state = self.programs.clear(state, padding)
        jax.block_until_ready(self.programs.collect(state, padding))
        orders = make_orders(self._null, 1)
        self.state, _ = self.programs.run(self._params, state, orders)

    def submit(self, requests: Sequence[NewRequest]) -> None:
        """Puts at most `width` requests into their slots and the queue."""
        self.state = self.programs.submit(self.state, self._pack(requests))
        self.has_work = True

    def run(
        self,
        steps: int,
        *,
        early: Sequence[int] = (),
        most_ended: int | None = None,
    ) -> Report:
        """Runs at most `steps` steps (1 if debugging), and reads the report.

        A long run is handed to the device in pieces of `steps_per_sync`, each while the
        one before it runs: nothing is read between them, and whoever presses Ctrl-C
        waits for two pieces at most. A piece without work takes no time.

        Args:
          steps: fewer are run if the log has not as many rows.
          early: slots of requests whose tokens are wanted before they have ended.
          most_ended: if requests wait on the host, see `run_steps`.
        """
        steps = 1 if self._debug else min(steps, self._log_length - self._unread)
        first, started = self._iteration, time.perf_counter()
        marks = [(first, started)]
        before, report = None, None
        # Without room for steps, one piece of none brings the report.
        for done in range(0, max(steps, 1), self._piece):
            piece = min(self._piece, steps - done)
            orders = make_orders(
                self._null,
                piece,
                most_ended=most_ended,
                new_log=self._unread == 0,
                early=early,
            )
            self.state, report = self.programs.run(self._params, self.state, orders)
            self._unread += piece
            if before is not None:
                _wait(before)
                marks.append((first + done, time.perf_counter()))
            before = report.iteration
        read: Report = self._read(report)
        self._unread = 0
        ended = time.perf_counter()
        self._iteration = int(read.iteration)
        taken = self._iteration - first
        # Pieces that found nothing to do were done when the last step was.
        late = [when for count, when in marks if count >= self._iteration]
        marks = [mark for mark in marks if mark[0] < self._iteration]
        self._marks = [*marks, (self._iteration, min([ended, *late]))]
        self.has_work = bool(read.has_work)
        self.stats.iterations += taken
        self.stats.device_seconds += ended - started
        if read.log.shape[0]:
            rows = np.array(read.log[: int(read.log_count)])
            self.stats.log_parts.append(rows)
        if self._debug:
            debug.raise_if_broken(self.state.scheduler)
        return read

    def time_of(self, iteration: int) -> float:
        """Returns when a step of the last run ended, interpolated, in seconds."""
        counts, times = zip(*self._marks)
        return float(np.interp(iteration + 1, counts, times))

    def collect(self, slots: Sequence[int]) -> list[Outputs]:
        """Reads the tokens of some requests."""
        results = []
        for some in self._batches(slots):
            read: Outputs = self._read(
                self.programs.collect(self.state, self._slots(some))
            )
            results += [
                jax.tree.map(lambda x, i=i: x[i], read) for i in range(len(some))
            ]
        return results

    def cancel(self, slots: Sequence[int], status: RequestStatus) -> None:
        """Ends requests with a status; their blocks are freed by the next step."""
        for some in self._batches(slots):
            ends = jnp.array([status] * self.width, jnp.int32)
            self.state = self.programs.cancel(self.state, self._slots(some), ends)
            self.has_work = True

    def clear(self, slots: Sequence[int]) -> None:
        """Frees the slots of requests that have ended and were read."""
        for some in self._batches(slots):
            self.state = self.programs.clear(self.state, self._slots(some))

    def read_with(self, report: Report) -> dict[int, Outputs]:
        """Returns the tokens that came with a report, by slot."""
        return {
            slot: jax.tree.map(lambda x, i=i: x[i], report.outputs)
            for i, slot in enumerate(report.slots.tolist())
            if slot != self._null
        }

    def _read(self, tree: Any) -> Any:
        """Reads device values: all that the host waits for."""
        self.stats.host_syncs += 1
        read = jax.device_get(tree)
        self.stats.host_read_bytes += sum(x.nbytes for x in jax.tree.leaves(read))
        return read

    def _batches(self, slots: Sequence[int]) -> list[Sequence[int]]:
        return [slots[i : i + self.width] for i in range(0, len(slots), self.width)]

    def _pack(self, requests: Sequence[NewRequest]):
        return pack_requests(self._program.config, requests, self.width)

    def _slots(self, slots: Sequence[int]) -> jax.Array:
        padding = [self._null] * (self.width - len(slots))
        return jnp.array([*slots, *padding], jnp.int32)


def _wait(value: Any) -> None:
    """Waits until a value is there, without reading it, and so that Ctrl-C is heard."""
    pause = _SHORTEST_WAIT_S
    while not value.is_ready():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_WAIT_S)

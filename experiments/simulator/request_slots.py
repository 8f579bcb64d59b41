"""What the host puts into slots that are free, and reads of those that have ended."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import UserError
from experiments.simulator.beams import Searches
from experiments.simulator.block_names import pack_names
from experiments.simulator.clock import NEVER, make_times, to_seconds
from experiments.simulator.entry import Entry
from experiments.simulator.request_times import Latencies, RequestTimes
from experiments.simulator.results import Results
from experiments.simulator.simulate import SimulatorProgram, SimulatorState
from experiments.simulator.stamps import Stamps
from experiments.simulator.totals import summarise_totals
from experiments.simulator.trace import Trace
from paged_jax.config import EngineConfig
from paged_jax.memory_managers import MANAGERS
from paged_jax.requests import RequestStatus


class RequestSlots:
    """Which request is in which slot, and what was read of those that have ended."""

    def __init__(
        self,
        config: EngineConfig,
        program: SimulatorProgram,
        source: Iterator[Trace],
        searches: Searches,
        prefix: tuple[int, int],
        closed: bool,
        times: RequestTimes | None,
    ):
        """Takes the first requests of the source.

        Args:
          config: the engine's settings.
          program: the static part.
          source: pieces of the trace.
          searches: that beam searches repeat.
          prefix: tokens that prompts begin with, and the row that holds them or -1.
          closed: whether clients send the requests.
          times: where to note those of each request, if anywhere.
        """
        self._config, self._source, self._searches = config, source, searches
        self._prefix_len, self._prefix_row = prefix
        self._closed = closed
        self._reserve = MANAGERS[config.memory].reserve
        self._program = program
        self._null = program.config.num_requests
        self._slots = config.max_requests
        self._next: Trace | None = next(source, None)
        self._n = 1 if self._next is None else self._next.n
        # Whether the sequences of each request so far are equally long.
        self._alike = True
        self._number = 0  # of the next request
        # Of each slot, the request and the sequence that it holds; -1: it is free.
        self._request = np.full(self._slots, -1)
        # And when it arrives, and how long its longest output is; whether it is over,
        # and since when.
        self._arrival = np.zeros(self._slots)
        self._output = np.zeros(self._slots, np.int64)
        self._over = np.zeros(self._slots, bool)
        self._ended = np.zeros(self._slots)
        self._last_arrival = 0.0
        self._stamps = Stamps(self._slots, program.together)
        self._times, self._latencies = times, Latencies()
        self._rejected = 0

    @property
    def is_last(self) -> bool:
        """Whether no request is left on the host."""
        return self._next is None

    @property
    def most_admitted(self) -> int:
        """Requests of the queue that a step can admit at most, with all rows free.

        One that was preempted comes back with those of its sequences that go on.
        """
        config = self._program.config
        return config.max_seqs // (self._n if config.groups and self._alike else 1)

    @property
    def is_done(self) -> bool:
        """Whether all requests have come, and ended."""
        return self.is_last and bool((self._request < 0).all())

    def refill(self) -> Entry | None:
        """Returns requests for slots that are free; None if there are none to enter."""
        free = np.flatnonzero(self._request < 0)
        taken: list[Trace] = []
        room = len(free)
        while self._next is not None and room >= self._next.n:
            count = min(room // self._next.n, len(self._next))
            taken.append(self._next.part(0, count))
            room -= count * self._next.n
            rest = self._next.part(count, len(self._next))
            self._next = rest if len(rest) else next(self._source, None)
        if not taken:
            return None
        return self._entry(free, taken)

    def _entry(self, free: np.ndarray, taken: list[Trace]) -> Entry:
        n = taken[0].n
        arrival, prompt, output = (
            np.concatenate(x) for x in zip(*(t[:3] for t in taken))
        )
        self._check(arrival, prompt, output)
        self._alike &= bool((output == output[:, :1]).all())
        count = len(arrival)
        slots = free[: count * n]
        numbers = self._number + np.arange(count)
        self._number += count
        self._request[slots] = np.repeat(numbers, n)
        self._arrival[slots] = np.repeat(arrival, n)
        self._output[slots] = np.repeat(output.max(axis=1), n)
        limit = self._config.max_model_len
        prompt_of = np.repeat(prompt, n)
        outputs = output.reshape(-1)
        reserved = [
            self._reserve(int(p), int(o), limit) for p, o in zip(prompt_of, outputs)
        ]
        grouped = self._program.config.groups
        leaders = slots[::n] if grouped else slots
        group = np.repeat(slots[::n], n) if grouped else slots
        rows = self._slots

        def pad(values: np.ndarray | list[int], fill: int) -> jax.Array:
            padded = np.full(rows, fill, np.int32)
            padded[: len(values)] = values
            return jnp.array(padded)

        times = np.zeros(rows)
        times[: len(slots)] = NEVER if self._closed else np.repeat(arrival, n)
        return Entry(
            slots=pad(slots, self._null),
            leaders=pad(leaders, self._null),
            count=jnp.int32(len(leaders)),
            prompt_len=pad(prompt_of, 0),
            max_len=pad(prompt_of + outputs, 0),
            reserved_len=pad(reserved, 0),
            arrival_order=pad(np.repeat(numbers, n), 0),
            group=pad(group, self._null),
            arrival=make_times(times),
            prefix_row=jnp.int32(self._prefix_row),
            names=pack_names(
                self._program.config, [t.names for t in taken], numbers, n, rows
            ),
            beams=self._searches.beams_of(taken, rows),
        )

    def _check(
        self, arrival: np.ndarray, prompt: np.ndarray, output: np.ndarray
    ) -> None:
        limit = self._config.max_model_len
        longest = prompt + output.max(axis=1)
        if len(longest) and longest.max() > limit:
            which = self._number + int(longest.argmax())
            raise UserError(
                f"request {which} of the trace has {longest.max()} tokens, and "
                f"engine.max_model_len is {limit}; raise it or leave the request out"
            )
        if prompt.min(initial=limit) < self._prefix_len:
            which = self._number + int(prompt.argmin())
            raise UserError(
                f"request {which} of the trace has a prompt of {prompt.min()} tokens, "
                f"and prefix_len is {self._prefix_len}; all prompts begin with it"
            )
        if self._closed and output.shape[1] > 1 and not self._program.config.groups:
            raise UserError(
                f"requests are for {output.shape[1]} sequences that are served apart; "
                "in a closed loop they must share: turn engine.sharing on"
            )
        if not self._closed:
            if (np.diff(arrival, prepend=self._last_arrival) < 0).any():
                raise UserError("the requests of a trace must be in order of arrival")
            self._last_arrival = arrival[-1]

    def read(self, state: SimulatorState) -> int:
        """Reads requests that have ended; returns how many had."""
        self._stamps.read(state)
        status = np.asarray(state.scheduler.requests.status)[: self._slots]
        over = status >= RequestStatus.FINISHED_LENGTH
        if self._program.together:
            # Those of a batch that is not over wait for the others.
            sequences = state.scheduler.sequences
            waiting = np.asarray(sequences.request)
            over[waiting[waiting < self._slots]] = False
        over &= self._request >= 0
        slots = np.flatnonzero(over)
        # Batches that end together are whole here: their members are over at once.
        fresh = np.flatnonzero(over & ~self._over)
        self._ended[fresh] = self._stamps.ends_of(state, fresh)
        self._over[fresh] = True
        # Of several sequences, a request ends with the last.
        numbers, place, parts = np.unique(
            self._request[slots], return_inverse=True, return_counts=True
        )
        slots = slots[(parts == self._n)[place]]
        slots = slots[np.argsort(self._request[slots], kind="stable")]
        slots = slots.reshape(-1, self._n)
        numbers, leader = self._request[slots[:, 0]], slots[:, 0]
        first = self._stamps.first_token[slots].min(axis=1)
        ended = self._ended[slots].max(axis=1)
        rejected = (status[slots] == RequestStatus.REJECTED).any(axis=1)
        first[rejected] = ended[rejected] = np.nan
        arrival = self._arrival[leader]
        if self._closed:
            arrival = to_seconds(state.arrival)[leader]
        columns = arrival, first, ended, self._output[leader]
        self._latencies.add(*columns)
        if self._times is not None:
            self._times.add(numbers, *columns)
        self._over[slots] = False
        self._rejected += int(rejected.sum())
        self._request[slots] = -1
        return len(slots)

    def ends(self) -> np.ndarray:
        """Returns when requests had ended, f64[M]; infinite for those that have not.

        Those after the first M have not either.
        """
        assert self._times is not None
        ended = self._times.columns[2, : self._number]
        return np.where(np.isnan(ended), np.inf, ended)

    def results(
        self, state: SimulatorState, totals: np.ndarray, log: list[np.ndarray]
    ) -> Results:
        """Returns all that was read."""
        config = self._program.config
        columns = np.zeros((4, 0))
        if self._times is not None:
            slots = np.flatnonzero(self._request >= 0)
            never = np.full(len(slots), np.inf)
            unended = self._arrival[slots], never, never, self._output[slots]
            self._times.add(self._request[slots], *unended)
            columns = self._times.columns[:, : self._number]
        arrival, first, ended, output = columns
        return Results(
            arrival=arrival,
            first_token=first,
            ended=ended,
            output_len=output.astype(np.int64),
            latencies=self._latencies,
            rejected=self._rejected,
            seconds=float(to_seconds(state.now)),
            steps=int(state.scheduler.iteration),
            means=summarise_totals(totals, config.num_blocks * config.block_size),
            log=np.concatenate(log) if log else np.zeros((0, 0)),
            gave_up=not self.is_done,
        )

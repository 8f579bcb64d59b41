"""The host's side of a simulation: requests go in, the times of those that ended out.

A trace with as many requests as there are slots runs in one go on the device. A longer
one streams through: whenever the device has come to where the next arrival is not known
to it, the host reads what has ended and puts new requests into those slots.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import UserError
from experiments.simulator.beams import EnteringBeams, Searches, enter_beams
from experiments.simulator.clock import Time, make_times, to_seconds
from experiments.simulator.simulate import (
    CostModel,
    SimulatorProgram,
    SimulatorState,
    simulate_steps,
)
from experiments.simulator.totals import NUM_TOTALS, summarise_totals
from experiments.simulator.trace import Trace
from paged_jax.config import EngineConfig, StepConfig
from paged_jax.memory_managers import MANAGERS
from paged_jax.preempt import VictimRule, latest_arrival
from paged_jax.requests import RequestStatus, init_queue, push_back
from paged_jax.submit import init_scheduler

# Steps between two looks of the host, so that Ctrl-C is heard, and float32 sums stay
# short.
_PIECE = 4096
_NEVER = np.iinfo(np.int32).max


class Results(NamedTuple):
    """What became of a trace.

    Attributes:
      arrival: f64[N]. Seconds, of the requests in the order of their arrival.
      first_token: f64[N]. When the first token was there; NaN if rejected.
      ended: f64[N]. When all sequences were done; NaN if rejected.
      output_len: i64[N]. Tokens generated, of the longest sequence.
      rejected: requests that can never fit.
      seconds: when the last one ended.
      steps: in all.
      means: over the steps that count, see `totals.summarise_totals`.
      log: f32[G, F], rows of the step log, if they were asked for.
    """

    arrival: np.ndarray
    first_token: np.ndarray
    ended: np.ndarray
    output_len: np.ndarray
    rejected: int
    seconds: float
    steps: int
    means: dict[str, float]
    log: np.ndarray


class _Entry(NamedTuple):
    """Requests to put into slots, padded to R rows with the null request's.

    Attributes:
      slots: i32[R].
      leaders: i32[R]. Of those, the ones that will stand in the queue, in order.
      count: i32[]. How many of `leaders` are valid.
      prompt_len: i32[R].
      max_len: i32[R].
      reserved_len: i32[R].
      arrival_order: i32[R].
      group: i32[R].
      arrival: Time[R].
      beams: of beam searches; () where there are none.
    """

    slots: jax.Array
    leaders: jax.Array
    count: jax.Array
    prompt_len: jax.Array
    max_len: jax.Array
    reserved_len: jax.Array
    arrival_order: jax.Array
    group: jax.Array
    arrival: Time
    beams: EnteringBeams | tuple[()]


def simulator_config(config: EngineConfig, log_length: int = 1) -> StepConfig:
    """Returns the static settings of a simulation: no stop ids, no logprobs.

    Args:
      config: as the engine's; what concerns the model is not looked at.
      log_length: rows of the step log that are kept; 1: only sums are.

    Raises:
      UserError: settings that need the tokens themselves.
    """
    if config.prefix_caching:
        raise UserError(
            "engine.prefix_caching is on; a simulation has no tokens to find by"
        )
    return dataclasses.replace(
        config.step_config(), max_stop_ids=0, max_logprobs=0, log_length=log_length
    )


def make_program(
    config: EngineConfig,
    costs: CostModel,
    *,
    victim: VictimRule = latest_arrival,
    together: bool = False,
    log_length: int = 1,
) -> SimulatorProgram:
    """Returns the static part of a simulation; see `SimulatorProgram`."""
    return SimulatorProgram(
        simulator_config(config, log_length),
        MANAGERS[config.memory].on_device(),
        costs,
        victim,
        together,
    )


def init_simulator(
    config: EngineConfig,
    program: SimulatorProgram,
    window: tuple[int, int],
    searches: Searches,
) -> SimulatorState:
    """Returns a state with nothing in it; every leaf is a buffer of its own."""
    # One position: what lies past it is dropped, and nothing reads tokens.
    static = dataclasses.replace(program.config, max_model_len=1)
    rows = static.num_requests + 1
    start = make_times(np.zeros(rows))
    state = SimulatorState(
        scheduler=init_scheduler(
            static, MANAGERS[config.memory], config.batching == "static"
        ),
        now=make_times(0.0),
        arrival=start,
        first_token=start,
        ended=start,
        pending=init_queue(static.num_requests),
        window=jnp.array(window, jnp.int32),
        totals=jnp.zeros(NUM_TOTALS, jnp.float32),
        ancestry=searches.on_device(static.num_requests),
    )
    return jax.tree.map(lambda x: x.copy(), state)


@functools.partial(jax.jit, donate_argnums=0)
def _enter(state: SimulatorState, new: _Entry) -> SimulatorState:
    """Puts requests into slots whose requests have ended; they are pending."""
    requests, slots = state.scheduler.requests, new.slots

    def put(old: jax.Array, values: jax.Array | int) -> jax.Array:
        return old.at[slots].set(values)

    group = requests.group
    if requests.grouped:
        group = put(group, new.group)
    requests = dataclasses.replace(
        requests,
        length=put(requests.length, new.prompt_len),
        prompt_len=put(requests.prompt_len, new.prompt_len),
        max_len=put(requests.max_len, new.max_len),
        reserved_len=put(requests.reserved_len, new.reserved_len),
        arrival=put(requests.arrival, new.arrival_order),
        prefix_row=put(requests.prefix_row, -1),
        group=group,
        status=put(requests.status, RequestStatus.EMPTY),
        timeline=put(requests.timeline, -1),
    )
    beams, ancestry = state.scheduler.beams, state.ancestry
    if isinstance(new.beams, EnteringBeams):
        beams, ancestry = enter_beams(beams, ancestry, slots, new.beams)
    return dataclasses.replace(
        state,
        scheduler=dataclasses.replace(state.scheduler, requests=requests, beams=beams),
        ancestry=ancestry,
        arrival=state.arrival.put(slots, new.arrival),
        pending=push_back(state.pending, new.leaders, new.count),
    )


_run = jax.jit(simulate_steps, static_argnums=0, donate_argnums=1)


def simulate(
    config: EngineConfig,
    trace: Trace | Iterable[Trace],
    program: SimulatorProgram,
    *,
    window: tuple[int, int] = (0, _NEVER),
    until: float = math.inf,
    recorded: Sequence[np.ndarray] | None = None,
) -> Results:
    """Serves a trace.

    Args:
      config: settings of the engine; `max_requests` slots for sequences that have
        arrived and not ended, and for those that come next.
      trace: the requests; or pieces of them, as they come.
      program: from `make_program`, of the same settings.
      window: seconds from which on, and up to which, steps count in the means.
      until: seconds after which the run may end, at the host's next look: no step
        before them is missing. What has not ended then has infinite times, and what
        has not come yet is left out.
      recorded: of beam searches, the parents that they repeat, i8[steps, k] each; None:
        those that come with the project.

    Raises:
      UserError: requests that are too long, or too many at once for the slots; beam
        searches that the program is not for, or of which none are recorded.
    """
    source = [trace] if isinstance(trace, Trace) else trace
    searches = Searches(config.max_beam_width, recorded)
    host = _Host(config, program, (piece for piece in source if len(piece)), searches)
    state = init_simulator(config, program, window, searches)
    totals = np.zeros(NUM_TOTALS)
    log: list[np.ndarray] = []
    keeps_log = program.config.log_length > 1
    most = program.config.log_length if keeps_log else _PIECE
    stuck = False
    while True:
        entry = host.refill()
        if entry is not None:
            state = _enter(state, entry)
        elif stuck:
            raise UserError(
                f"engine.max_requests is {config.max_requests}, and as many sequences "
                "have arrived and not ended while more arrive; raise it"
            )
        state = _run(program, state, jnp.int32(most), jnp.bool_(host.is_last))
        totals += np.asarray(state.totals, np.float64)
        # Buffers of their own: the state is donated.
        state = dataclasses.replace(state, totals=jnp.zeros(NUM_TOTALS, jnp.float32))
        if keeps_log:
            scheduler = state.scheduler
            log.append(np.array(scheduler.log[: int(scheduler.log_count)]))
            state = dataclasses.replace(
                state, scheduler=dataclasses.replace(scheduler, log_count=jnp.int32(0))
            )
        ended = host.read(state)
        steps = int(state.scheduler.iteration)
        if host.is_done or float(to_seconds(state.now)) >= until:
            break
        stuck = not ended and steps == host.steps
        host.steps = steps
    return host.results(state, totals, np.concatenate(log) if log else np.zeros((0, 0)))


class _Host:
    """Which request is in which slot, and what was read of those that have ended."""

    def __init__(
        self,
        config: EngineConfig,
        program: SimulatorProgram,
        source: Iterator[Trace],
        searches: Searches,
    ):
        self._config, self._source, self._searches = config, source, searches
        self._reserve = MANAGERS[config.memory].reserve
        self._program = program
        self._null = program.config.num_requests
        self._slots = config.max_requests
        self._next: Trace | None = next(source, None)
        self._number = 0  # of the next request
        # Of each slot, the request and the sequence that it holds; -1: it is free.
        self._request = np.full(self._slots, -1)
        self._columns: list[list[np.ndarray]] = [[], [], []]
        self.steps = 0
        # When requests had their first token, and ended; with room to spare.
        self._first, self._ended = np.full(self._slots, np.inf), np.zeros(self._slots)
        self._rejected = 0

    @property
    def is_last(self) -> bool:
        """Whether no request is left on the host."""
        return self._next is None

    @property
    def is_done(self) -> bool:
        """Whether all requests have come, and ended."""
        return self.is_last and bool((self._request < 0).all())

    def refill(self) -> _Entry | None:
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

    def _entry(self, free: np.ndarray, taken: list[Trace]) -> _Entry:
        n = taken[0].n
        arrival, prompt, output = (
            np.concatenate(x) for x in zip(*(t[:3] for t in taken))
        )
        self._check(arrival, prompt, output)
        count = len(arrival)
        slots = free[: count * n]
        numbers = self._number + np.arange(count)
        self._number += count
        self._request[slots] = np.repeat(numbers, n)
        for column, values in zip(self._columns, (arrival, prompt, output.max(axis=1))):
            column.append(values)
        if self._number > len(self._first):
            more = self._number  # twice as many: in all, each is copied once or twice
            self._first = np.append(self._first, np.full(more, np.inf))
            self._ended = np.append(self._ended, np.zeros(more))
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
        times[: len(slots)] = np.repeat(arrival, n)
        return _Entry(
            slots=pad(slots, self._null),
            leaders=pad(leaders, self._null),
            count=jnp.int32(len(leaders)),
            prompt_len=pad(prompt_of, 0),
            max_len=pad(prompt_of + outputs, 0),
            reserved_len=pad(reserved, 0),
            arrival_order=pad(np.repeat(numbers, n), 0),
            group=pad(group, self._null),
            arrival=make_times(times),
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
        last = self._columns[0][-1][-1] if self._columns[0] else 0.0
        if (np.diff(arrival, prepend=last) < 0).any():
            raise UserError("the requests of a trace must be in order of arrival")

    def read(self, state: SimulatorState) -> int:
        """Reads requests that have ended; returns how many sequences had."""
        status = np.asarray(state.scheduler.requests.status)[: self._slots]
        over = status >= RequestStatus.FINISHED_LENGTH
        if self._program.together:
            # Those of a batch that is not over wait for the others.
            sequences = state.scheduler.sequences
            waiting = np.asarray(sequences.request)
            over[waiting[waiting < self._slots]] = False
        over &= self._request >= 0
        slots = np.flatnonzero(over)
        numbers = self._request[slots]
        first, ended = to_seconds(state.first_token), to_seconds(state.ended)
        rejected = status[slots] == RequestStatus.REJECTED
        np.maximum.at(self._ended, numbers, ended[slots])
        np.minimum.at(self._first, numbers, first[slots])
        for times in (self._first, self._ended):
            times[numbers[rejected]] = np.nan
        self._rejected += int(rejected.sum())
        self._request[slots] = -1
        return len(slots)

    def results(
        self, state: SimulatorState, totals: np.ndarray, log: np.ndarray
    ) -> Results:
        """Returns all that was read."""
        arrival, _, output = (
            np.concatenate(c) if c else np.zeros(0) for c in self._columns
        )
        config = self._program.config
        first, ended = self._first[: self._number], self._ended[: self._number]
        ended[self._request[self._request >= 0]] = np.inf
        return Results(
            arrival=arrival,
            first_token=first,
            ended=ended,
            output_len=output,
            rejected=self._rejected,
            seconds=float(to_seconds(state.now)),
            steps=int(state.scheduler.iteration),
            means=summarise_totals(totals, config.num_blocks * config.block_size),
            log=log,
        )

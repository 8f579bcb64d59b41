"""The host's side of a simulation: requests go in, the times of those that ended out.

A trace with as many requests as there are slots runs in one go on the device. A longer
one streams through: whenever the device has come to where the next arrival is not known
to it, and might matter, the host reads what has ended and puts new requests into those
slots. In an overload they come late, behind many others: as they would anyway.
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
from experiments.simulator.block_names import (
    EnteringNames,
    init_names,
    pack_names,
    put_names,
)
from experiments.simulator.clock import Time, make_times, to_seconds
from experiments.simulator.closed_loop import (
    ClosedLoop,
    check_clients,
    init_clients,
    send,
)
from experiments.simulator.giving_up import all_fit, least_latency
from experiments.simulator.registered_prefix import (
    check_prefix,
    enter_prefix,
    row_of_prefix,
)
from experiments.simulator.request_times import Latencies, RequestTimes
from experiments.simulator.simulate import (
    CostModel,
    FixedCosts,
    SimulatorProgram,
    SimulatorState,
    simulate_steps,
)
from experiments.simulator.stamps import Stamps
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

    Columns of requests are empty if they were not kept.

    Attributes:
      arrival: f64[N]. Seconds, of the requests in the order of their arrival.
      first_token: f64[N]. When the first token was there; NaN if rejected.
      ended: f64[N]. When all sequences were done; NaN if rejected.
      output_len: i64[N]. Tokens generated, of the longest sequence.
      latencies: means and quantiles.
      rejected: requests that can never fit.
      seconds: when the last one ended.
      steps: in all.
      means: over the steps that count, see `totals.summarise_totals`.
      log: f32[G, F], rows of the step log, if they were asked for.
      gave_up: whether the run was cut short, see `simulate`. What had not ended then
        has infinite times, and what had not arrived is missing.
    """

    arrival: np.ndarray
    first_token: np.ndarray
    ended: np.ndarray
    output_len: np.ndarray
    latencies: Latencies
    rejected: int
    seconds: float
    steps: int
    means: dict[str, float]
    log: np.ndarray
    gave_up: bool = False


class _Entry(NamedTuple):
    """Requests to put into slots, padded to R rows with the null request's.

    Attributes:
      slots: i32[R].
      leaders: i32[R]. Of those, the ones that will stand in the queue, in order.
      count: i32[]. How many of `leaders` are valid.
      prompt_len, max_len, reserved_len, arrival_order, group: i32[R].
      arrival: Time[R].
      prefix_row: i32[]. Row of the registered prefix; -1 without one.
      names: of the blocks of prompts; () without a prefix cache.
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
    prefix_row: jax.Array
    names: EnteringNames | tuple[()]
    beams: EnteringBeams | tuple[()]


def simulator_config(config: EngineConfig, log_length: int = 1) -> StepConfig:
    """Returns the static settings of a simulation: no stop ids, no logprobs.

    Args:
      config: as the engine's; what concerns the model is not looked at.
      log_length: rows of the step log that are kept; 1: only sums are.
    """
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
    """Returns what a simulated step does; see `SimulatorProgram`.

    Costs that are no pytree, such as a plain function, become a part of the program.
    """
    if jax.tree.leaves(costs) == [costs]:
        costs = FixedCosts(costs)
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
    searches: Searches | None = None,
    closed: ClosedLoop | tuple[()] = (),
) -> SimulatorState:
    """Returns a state with nothing in it; every leaf is a buffer of its own."""
    searches = searches or Searches(config.max_beam_width, None)
    # No room for tokens: nothing reads them. A beam search writes some all the same.
    room = int(program.config.max_beam_width > 1)
    static = dataclasses.replace(program.config, max_model_len=room)
    scheduler = init_scheduler(
        static, MANAGERS[config.memory], config.batching == "static"
    )
    if static.prefix_caching:
        scheduler = init_names(static, scheduler)
    state = SimulatorState(
        scheduler=scheduler,
        now=make_times(0.0),
        arrival=make_times(np.zeros(static.num_requests + 1)),
        ends=make_times(np.zeros(max(static.log_length, _PIECE))),
        pending=init_queue(static.num_requests),
        window=jnp.array(window, jnp.int32),
        totals=jnp.zeros(NUM_TOTALS, jnp.float32),
        closed=closed,
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
    tokens = requests.tokens
    if isinstance(new.names, EnteringNames):
        tokens = put_names(tokens, slots, new.names, new.prompt_len)
    closed = state.closed
    if isinstance(closed, ClosedLoop):
        closed = dataclasses.replace(closed, unsent=closed.unsent + new.count)
    requests = dataclasses.replace(
        requests,
        tokens=tokens,
        length=put(requests.length, new.prompt_len),
        prompt_len=put(requests.prompt_len, new.prompt_len),
        max_len=put(requests.max_len, new.max_len),
        reserved_len=put(requests.reserved_len, new.reserved_len),
        arrival=put(requests.arrival, new.arrival_order),
        prefix_row=put(requests.prefix_row, new.prefix_row),
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
        closed=closed,
    )


_run = jax.jit(simulate_steps, donate_argnums=1)
_send = jax.jit(send, static_argnums=(1, 2), donate_argnums=0)


def simulate(
    config: EngineConfig,
    trace: Trace | Iterable[Trace],
    program: SimulatorProgram,
    *,
    window: tuple[int, int] = (0, _NEVER),
    prefix_len: int = 0,
    clients: int = 0,
    think_s: float = 0.0,
    keep_requests: bool = True,
    until: float = math.inf,
    give_up_above: float | None = None,
    recorded: Sequence[np.ndarray] | None = None,
) -> Results:
    """Serves a trace.

    Args:
      config: settings of the engine; `max_requests` slots for sequences that run, for
        `max_seqs` requests that wait, and for those that come next. More may wait; of
        them, `means["mean_waiting"]` counts those that have slots.
      trace: the requests; or pieces of them, as they come.
      program: from `make_program`, of the same settings.
      window: seconds from which on, and up to which, steps count in the means.
      prefix_len: tokens that all prompts begin with. Its whole blocks are computed
        once, before the clock starts, and shared by all (see `registered_prefix`). 0:
        none are.
      clients: of a closed loop, which send the requests of the trace whenever their
        last one is done (see `closed_loop`); times of arrival are not looked at. 0:
        requests come at their times.
      think_s: seconds that a client waits before it sends the next one.
      keep_requests: whether the columns of the results are filled, 32 bytes a request.
      until: seconds after which the run may end, at the host's next look: no step
        before them is missing. What has not ended then has infinite times, and what
        has not come yet is left out.
      give_up_above: seconds a token; ends the run when the mean of latency / output
        tokens is sure to come out above. Not with pieces, whose number is not known,
        nor where a request may be rejected, nor without the requests' times.
      recorded: of beam searches, the parents that they repeat, i8[steps, k] each; None:
        those that come with the project.

    Raises:
      UserError: requests that are too long, or too many at once for the slots; beam
        searches that the program is not for, or of which none are recorded; settings
        that do not go with the trace.
    """
    source = [trace] if isinstance(trace, Trace) else trace
    closed = ()
    if clients:
        check_clients(clients, think_s)
        closed = init_clients(clients, think_s)
    may_give_up = isinstance(trace, Trace) and all_fit(config) and not clients
    searches = Searches(config.max_beam_width, recorded)
    state = init_simulator(config, program, window, searches, closed)
    totals = np.zeros(NUM_TOTALS)
    log: list[np.ndarray] = []
    keeps_log = program.config.log_length > 1
    most = program.config.log_length if keeps_log else _PIECE
    prefix_row = -1
    if prefix_len:
        check_prefix(config, prefix_len)
        whole = prefix_len - prefix_len % config.block_size
        if whole:
            state, prefix_row = _hold_prefix(program, state, whole, log)
    host = _Host(
        config,
        program,
        (piece for piece in source if len(piece)),
        searches,
        prefix=(prefix_len, prefix_row),
        closed=clients > 0,
        times=RequestTimes() if keep_requests else None,
    )
    steps, stuck, started = 0, False, False
    while not host.is_done:
        entry = host.refill()
        if entry is not None:
            state = _enter(state, entry)
            if clients:
                state = _send(state, program.together, started)
                started = True
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
            state = _take_log(state, log)
        before, steps = steps, int(state.scheduler.iteration)
        stuck = host.read(state) == 0 and steps == before
        now = float(to_seconds(state.now))
        if now >= until:
            break
        if may_give_up and keep_requests and give_up_above is not None:
            if least_latency(trace, host.ends(), now) > give_up_above:
                break
    return host.results(state, totals, log)


def _take_log(state: SimulatorState, log: list[np.ndarray]) -> SimulatorState:
    """Moves the rows of the log to the host."""
    scheduler = state.scheduler
    log.append(np.array(scheduler.log[: int(scheduler.log_count)]))
    return dataclasses.replace(
        state, scheduler=dataclasses.replace(scheduler, log_count=jnp.int32(0))
    )


def _hold_prefix(
    program: SimulatorProgram,
    state: SimulatorState,
    num_tokens: int,
    log: list[np.ndarray],
) -> tuple[SimulatorState, int]:
    """Computes a prefix in steps that do not count; returns the row that holds it."""
    config = program.config
    scheduler = enter_prefix(config, state.scheduler, num_tokens)
    state = dataclasses.replace(state, scheduler=scheduler)
    # A token a step at least, and then it is held and nothing is left to do.
    state = _run(program, state, jnp.int32(num_tokens + 1), jnp.bool_(True))
    if config.log_length > 1:
        state = _take_log(state, log)
    row = row_of_prefix(config, state.scheduler)
    return dataclasses.replace(
        state,
        now=make_times(0.0),
        totals=jnp.zeros(NUM_TOTALS, jnp.float32),
    ), row


class _Host:
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
        times[: len(slots)] = _NEVER if self._closed else np.repeat(arrival, n)
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

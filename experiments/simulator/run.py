"""A run of a simulation: requests go in, the times of those that ended come out.

A trace with as many requests as there are slots needs nothing of the host until its
end. A longer one streams through: whenever the device has come to where the next
arrival is not known to it, and might matter, the host reads what has ended and puts new
requests into those slots. In an overload they come late, behind many others: as they
would anyway.

All the same the compiled loop returns every few thousand steps, and is called again:
then Ctrl-C is heard, a run without hope given up, the times of steps read before others
take their place, and sums in float32 added to longer ones in float64.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import UserError
from experiments.simulator.beams import Searches
from experiments.simulator.block_names import (
    init_names,
)
from experiments.simulator.clock import NEVER, make_times, to_seconds
from experiments.simulator.closed_loop import (
    ClosedLoop,
    check_clients,
    init_clients,
    send,
)
from experiments.simulator.entry import enter
from experiments.simulator.giving_up import all_fit, least_latency
from experiments.simulator.registered_prefix import (
    check_prefix,
    enter_prefix,
    row_of_prefix,
)
from experiments.simulator.request_slots import RequestSlots
from experiments.simulator.request_times import RequestTimes
from experiments.simulator.results import Results
from experiments.simulator.simulate import (
    CostModel,
    FixedCosts,
    SimulatorProgram,
    SimulatorState,
    simulate_steps,
)
from experiments.simulator.totals import NUM_TOTALS
from experiments.simulator.trace import Trace
from paged_jax.config import EngineConfig, StepConfig
from paged_jax.memory_managers import MANAGERS
from paged_jax.new_arrays import on_device, zeros
from paged_jax.preempt import VictimRule, latest_arrival
from paged_jax.requests import init_queue
from paged_jax.submit import init_scheduler

# Steps between two looks of the host, at most, if no log is kept (its length, if one
# is). The times of so many steps are kept on the device.
_PIECE = 4096


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
    return SimulatorState(
        scheduler=scheduler,
        now=make_times(0.0),
        arrival=make_times(np.zeros(static.num_requests + 1)),
        ends=make_times(np.zeros(max(static.log_length, _PIECE))),
        pending=init_queue(static.num_requests),
        window=on_device(np.array(window, np.int32)),
        totals=zeros(NUM_TOTALS, np.float32),
        closed=closed,
        ancestry=searches.on_device(static.num_requests),
    )


_run = jax.jit(simulate_steps, donate_argnums=1)
_send = jax.jit(send, static_argnums=(1, 2), donate_argnums=0)


def simulate(
    config: EngineConfig,
    trace: Trace | Iterable[Trace],
    program: SimulatorProgram,
    *,
    window: tuple[int, int] = (0, NEVER),
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
    whole = None
    if isinstance(trace, Trace) and all_fit(config) and keep_requests and not clients:
        whole = trace
    searches = Searches(config.max_beam_width, recorded)
    state = init_simulator(config, program, window, searches, closed)
    totals = np.zeros(NUM_TOTALS)
    log: list[np.ndarray] = []
    keeps_log = program.config.log_length > 1
    most = program.config.log_length if keeps_log else _PIECE
    prefix_row = -1
    if prefix_len:
        check_prefix(config, prefix_len)
        shared = prefix_len - prefix_len % config.block_size
        if shared:
            state, prefix_row = _hold_prefix(program, state, shared, log)
    host = RequestSlots(
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
            state = enter(state, entry)
            if clients:
                state = _send(state, program.together, started)
                started = True
        elif stuck:
            raise UserError(
                f"engine.max_requests is {config.max_requests}, and as many sequences "
                "have arrived and not ended while more arrive; raise it"
            )
        state = _run(
            program,
            state,
            jnp.int32(most),
            jnp.bool_(host.is_last),
            jnp.int32(host.most_admitted),
        )
        totals += np.asarray(state.totals, np.float64)
        # Buffers of their own: the state is donated.
        state = dataclasses.replace(state, totals=zeros(NUM_TOTALS, np.float32))
        if keeps_log:
            state = _take_log(state, log)
        before, steps = steps, int(state.scheduler.iteration)
        stuck = host.read(state) == 0 and steps == before
        now = float(to_seconds(state.now))
        if now >= until:
            break
        if whole is not None and give_up_above is not None:
            if least_latency(whole, host.ends(), now) > give_up_above:
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
    state = _run(
        program, state, jnp.int32(num_tokens + 1), jnp.bool_(True), jnp.int32(1)
    )
    if config.log_length > 1:
        state = _take_log(state, log)
    row = row_of_prefix(config, state.scheduler)
    return dataclasses.replace(
        state,
        now=make_times(0.0),
        totals=zeros(NUM_TOTALS, np.float32),
    ), row

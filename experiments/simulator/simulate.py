"""A simulated step, and the loop over them: the library's scheduler, and no model.

What the engine does with a plan (grow, copy, preempt, end) is done by the same code;
in place of the forward pass a cost model says how long the step takes.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.simulator.beams import Ancestry, repeat_step
from experiments.simulator.block_names import count_found, keep_names
from experiments.simulator.clock import Time, advance, later, not_after
from experiments.simulator.closed_loop import ClosedLoop, idle_clients, send
from experiments.simulator.totals import add_step
from experiments.simulator.work import Work, work_of
from paged_jax.commit import commit
from paged_jax.config import StepConfig
from paged_jax.memory_managers import MemoryManager
from paged_jax.preempt import VictimRule, latest_arrival
from paged_jax.requests import RequestStatus, WaitingQueue, pop, push_back
from paged_jax.sampling import Samples
from paged_jax.scheduler import Plan, schedule
from paged_jax.state import SchedulerState, has_work
from paged_jax.step_log import write_log

# (work of a step) -> seconds, f32[]; a pytree, whose leaves are numbers.
CostModel = Callable[[Work], jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=["costs"]
)
@dataclasses.dataclass(frozen=True)
class FixedCosts:
    """Costs that are no pytree, as a part of the program.

    Attributes:
      costs: (work of a step) -> seconds; can be hashed.
    """

    costs: Callable[[Work], jax.Array]

    def __call__(self, work: Work) -> jax.Array:
        """Returns the seconds of a step, f32[]."""
        return self.costs(work)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["costs"],
    meta_fields=["config", "manager", "victim", "together"],
)
@dataclasses.dataclass(frozen=True)
class SimulatorProgram:
    """What a simulated step does: all of it static, but for the numbers of the costs.

    Programs that differ in those alone share a compiled loop.

    Attributes:
      config: static settings, from `run.simulator_config`.
      manager: the memory manager, `on_device()`.
      costs: how long a step takes.
      victim: which request to preempt when blocks run out.
      together: whether a static batch returns its requests all at once, when its
        longest has ended, and not each at its end.
    """

    config: StepConfig
    manager: MemoryManager
    costs: CostModel
    victim: VictimRule = latest_arrival
    together: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SimulatorState:
    """The scheduler's state, and times.

    Attributes:
      scheduler: as in the engine, without tokens; or, with a prefix cache, a name for
        each block in their place (see `block_names`).
      now: the clock.
      arrival: Time[R + 1]. When each request arrives; it has a slot before that.
      ends: Time[K]. When each of the last K steps ended: step i stands at i % K. So
        the steps that `Requests.timeline` names become times.
      pending: slots of requests that have not arrived, in order of arrival; of a group
        the leader's.
      window: i32[2]. Seconds from which on, and up to which, steps count.
      totals: f32[NUM_TOTALS]. Sums over the steps that count.
      closed: the clients of a closed loop; () if requests come when they come.
      ancestry: what beam searches repeat; () where there are none.
    """

    scheduler: SchedulerState
    now: Time
    arrival: Time
    ends: Time
    pending: WaitingQueue
    window: jax.Array
    totals: jax.Array
    closed: ClosedLoop | tuple[()] = ()
    ancestry: Ancestry | tuple[()] = ()


def _next_start(state: SimulatorState) -> Time:
    """Returns when the next step begins: now, or when something arrives to do."""
    idle = ~has_work(state.scheduler) & (state.pending.count > 0)
    waited = later(state.now, state.arrival[state.pending.first()])
    return jax.tree.map(lambda a, b: jnp.where(idle, a, b), waited, state.now)


def _arrive(config: StepConfig, state: SimulatorState) -> SimulatorState:
    """Queues what has arrived by now; waits for the next one if there is no work."""
    now = _next_start(state)
    scheduler, requests = state.scheduler, state.scheduler.requests

    def arrived(carry) -> jax.Array:
        pending, _, _ = carry
        return (pending.count > 0) & not_after(state.arrival[pending.first()], now)

    def enter(carry):
        pending, queue, status = carry
        slot = pending.first()
        if config.groups:
            # By its number too: a free slot may still name an earlier group.
            members = (requests.group == slot) & (
                requests.arrival == requests.arrival[slot]
            )
            status = jnp.where(members, RequestStatus.WAITING, status)
        else:
            status = status.at[slot].set(RequestStatus.WAITING)
        return pop(pending), push_back(queue, slot[None], jnp.int32(1)), status

    pending, queue, status = jax.lax.while_loop(
        arrived, enter, (state.pending, scheduler.queue, requests.status)
    )
    scheduler = dataclasses.replace(
        scheduler, queue=queue, requests=dataclasses.replace(requests, status=status)
    )
    return dataclasses.replace(state, scheduler=scheduler, now=now, pending=pending)


def _samples(
    config: StepConfig,
    scheduler: SchedulerState,
    plan: Plan,
    ancestry: Ancestry | tuple[()],
) -> Samples:
    """Returns tokens that end nothing: a request ends at its length."""
    rows = config.num_rows
    none = jnp.zeros((rows, 0))
    return Samples(
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, jnp.float32),
        none.astype(jnp.int32),
        none,
        repeat_step(ancestry, scheduler) if isinstance(ancestry, Ancestry) else (),
    )


def simulate_step(program: SimulatorProgram, state: SimulatorState) -> SimulatorState:
    """Takes one step: arrivals, schedule, commit, and the clock goes on.

    Args:
      program: what a step does.
      state: the state; donate it.
    """
    config, manager = program.config, program.manager
    state = _arrive(config, state)
    iteration = state.scheduler.iteration
    scheduler, plan = schedule(config, manager, state.scheduler, program.victim)
    work = work_of(config, scheduler, plan)
    # A step that only retires has no forward pass.
    seconds = jnp.where(work.tokens > 0, program.costs(work), 0.0)
    found = count_found(scheduler) if config.prefix_caching else (0.0, 0.0)
    line = scheduler.log_count
    scheduler = write_log(config, manager, scheduler, plan)
    row = scheduler.log[line]
    if config.log_length == 1:
        scheduler = dataclasses.replace(scheduler, log_count=jnp.int32(0))
    if config.groups:
        # The log has read the counts before forks change them, in place.
        scheduler = jax.lax.optimization_barrier(scheduler)
    samples = _samples(config, scheduler, plan, state.ancestry)
    planned = scheduler
    scheduler = commit(config, scheduler, plan, samples)
    if config.prefix_caching:
        scheduler = keep_names(planned, scheduler)
    counts = (work.tokens > 0) & (state.now.whole >= state.window[0])
    counts &= state.now.whole < state.window[1]
    now = advance(state.now, seconds)
    state = dataclasses.replace(
        state,
        scheduler=scheduler,
        now=now,
        ends=state.ends.put(iteration % state.ends.whole.shape[0], now),
        totals=add_step(state.totals, row, seconds, found, counts),
    )
    if isinstance(state.closed, ClosedLoop):
        state = send(state, program.together)
    return state


def simulate_steps(
    program: SimulatorProgram,
    state: SimulatorState,
    max_steps: jax.Array,
    last: jax.Array,
    most_admitted: jax.Array,
) -> SimulatorState:
    """Takes steps until nothing is left to do, or the host has to bring requests.

    Args:
      program: what a step does.
      state: the state; donate it.
      max_steps: i32[], at most so many.
      last: bool[], whether no more requests will come. If more do, the loop ends
        before a step by whose start another one may have arrived; but goes on while
        more wait than a step can admit, since those who come last stand behind them.
      most_admitted: i32[], requests of the queue that a step can admit at most.
    """

    def goes_on(carry) -> jax.Array:
        taken, state = carry
        pending = state.pending
        left = (pending.count > 0) | has_work(state.scheduler)
        if isinstance(state.closed, ClosedLoop):
            # A client that is idle now would have sent a request.
            known = idle_clients(state, program.together) == 0
            return (taken < max_steps) & left & (last | known)
        size = pending.slots.shape[0]
        horizon = state.arrival[
            pending.slots[(pending.head + pending.count - 1) % size]
        ]
        known = ~not_after(horizon, _next_start(state)) & (pending.count > 0)
        # If not, all that are pending have arrived.
        waiting = state.scheduler.queue.count + pending.count
        known |= waiting > most_admitted
        return (taken < max_steps) & left & (last | known)

    def body(carry):
        taken, state = carry
        return taken + 1, simulate_step(program, state)

    return jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))[1]

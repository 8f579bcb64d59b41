"""Watches an engine from outside: its state after each iteration, and what was done.

An engine's state is a value, and its scheduler a pure function of it. So nothing has to
be recorded inside: between two steps the state is read, and before a step the scheduler
is asked what it is about to do. Asking twice changes nothing; the engine's own log must
agree with the answer, or the recording is refused. An engine that nobody watches runs
the same compiled programs, and pays nothing.
"""

import enum
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from paged_jax import Engine, Field, SamplingParams
from paged_jax.block_pool import BlockPool
from paged_jax.config import StepConfig
from paged_jax.memory_managers import MANAGERS, MemoryManager
from paged_jax.requests import RequestStatus
from paged_jax.scheduler import schedule
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState

# Columns of the engine's log that are kept.
LOGGED = (
    Field.RUNNING,
    Field.WAITING,
    Field.TOKENS,
    Field.SAMPLED,
    Field.LIVE,
    Field.RESERVED,
    Field.RESERVATION,
    Field.INTERNAL,
    Field.FREE_BLOCKS,
    Field.PREEMPTED,
    Field.COPIED_BLOCKS,
)


class Asked(NamedTuple):
    """A request as the page shows it.

    Attributes:
      prompt: what the user wrote.
      tokens: the prompt that the engine gets.
      params: how its tokens are chosen.
      arrival: iteration before which it is submitted.
    """

    prompt: str
    tokens: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0


class Activity(enum.IntEnum):
    """What a sequence does in an iteration."""

    ABSENT = 0  # has not arrived
    WAITING = 1  # in the queue, or for another sequence to compute their prompt
    PREFILL = 2  # its prompt is computed, or what a preemption lost
    DECODE = 3  # one token
    PREEMPTED = 4  # in the queue again, its blocks given to others
    SWAPPED = 5  # its blocks are on the host
    HELD = 6  # it has ended, and still has its row and its blocks
    DONE = 7


class SequenceId(NamedTuple):
    """One of a request's sequences.

    Attributes:
      request: index of the request.
      number: which of its sequences.
    """

    request: int
    number: int


class Copy(NamedTuple):
    """A copy on write: block `source` was shared, and `sequence` got `target`."""

    source: int
    target: int
    sequence: int


class Moment(NamedTuple):
    """An engine after an iteration.

    Attributes:
      owner: i32[S]. Sequence of each row, an index into `Recorded.sequences`; -1.
      on_host: bool[S]. Whether a row's table names blocks of the host.
      length: i32[S]. Tokens in the cache.
      num_blocks: i32[S].
      table: i32[S, T].
      ref_count: i32[P]. Under contiguous memory, 1 for each block granted.
      num_free: blocks that can be granted.
      activity: i32[number of sequences].
      output: tokens generated so far, of each sequence.
      copies: copies on write of the iteration.
      dropped: blocks that were granted in the iteration and that nobody names after it:
        those of beams that do not go on.
      log: f32[len(LOGGED)].
    """

    owner: np.ndarray
    on_host: np.ndarray
    length: np.ndarray
    num_blocks: np.ndarray
    table: np.ndarray
    ref_count: np.ndarray
    num_free: int
    activity: np.ndarray
    output: list[tuple[int, ...]]
    copies: list[Copy]
    dropped: list[int]
    log: np.ndarray


class Recorded(NamedTuple):
    """All that was seen of a run.

    Attributes:
      config: settings of the engine.
      asked: the requests.
      sequences: their sequences, in order.
      moments: one of each iteration, and one of the step after them, in which the last
        sequences to end give back what they have.
    """

    config: Any
    asked: Sequence[Asked]
    sequences: list[SequenceId]
    moments: list[Moment]

    @property
    def iterations(self) -> int:
        """How many there were: the last moment is of none."""
        return max(0, len(self.moments) - 1)

    @property
    def final_tokens(self) -> list[tuple[int, ...]]:
        """Tokens of each sequence in the end."""
        return self.moments[-1].output if self.moments else []


class _Plan(NamedTuple):
    """What the scheduler says before a step: arrays of S rows, and the copies."""

    chunk: Any
    length: Any
    status: Any
    slot: Any
    table: Any
    copies: Any


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ask(config: StepConfig, manager: MemoryManager, state: SchedulerState) -> _Plan:
    """Returns what the scheduler is about to do; donates nothing."""
    after, plan = schedule(config, manager, state)
    rows = after.sequences
    return _Plan(
        plan.chunk,
        rows.length,
        rows.status,
        rows.request,
        rows.block_table,
        plan.copies,
    )


class Recorder:
    """Serves requests with a fresh engine, one iteration at a time."""

    def __init__(self, engine: Engine, asked: Sequence[Asked]):
        self._engine = engine
        self._asked = asked
        self._static = engine.config.step_config()
        self._manager = MANAGERS[engine.config.memory].on_device()
        self._sequences = [
            SequenceId(index, number)
            for index, one in enumerate(asked)
            for number in range(one.params.num_sequences)
        ]
        self._first = {s.request: i for i, s in reversed([*enumerate(self._sequences)])}
        # Of each request slot, the sequence in it; of each row, the one that has it.
        self._in_slot = np.full(self._static.num_requests + 1, -1)
        self._owner = np.full(self._static.num_rows, -1)
        self._output: list[tuple[int, ...]] = [()] * len(self._sequences)
        self._ended = np.zeros(len(self._sequences), bool)
        self._was_admitted = np.zeros(len(self._sequences), bool)
        self._named: frozenset[int] = frozenset()

    def run(self) -> Recorded:
        """Serves all requests to their ends."""
        moments = list(self._moments())
        return Recorded(self._engine.config, self._asked, self._sequences, moments)

    def _moments(self) -> Iterator[Moment]:
        engine, waiting = self._engine, [*self._asked]
        iteration = 0
        while waiting or engine.has_unfinished():
            arrived = 0
            while waiting and (
                waiting[0].arrival <= iteration or not engine.has_unfinished()
            ):
                one = waiting.pop(0)
                engine.submit(one.tokens, one.params)
                arrived += 1
            if arrived:
                engine.step(0)  # no step: only hands the requests to the device
            self._note_slots(len(self._asked) - len(waiting))
            before = engine.state.scheduler
            plan = jax.device_get(_ask(self._static, self._manager, before))
            taken = engine.stats.iterations
            engine.step(1)
            if engine.stats.iterations == taken:
                continue
            yield self._moment(plan, len(self._asked) - len(waiting))
            iteration += 1
        if iteration:
            plan = jax.device_get(
                _ask(self._static, self._manager, engine.state.scheduler)
            )
            engine.step(1)  # computes nothing: those that ended are retired
            yield self._moment(plan, len(self._asked))

    def _note_slots(self, arrived: int) -> None:
        """Finds out which sequence is in which request slot.

        The slots of a request are those with its order of arrival; their own order is
        taken for that of its sequences.
        """
        requests = self._engine.state.scheduler.requests
        arrival, status = jax.device_get((requests.arrival, requests.status))
        there = np.flatnonzero(status[:-1] != RequestStatus.EMPTY)
        for request in range(arrived):
            for number, slot in enumerate(there[arrival[there] == request]):
                self._in_slot[slot] = self._first[request] + number

    def _moment(self, plan: _Plan, arrived: int) -> Moment:
        scheduler = self._engine.state.scheduler
        requests, sequences = scheduler.requests, scheduler.sequences
        table, num_blocks, length, status = jax.device_get(
            (
                sequences.block_table,
                sequences.num_blocks,
                sequences.length,
                sequences.status,
            )
        )
        log = self._engine.log[-1]
        said = int(plan.chunk.sum()), int(plan.copies.count)
        if said != (log[Field.TOKENS], log[Field.COPIED_BLOCKS]):
            raise RuntimeError("the engine did not do what its scheduler had said")
        # What had ended before may have lost its slot to another, and keeps its row.
        kept = _has_ended(plan.status) & _has_ended(status)
        now = np.where(status == SequenceStatus.EMPTY, -1, self._in_slot[plan.slot])
        self._owner = np.where(kept, self._owner, now)
        activity = self._activities(plan, status, arrived)
        self._note_outputs(*jax.device_get((requests.tokens, requests.length)))
        on_host = status >= SequenceStatus.SWAPPED
        references, num_free = self._references(table, num_blocks, on_host)
        on_device = plan.status < SequenceStatus.SWAPPED
        planned = frozenset(plan.table[on_device].ravel().tolist()) - {0}
        named = frozenset(np.flatnonzero(references).tolist())
        dropped = sorted(planned - self._named - named)
        self._named = named
        return Moment(
            owner=self._owner.copy(),
            on_host=on_host,
            length=length,
            num_blocks=num_blocks,
            table=table,
            ref_count=references,
            num_free=num_free,
            activity=activity,
            output=list(self._output),
            copies=self._copies(plan),
            dropped=dropped,
            log=log[list(LOGGED)],
        )

    def _note_outputs(self, tokens: np.ndarray, known: np.ndarray) -> None:
        # Of a slot that was read and freed, tokens and length are still there.
        for slot, sequence in enumerate(self._in_slot[:-1]):
            if sequence >= 0:
                prompt = len(self._asked[self._sequences[sequence].request].tokens)
                output = tokens[slot, prompt : known[slot]]
                self._output[sequence] = tuple(output.tolist())

    def _references(
        self, table: np.ndarray, num_blocks: np.ndarray, on_host: np.ndarray
    ) -> tuple[np.ndarray, int]:
        pool = self._engine.state.scheduler.pool
        if isinstance(pool, BlockPool):
            references, free = jax.device_get((pool.ref_count, pool.num_available))
            return references, int(free)
        references = np.zeros(self._static.num_blocks + 1, np.int32)
        for row in np.flatnonzero(~on_host):
            references[table[row, : num_blocks[row]]] = 1
        return references, int(jax.device_get(pool.num_free))

    def _copies(self, plan: _Plan) -> list[Copy]:
        copies, found = plan.copies, []
        for source, target in zip(copies.source, copies.target[: int(copies.count)]):
            (row,) = np.flatnonzero((plan.table == target).any(axis=1))
            owner = self._in_slot[plan.slot[row]]
            found.append(Copy(int(source), int(target), int(owner)))
        return found

    def _activities(self, plan: _Plan, status: np.ndarray, arrived: int) -> np.ndarray:
        """Returns what each sequence did, i32[]; called before outputs are noted."""
        activity = np.array([s.request for s in self._sequences])
        activity = np.where(activity < arrived, Activity.WAITING, Activity.ABSENT)
        activity = np.where(self._was_admitted, Activity.PREEMPTED, activity)
        activity = np.where(self._ended, Activity.DONE, activity)
        for row in np.flatnonzero(self._owner >= 0):
            sequence = self._owner[row]
            prompt = len(self._asked[self._sequences[sequence].request].tokens)
            known = prompt + len(self._output[sequence])
            if status[row] == SequenceStatus.SWAPPED:
                now = Activity.SWAPPED
            elif _has_ended(plan.status[row]):
                now = Activity.HELD
            elif status[row] == SequenceStatus.UNFORKED:
                now = Activity.WAITING
            elif plan.chunk[row] == 1 and plan.length[row] + 1 == known > prompt:
                now = Activity.DECODE
            else:
                now = Activity.PREFILL
            activity[sequence] = now
            self._was_admitted[sequence] |= now != Activity.WAITING
            self._ended[sequence] |= _has_ended(status[row])
        return activity


def _has_ended(status: Any) -> Any:
    return (status == SequenceStatus.FINISHED) | (status == SequenceStatus.DROPPED)


def record(engine: Engine, asked: Sequence[Asked]) -> Recorded:
    """Serves requests with a fresh engine, and returns what was to be seen of it.

    Args:
      engine: one that has served nothing; its log must be on (`EngineConfig.record`).
      asked: requests in the order of their arrival, no more sequences than the engine
        has slots (`max_requests`).

    Raises:
      RuntimeError: the engine did something else than its scheduler had said.
    """
    return Recorder(engine, asked).run()

"""The host's side of the requests in service: slots, reports, and what is new."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from paged_jax.config import EngineConfig, StepConfig
from paged_jax.device_loop import DeviceLoop
from paged_jax.memory_managers import MemoryManager
from paged_jax.outputs import RequestOutput
from paged_jax.prefixes import Prefixes
from paged_jax.programs import Report
from paged_jax.request_record import RequestRecord
from paged_jax.requests import RequestStatus
from paged_jax.sequence_record import SequenceRecord


class RequestTable:
    """Requests that have yet to be returned as finished, and prefixes.

    Attributes:
      records: the requests, by name.
      prefixes: the registered prefixes.
    """

    def __init__(
        self,
        device: DeviceLoop,
        manager: MemoryManager,
        config: EngineConfig,
        static: StepConfig,
        seed: int,
    ):
        self.records: dict[str, RequestRecord] = {}
        self.prefixes = Prefixes(config, static)
        self._device = device
        self._manager = manager
        self._config = config
        self._seed = seed
        self._backlog: deque[RequestRecord] = deque()  # no slot on the device yet
        self._free_slots = deque(range(static.num_requests))

    def add(self, record: RequestRecord) -> None:
        """Puts a request at the end of the host's queue."""
        self.records[record.name] = record
        self._backlog.append(record)

    def withdraw(self, record: RequestRecord) -> bool:
        """Takes a request back if it is not on the device; returns whether it was."""
        waits = record in self._backlog
        if waits:
            self._backlog.remove(record)
            del self.records[record.name]
        return waits

    def hold(self, record: RequestRecord) -> None:
        """Makes a request that was just added a prefix, and the next in line."""
        waits = self.withdraw(record)
        assert waits
        self.prefixes.add(record)
        self._backlog.appendleft(record)

    def release(self, prefix: RequestRecord) -> None:
        """Lets a prefix go that `prefixes` has forgotten."""
        self._device.cancel(_slots(prefix.sequences), RequestStatus.ABORTED)
        self._free([prefix])

    def cancel(self, record: RequestRecord) -> None:
        """Ends a request on the device; the next step returns it."""
        self._device.cancel(_slots(record.sequences), RequestStatus.ABORTED)

    def step(self, steps: int) -> list[RequestOutput]:
        """Takes at most `steps` steps; returns what has ended, or streams and grew."""
        self._fill_slots()
        if not self._device.has_work:
            return []
        sequences = [s for r in self.records.values() for s in r.sequences]
        there = [s for s in sequences if s.slot is not None]
        early = [
            s.slot
            for record in self.records.values()
            if record.read_early
            for s in record.sequences
            if s.slot is not None and not s.ended
        ]
        if early:
            steps = min(steps, self._config.steps_per_sync)
        elif not self._backlog:
            steps = min(steps, max(self._enough(there), self._config.steps_per_sync))
        report = self._device.run(
            steps,
            early=early,
            most_ended=sum(s.ended for s in there) if self._backlog else None,
        )
        return self._gather(report)

    def _enough(self, sequences: Sequence[SequenceRecord]) -> int:
        """Returns how many steps may serve these to their ends if all fit at once.

        What takes more takes another run. Too many steps would only be handed to the
        device in vain.
        """
        left = [s for s in sequences if not s.ended]
        if len(left) > self._config.max_seqs:
            return self._config.most_steps
        prompts = sum(s.prompt_len for s in left if s.length == s.prompt_len)
        longest = max(
            (s.most_left(self._config.max_model_len) for s in left), default=0
        )
        return prompts // self._config.token_budget + longest + 2

    def _fill_slots(self) -> None:
        """Moves requests from the host's queue to free slots on the device."""
        batch = []
        while self._backlog:
            count = len(self._backlog[0].sequences)
            if count > len(self._free_slots):
                break
            if len(batch) + count > self._device.width:
                self._device.submit(batch)
                batch = []
            record = self._backlog.popleft()
            for sequence in record.sequences:
                sequence.slot = self._free_slots.popleft()
            record.prefix_row = self.prefixes.row_for(record.tokens)
            batch += record.new_requests(self._config, self._manager, self._seed)
        if batch:
            self._device.submit(batch)

    def _gather(self, report: Report) -> list[RequestOutput]:
        """Reads what the report says is new, and frees the slots of ended requests."""
        changed: list[RequestRecord] = []
        to_read: list[SequenceRecord] = []
        for record in [*self.records.values(), *self.prefixes.records.values()]:
            grown = self._update(record, report)
            if record.is_prefix:
                self.prefixes.settle(record, report)
                if record.failed:
                    self._free([record])
            elif grown:
                changed.append(record)
                to_read += grown
        outputs = self._device.read_with(report)
        missing = [s for s in _slots(to_read) if s not in outputs]
        outputs |= zip(missing, self._device.collect(missing))
        for sequence in to_read:
            assert sequence.slot is not None
            sequence.take_tokens(outputs[sequence.slot])
            self._device.stats.output_tokens -= sequence.num_dropped
        stopped = [s for s in to_read if s.ended and not s.ended_on_device]
        self._device.cancel(_slots(stopped), RequestStatus.FINISHED_STOP)
        done = [r for r in changed if r.ended]
        self._free(done)
        for record in done:
            del self.records[record.name]
        return [r.output() for r in changed if r.streams or r in done]

    def _update(self, record: RequestRecord, report: Report) -> list[SequenceRecord]:
        """Takes note of a report; returns the sequences with something to read."""
        grown = []
        for sequence in record.sequences:
            if sequence.slot is None or sequence.ended:
                continue
            new_tokens = sequence.update(
                RequestStatus(int(report.status[sequence.slot])),
                int(report.length[sequence.slot]),
                np.asarray(report.timeline[sequence.slot]),
                self._device.time_of,
            )
            self._device.stats.output_tokens += new_tokens
            if sequence.ended or (record.read_early and new_tokens):
                grown.append(sequence)
        return grown

    def _free(self, records: list[RequestRecord]) -> None:
        """Frees the slots of records that are done with.

        All slots of a request at once: the first one stands for the others.
        """
        sequences = [s for record in records for s in record.sequences]
        self._device.clear(_slots(sequences))
        self._free_slots.extend(_slots(sequences))
        for sequence in sequences:
            sequence.slot = None


def _slots(sequences: Sequence[SequenceRecord]) -> list[int]:
    return [sequence.slot for sequence in sequences if sequence.slot is not None]

"""Registered prefixes: what they are, where they are held, and who may share them."""

from collections.abc import Sequence

import numpy as np

from paged_jax.config import EngineConfig, StepConfig
from paged_jax.programs import Report
from paged_jax.request_record import RequestRecord
from paged_jax.requests import RequestStatus
from paged_jax.sampling_params import RequestError


class Prefixes:
    """The prefixes that are registered, on their way to a row or held in one.

    Attributes:
      records: by name.
    """

    def __init__(self, config: EngineConfig, static: StepConfig):
        self.records: dict[str, RequestRecord] = {}
        self._config = config
        self._static = static

    def check_room(self) -> None:
        """Raises RequestError if no prefix can be registered."""
        if not self._static.sharing:
            raise RequestError(
                "sharing is off: it needs memory='paged', sharing=True and "
                "max_prefixes of 1 or more"
            )
        if len(self.records) >= self._config.max_prefixes:
            raise RequestError(
                f"{len(self.records)} prefixes are registered and max_prefixes is "
                f"{self._config.max_prefixes}; release one or raise max_prefixes"
            )

    def add(self, record: RequestRecord) -> None:
        """Takes a prefix in; it is computed like a prompt, and then held."""
        record.is_prefix = True
        record.arrival -= 2**30  # the last one to be preempted
        self.records[record.name] = record

    def settle(self, record: RequestRecord, report: Report) -> None:
        """Notes where a prefix is held, or that it cannot be."""
        (sequence,) = record.sequences
        if sequence.status == RequestStatus.HELD and record.row is None:
            record.row = int(np.flatnonzero(report.row == sequence.slot)[0])
        elif record.ended:
            record.failed = True

    def check_held(self, record: RequestRecord) -> None:
        """Raises RequestError, and forgets the prefix, if it could not be held."""
        if record.failed:
            del self.records[record.name]
            raise RequestError(
                f"the prefix of {len(record.tokens)} tokens does not fit in "
                f"{self._static.num_blocks} blocks of {self._static.block_size} beside "
                "what is held; shorten it, release another or raise num_blocks"
            )

    def remove(self, name: str) -> RequestRecord:
        """Forgets a prefix and returns it.

        Raises:
          RequestError: no such prefix.
        """
        record = self.records.pop(name, None)
        if record is None:
            raise RequestError(
                f"no prefix {name!r} is registered; registered: "
                f"{', '.join(self.records) or 'none'}"
            )
        return record

    def row_for(self, tokens: Sequence[int]) -> int:
        """Returns the row of the longest held prefix of a prompt, or -1."""
        best, row = 0, -1
        for prefix in self.records.values():
            size = len(prefix.tokens)
            if prefix.row is not None and best < size <= len(tokens):
                if tokens[:size] == prefix.tokens:
                    best, row = size, prefix.row
        return row

"""What a run cost: counted on the host, and read off the device's log."""

import dataclasses

import numpy as np

from paged_jax.step_log import Field


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine was made or its statistics were reset.

    Attributes:
      host_syncs: blocking reads of device values.
      host_read_bytes: what these brought to the host.
      output_tokens: tokens generated, those past a stop string apart.
      iterations: steps taken.
      device_seconds: wall-clock time in the device's loops, reading their reports
        included.
      block_nbytes: bytes of keys and values of one block, in all layers.
      log: f32[iterations, F], rows of `step_log.Field`; empty if not recorded.
    """

    host_syncs: int = 0
    host_read_bytes: int = 0
    output_tokens: int = 0
    iterations: int = 0
    device_seconds: float = 0.0
    block_nbytes: int = 0
    log_parts: list[np.ndarray] = dataclasses.field(default_factory=list, repr=False)

    @property
    def log(self) -> np.ndarray:
        """All rows of the log, f32[iterations, F]."""
        empty = np.zeros((0, len(Field)), np.float32)
        return np.concatenate([empty, *self.log_parts])

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens of admitted sequences found in the prefix cache; 0 if not recorded."""
        return int(self.log[:, Field.HIT_TOKENS].sum())

    @property
    def evicted_blocks(self) -> int:
        """Cached blocks that were granted anew; 0 if not recorded."""
        return int(self.log[:, Field.EVICTED_BLOCKS].sum())

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again after a preemption; 0 if not recorded."""
        return int(self.log[:, Field.RECOMPUTED].sum())

    @property
    def recomputed_share(self) -> float:
        """`recomputed_tokens` for each generated token."""
        return self.recomputed_tokens / max(self.output_tokens, 1)

    @property
    def copied_blocks(self) -> int:
        """Blocks copied on write; 0 if not recorded."""
        return int(self.log[:, Field.COPIED_BLOCKS].sum())

    @property
    def swapped_blocks(self) -> tuple[int, int]:
        """Blocks copied to the host, and back; 0 if not recorded."""
        fields = Field.SWAPPED_OUT_BLOCKS, Field.SWAPPED_IN_BLOCKS
        out, back = (int(self.log[:, field].sum()) for field in fields)
        return out, back

    @property
    def host_syncs_per_token(self) -> float:
        """Blocking reads for each generated token."""
        return self.host_syncs / max(self.output_tokens, 1)

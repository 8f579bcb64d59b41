"""Memory managers: who decides which blocks a sequence gets, and when.

A manager is a `MemoryManager`: a handful of functions that the scheduler calls, all of
them with the same block tables and the same KV layout, so that the model and the
kernels cannot tell one manager from another. To add one, write such a value and
register it in `MANAGERS`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax

from paged_jax import contiguous_memory, paged_memory
from paged_jax.shared_blocks import SharedBlocks

# (prompt_len, output_len, max_model_len) -> tokens to reserve.
Reserve = Callable[[int, int, int], int]


class MemoryManager(NamedTuple):
    """The decisions of a memory manager.

    Attributes:
      reserve: `(prompt_len, output_len, max_model_len) -> int`, on the host at
        submission: tokens that a contiguous reservation is made for.
      init: `(config) -> pool`.
      find_shared: `(config, pool, sequences, requests, slot) -> SharedBlocks`, what a
        waiting request can share.
      fits: `(config, pool, requests, slot, shared, headroom) -> bool[]`, whether a
        waiting request can be granted its first blocks and leave `headroom` blocks
        free.
      grant: `(config, pool, sequences, requests, slot, row, shared) -> (pool,
        sequences)`; the request fits.
      release: `(config, pool, sequences, row) -> (pool, sequences)`; the row has
        blocks.
      peak_blocks: `(config, sequences, requests, slot) -> i32[]`, blocks that a request
        may come to hold; a static batch is not admitted beyond the sum of these.
      num_free: `(pool) -> i32[]`, blocks that can be granted: free ones and cached ones
        without a user.
      grows: whether sequences take blocks while they run (and so may be preempted).
    """

    reserve: Reserve
    init: Callable[..., Any]
    find_shared: Callable[..., SharedBlocks]
    fits: Callable[..., jax.Array]
    grant: Callable[..., tuple]
    release: Callable[..., tuple]
    peak_blocks: Callable[..., jax.Array]
    num_free: Callable[[Any], jax.Array]
    grows: bool

    def on_device(self) -> "MemoryManager":
        """Returns the part that is compiled.

        Managers that differ on the host only, in what they reserve, share one program.
        """
        return self._replace(reserve=reserve_nothing)


def reserve_nothing(prompt_len: int, output_len: int, max_model_len: int) -> int:
    """Reserves nothing: blocks come one by one."""
    del prompt_len, output_len, max_model_len
    return 0


def _manager(memory: ModuleType, reserve: Reserve, grows: bool) -> MemoryManager:
    """Returns the manager whose device functions are those of a module."""
    return MemoryManager(
        reserve=reserve,
        init=memory.init_pool,
        find_shared=memory.find_shared,
        fits=memory.fits,
        grant=memory.grant,
        release=memory.release,
        peak_blocks=memory.peak_blocks,
        num_free=memory.num_free,
        grows=grows,
    )


def reserve_max(prompt_len: int, output_len: int, max_model_len: int) -> int:
    """Reserves the longest sequence there can be (Orca (Max), section 6.1)."""
    del prompt_len, output_len
    return max_model_len


def reserve_pow2(prompt_len: int, output_len: int, max_model_len: int) -> int:
    """Reserves the prompt and the next power of two of the output (Orca (Pow2))."""
    estimate = 1 << max(output_len - 1, 0).bit_length()
    return min(prompt_len + estimate, max_model_len)


def reserve_oracle(prompt_len: int, output_len: int, max_model_len: int) -> int:
    """Reserves the prompt and the output, its length known (Orca (Oracle))."""
    return min(prompt_len + output_len, max_model_len)


MANAGERS: dict[str, MemoryManager] = {
    "paged": _manager(paged_memory, reserve_nothing, grows=True),
    "max": _manager(contiguous_memory, reserve_max, grows=False),
    "pow2": _manager(contiguous_memory, reserve_pow2, grows=False),
    "oracle": _manager(contiguous_memory, reserve_oracle, grows=False),
}

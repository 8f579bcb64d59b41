"""The debug mode: the invariants of the state, checked between steps."""

import jax
from jax.experimental import checkify

from paged_jax.block_pool import BlockPool
from paged_jax.invariants import assert_blocks, assert_groups, assert_swap
from paged_jax.state import SchedulerState

_checked = jax.jit(checkify.checkify(assert_blocks))
_checked_groups = jax.jit(checkify.checkify(assert_groups))
_checked_swap = jax.jit(checkify.checkify(assert_swap))


def raise_if_broken(state: SchedulerState) -> None:
    """Checks blocks, groups and what is swapped out; contiguous memory has none.

    Raises:
      checkify.JaxRuntimeError: an invariant does not hold; its name and the counts.
    """
    if isinstance(state.pool, BlockPool):
        error, _ = _checked(state.pool, state.sequences)
        error.throw()
        for checked in (_checked_groups, _checked_swap):
            error, _ = checked(state)
            error.throw()

"""What a step has to do, in numbers: all that a cost model sees of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.config import StepConfig
from paged_jax.scheduler import Plan
from paged_jax.state import SchedulerState, active_rows
from paged_jax.swap import SwapSpace


class Work(NamedTuple):
    """One step's work, f32[] each.

    Attributes:
      rows: sequences that compute anything.
      tokens: tokens that are computed.
      sampled: tokens that are generated.
      context: slots that attention reads, each once a sequence.
      pairs: pairs of a query and a key that it may see.
      members: sequences of the batch, ended ones of a static batch included.
      longest_chunk: most tokens that a sequence computes.
      longest_context: most slots of a sequence, those of this step included.
      copied_blocks: copied on write.
      swapped_in_blocks: brought back from the host.
      swapped_out_blocks: moved to it.
    """

    rows: jax.Array
    tokens: jax.Array
    sampled: jax.Array
    context: jax.Array
    pairs: jax.Array
    members: jax.Array
    longest_chunk: jax.Array
    longest_context: jax.Array
    copied_blocks: jax.Array
    swapped_in_blocks: jax.Array
    swapped_out_blocks: jax.Array


def work_of(config: StepConfig, state: SchedulerState, plan: Plan) -> Work:
    """Counts the work of a step.

    Args:
      config: static settings.
      state: scheduler's state after planning, before the lengths are counted up.
      plan: the step's plan.
    """
    sequences = state.sequences
    computes = plan.chunk > 0
    chunk = plan.chunk.astype(jnp.float32)
    end = (sequences.length + plan.chunk).astype(jnp.float32)
    active = active_rows(sequences)
    ins = outs = jnp.float32(0)
    if isinstance(state.swap, SwapSpace):
        ins, outs = state.swap.ins.count, state.swap.outs.count
    counts = Work(
        rows=jnp.sum(computes),
        tokens=jnp.sum(chunk),
        sampled=jnp.sum(plan.samples),
        context=jnp.sum(jnp.where(computes, end, 0)),
        # Token i of a chunk of c that ends at e sees e - c + i tokens, i from 1.
        pairs=jnp.sum(chunk * end - chunk * (chunk - 1) / 2),
        members=jnp.sum(active),
        longest_chunk=jnp.max(chunk),
        longest_context=jnp.max(jnp.where(active, end, 0)),
        copied_blocks=plan.copies.count if config.sharing else jnp.float32(0),
        swapped_in_blocks=ins,
        swapped_out_blocks=outs,
    )
    return Work(*(jnp.asarray(count, jnp.float32) for count in counts))


def decode_work(rows: float, context: float) -> Work:
    """Returns the work of a step that decodes, each sequence with as much behind it.

    Args:
      rows: sequences.
      context: slots that each reads, its new one included.
    """
    return _work(rows, chunk=1.0, context=context)


def prompt_work(tokens: float) -> Work:
    """Returns the work of a step that computes one whole prompt of so many tokens."""
    return _work(1.0, chunk=tokens, context=tokens)


def swap_work(ins: float = 0.0, outs: float = 0.0) -> Work:
    """Returns the work of a step that only moves blocks from, and to, the host."""
    idle = _work(0.0, chunk=0.0, context=0.0)
    return idle._replace(
        swapped_in_blocks=jnp.float32(ins), swapped_out_blocks=jnp.float32(outs)
    )


def _work(rows: float, chunk: float, context: float) -> Work:
    pairs = rows * (chunk * context - chunk * (chunk - 1) / 2)
    nothing = jnp.float32(0)
    return Work(
        rows=jnp.float32(rows),
        tokens=jnp.float32(rows * chunk),
        sampled=jnp.float32(rows),
        context=jnp.float32(rows * context),
        pairs=jnp.float32(pairs),
        members=jnp.float32(rows),
        longest_chunk=jnp.float32(chunk),
        longest_context=jnp.float32(context),
        copied_blocks=nothing,
        swapped_in_blocks=nothing,
        swapped_out_blocks=nothing,
    )

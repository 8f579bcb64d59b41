"""What a simulation adds up of its steps: sums from which the metrics are means."""

import enum

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.step_log import Field

_FIELDS = len(Field)


class Total(enum.IntEnum):
    """Sums over the steps that count, behind those of the log's fields."""

    STEPS = _FIELDS
    SECONDS = _FIELDS + 1
    UTILIZATION = _FIELDS + 2  # live / reserved slots
    SHARED = _FIELDS + 3  # logical / physical blocks
    # Over the steps in which requests wait, in the queue or swapped out:
    WAITING_STEPS = _FIELDS + 4
    WAITING_LIVE = _FIELDS + 5
    WAITING_RESERVATION = _FIELDS + 6
    WAITING_INTERNAL = _FIELDS + 7
    # Tokens of prompts, of requests that are admitted for the first time:
    FOUND_TOKENS = _FIELDS + 8  # found in the prefix cache
    PROMPT_TOKENS = _FIELDS + 9  # all, if there is a prefix cache


NUM_TOTALS = _FIELDS + len(Total)


def add_step(
    totals: jax.Array,
    row: jax.Array,
    seconds: jax.Array,
    found: tuple[jax.Array | float, jax.Array | float],
    counts: jax.Array,
) -> jax.Array:
    """Adds a step to the totals f32[NUM_TOTALS], if it `counts` bool[].

    Args:
      totals: the sums.
      row: f32[F], the step's row of the log.
      seconds: f32[], what it took.
      found: f32[] each, see `block_names.count_found`; zeros without a prefix cache.
      counts: whether it lies in the part of the run that is looked at.
    """
    live, reserved = row[Field.LIVE], row[Field.RESERVED]
    logical, physical = row[Field.LOGICAL_BLOCKS], row[Field.PHYSICAL_BLOCKS]
    waits = (row[Field.WAITING] + row[Field.SWAPPED] > 0).astype(jnp.float32)
    more = jnp.stack(
        [
            jnp.float32(1),
            seconds,
            live / jnp.maximum(reserved, 1),
            logical / jnp.maximum(physical, 1),
            waits,
            waits * live,
            waits * row[Field.RESERVATION],
            waits * row[Field.INTERNAL],
            *map(jnp.float32, found),
        ]
    )
    return totals + jnp.where(counts, jnp.concatenate([row, more]), 0.0)


def summarise_totals(totals: np.ndarray, total_slots: int) -> dict[str, float]:
    """Returns the means of a run's steps, named as the real engine's metrics are.

    Args:
      totals: f64[NUM_TOTALS].
      total_slots: slots of the pool.
    """
    steps = max(totals[Total.STEPS], 1.0)
    waiting = totals[Total.WAITING_STEPS]
    names = ("token_states", "reservation", "internal")
    if waiting:
        parts = totals[Total.WAITING_LIVE : Total.WAITING_INTERNAL + 1] / waiting
    else:
        fields = [Field.LIVE, Field.RESERVATION, Field.INTERNAL]
        parts = totals[fields] / steps
    shares: dict[str, float] = {}
    shares |= zip(names, (parts / total_slots).tolist(), strict=True)
    shares["external"] = 1.0 - sum(shares.values())
    sharing = totals[Total.SHARED] / steps
    return {
        "steps": float(totals[Total.STEPS]),
        "kv_utilization": float(totals[Total.UTILIZATION] / steps),
        **{f"kv_breakdown.{name}": share for name, share in shares.items()},
        "mean_running": float(totals[Field.RUNNING] / steps),
        "mean_waiting": float(totals[Field.WAITING] / steps),
        "mean_step_s": float(totals[Total.SECONDS] / steps),
        "tokens_per_s": float(totals[Field.SAMPLED] / max(totals[Total.SECONDS], 1e-9)),
        "preemptions": float(totals[Field.PREEMPTED]),
        "prefix_hit_ratio": float(
            totals[Total.FOUND_TOKENS] / max(totals[Total.PROMPT_TOKENS], 1.0)
        ),
        "evicted_blocks": float(totals[Field.EVICTED_BLOCKS]),
        "block_saving": float(1.0 - 1.0 / sharing) if sharing > 0 else 0.0,
    }

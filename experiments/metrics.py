"""The figures of a cell, from the engine's log and the requests' times."""

from typing import Any

import numpy as np

from experiments.serving import Run
from paged_jax.step_log import Field

# Metrics that depend on the machine's speed; all others follow from settings and seed,
# except under Poisson arrivals, where the speed decides who waits.
TIMED = (
    "output_tokens_per_s",
    "normalized_latency_s",
    "ttft_s",
    "tpot_s",
    "schedule_us",
    "peak_rss_bytes",
)


def cell_metrics(run: Run) -> dict[str, Any]:
    """Returns the metrics of a cell, named as in `summary.json`.

    - `kv_utilization`: live / reserved slots, mean over the iterations.
    - `kv_breakdown`: shares of all slots of the pool, mean over the iterations in which
      requests wait (over all of them if none ever does), as in the paper's Fig 2.
    - `output_tokens_per_s`: generated tokens / wall clock.
    - `mean_running`: sequences in the batch, mean over the iterations.
    - `normalized_latency_s`: mean of latency / output tokens.
    - `ttft_s`, `tpot_s`: time to the first token; time between later ones.
    - `preemptions`: in all.
    - `blocks_saved`: logical - physical blocks, mean over the iterations.
    - `block_saving`: 1 - 1 / mean(logical / physical blocks) over the iterations that
      hold any, the paper's measure (section 6.3).
    - `hit_tokens`: tokens of prompts found in the prefix cache.
    - `block_table_bytes`, `schedule_us`, `compilations`, `host_syncs_per_token`,
      `peak_rss_bytes`: see `serving.Run`.
    - `host_read_bytes_per_token`: bytes that the host reads from the device, for each
      generated token; what is swapped does not go this way.
    - `cow_bytes`: copied on write, in all.
    - `cow_bytes_per_token`, `swapped_bytes_per_token`, `recomputed_per_token`: bytes
      copied on write, bytes swapped (out and back in), and tokens computed again after
      preemption, for each generated token.
    """
    log = run.log
    tokens = sum(r.num_tokens for r in run.served)
    latencies = [(r.finished - r.arrival) / len(r.token_ids) for r in run.served]
    between = [
        (r.finished - r.first_token) / (len(r.token_ids) - 1)
        for r in run.served
        if len(r.token_ids) > 1
    ]
    copied = int(log[:, Field.COPIED_BLOCKS].sum()) * run.block_bytes
    moved = log[:, [Field.SWAPPED_OUT_BLOCKS, Field.SWAPPED_IN_BLOCKS]]
    swapped = int(moved.sum()) * run.block_bytes
    saved = log[:, Field.LOGICAL_BLOCKS] - log[:, Field.PHYSICAL_BLOCKS]
    return {
        "kv_utilization": utilization(log),
        "kv_breakdown": breakdown(log, run.total_slots),
        "output_tokens_per_s": tokens / run.wall_s,
        "mean_running": _mean(log[:, Field.RUNNING]),
        "normalized_latency_s": _mean(latencies),
        "ttft_s": _p50_p99([r.first_token - r.arrival for r in run.served]),
        "tpot_s": _p50_p99(between),
        "preemptions": int(log[:, Field.PREEMPTED].sum()),
        "blocks_saved": _mean(saved),
        "block_saving": block_saving(log),
        "hit_tokens": int(log[:, Field.HIT_TOKENS].sum()),
        "block_table_bytes": run.block_table_bytes,
        "schedule_us": run.schedule_us,
        "compilations": run.compilations,
        "host_syncs_per_token": run.host_syncs / tokens,
        "host_read_bytes_per_token": run.host_read_bytes / tokens,
        "peak_rss_bytes": run.peak_rss_bytes,
        "cow_bytes": copied,
        "cow_bytes_per_token": copied / tokens,
        "swapped_bytes_per_token": swapped / tokens,
        "recomputed_per_token": float(log[:, Field.RECOMPUTED].sum()) / tokens,
    }


def cell_details(run: Run) -> dict[str, Any]:
    """Returns what the metrics come from, for the reader who wants to check."""
    log = run.log
    waits = _waits(log)
    running = log[:, Field.RUNNING]
    return {
        "wall_s": run.wall_s,
        "device_s": run.device_s,
        "warmup_s": run.warmup_s,
        "other_cores": run.other_cores,
        "iterations": len(log),
        "total_slots": run.total_slots,
        "output_tokens": sum(r.num_tokens for r in run.served),
        "prompt_tokens": sum(len(r.prompt_ids) for r in run.served),
        "computed_tokens": int(log[:, Field.TOKENS].sum()),
        "skipped_tokens": sum(
            (1 + len(r.further)) * len(r.prompt_ids) + r.num_tokens - 1 - len(r.further)
            for r in run.served
        )
        + int(log[:, Field.RECOMPUTED].sum())
        - int(log[:, Field.TOKENS].sum()),
        "recomputed_tokens": int(log[:, Field.RECOMPUTED].sum()),
        "swapped_out_blocks": int(log[:, Field.SWAPPED_OUT_BLOCKS].sum()),
        "swapped_in_blocks": int(log[:, Field.SWAPPED_IN_BLOCKS].sum()),
        "copied_blocks": int(log[:, Field.COPIED_BLOCKS].sum()),
        "peak_running": int(running.max(initial=0)),
        "running_while_waiting": _mean(running[waits]) if waits.any() else None,
        "arrival_rate": run.rate,
        "requests_per_s": len(run.served) / run.wall_s,
        "host_syncs": run.host_syncs,
        "host_read_bytes": run.host_read_bytes,
        "block_bytes": run.block_bytes,
        "preemption_cost": run.preemption and run.preemption._asdict(),
        "memory_plan": [list(row) for row in run.memory_plan],
    }


def utilization(log: np.ndarray) -> float:
    """Returns live / reserved slots, mean over the iterations that reserve any."""
    reserved = log[:, Field.RESERVED]
    some = reserved > 0
    return _mean(log[some, Field.LIVE] / reserved[some])


def block_saving(log: np.ndarray) -> float:
    """Returns 1 - 1 / mean(logical / physical blocks); 0 if there never are any."""
    logical, physical = log[:, Field.LOGICAL_BLOCKS], log[:, Field.PHYSICAL_BLOCKS]
    some = physical > 0
    return 1.0 - 1.0 / _mean(logical[some] / physical[some]) if some.any() else 0.0


def breakdown(log: np.ndarray, total_slots: int) -> dict[str, float]:
    """Returns shares of all slots of the pool, which sum to 1 (see `cell_metrics`).

    Args:
      log: f32[iterations, F].
      total_slots: slots of the pool.
    """
    waits = _waits(log)
    rows = log[waits] if waits.any() else log
    shares = {
        "token_states": _mean(rows[:, Field.LIVE]) / total_slots,
        "reservation": _mean(rows[:, Field.RESERVATION]) / total_slots,
        "internal": _mean(rows[:, Field.INTERNAL]) / total_slots,
    }
    return shares | {"external": 1.0 - sum(shares.values())}


def _waits(log: np.ndarray) -> np.ndarray:
    """Returns bool[iterations]: whether requests wait, in the queue or swapped out."""
    return (log[:, Field.WAITING] + log[:, Field.SWAPPED]) > 0


def _mean(values: Any) -> float:
    values = np.asarray(values, np.float64)
    return float(values.mean()) if values.size else 0.0


def _p50_p99(values: list[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50": p50, "p99": p99}

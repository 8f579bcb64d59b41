import numpy as np
import pytest

from experiments.metrics import (
    block_saving,
    breakdown,
    cell_details,
    cell_metrics,
    utilization,
)
from experiments.serving import Run, Served
from paged_jax.step_log import Field


def log_of(*rows):
    """Returns a log with these fields, given as dicts."""
    log = np.zeros((len(rows), len(Field)), np.float32)
    for i, row in enumerate(rows):
        for field, value in row.items():
            log[i, Field[field]] = value
    return log


# A pool of 100 slots, blocks of 10. Requests wait in the first two iterations.
LOG = log_of(
    dict(RUNNING=2, WAITING=3, LIVE=30, RESERVED=60, RESERVATION=20, INTERNAL=10,
         LOGICAL_BLOCKS=7, PHYSICAL_BLOCKS=6, TOKENS=30, PREEMPTED=0),
    dict(RUNNING=4, WAITING=1, LIVE=50, RESERVED=80, RESERVATION=25, INTERNAL=0,
         LOGICAL_BLOCKS=8, PHYSICAL_BLOCKS=8, TOKENS=4, PREEMPTED=2, RECOMPUTED=9,
         COPIED_BLOCKS=3, HIT_TOKENS=48, SWAPPED_OUT_BLOCKS=3),
    dict(RUNNING=1, WAITING=0, LIVE=10, RESERVED=10, LOGICAL_BLOCKS=1,
         PHYSICAL_BLOCKS=1, TOKENS=1, COPIED_BLOCKS=1, SWAPPED_IN_BLOCKS=2),
    dict(RUNNING=0, WAITING=0),
)  # fmt: skip


def run_of(log=LOG, served=None, **changes):
    served = served or [
        # 4 tokens: first after 1 s, then one a second.
        Served("a", "d", "p", (5,) * 10, (1, 2, 3, 4), "abcd", 0.0, 1.0, 4.0),
        # 1 token, 1 s after it arrived.
        Served("b", "d", "p", (5,) * 20, (1,), "a", 2.0, 3.0, 3.0),
    ]
    values = dict(
        served=served,
        log=log,
        log_times=np.arange(1.0, len(log) + 1),
        wall_s=5.0,
        device_s=4.0,
        rate=None,
        compilations=0,
        host_syncs=2,
        host_read_bytes=30,
        schedule_us=30.0,
        warmup_s=1.0,
        block_table_bytes=256,
        block_bytes=1000,
        total_slots=100,
        peak_rss_bytes=12345,
        memory_plan=[("weights", "1 MiB", "100%")],
    )
    return Run(**(values | changes))


def test_the_metrics_of_a_log_made_by_hand():
    metrics = cell_metrics(run_of())
    assert metrics == {
        "kv_utilization": pytest.approx((30 / 60 + 50 / 80 + 10 / 10) / 3),
        "kv_breakdown": {
            "token_states": pytest.approx(0.40),
            "reservation": pytest.approx(0.225),
            "internal": pytest.approx(0.05),
            "external": pytest.approx(0.325),
        },
        "output_tokens_per_s": pytest.approx(1.0),
        "mean_running": pytest.approx(7 / 4),
        "normalized_latency_s": pytest.approx((4 / 4 + 1 / 1) / 2),
        "ttft_s": {"p50": pytest.approx(1.0), "p99": pytest.approx(1.0)},
        "tpot_s": {"p50": pytest.approx(1.0), "p99": pytest.approx(1.0)},
        "preemptions": 2,
        "blocks_saved": pytest.approx(1 / 4),
        "block_saving": pytest.approx(1 - 3 / (7 / 6 + 1 + 1)),
        "hit_tokens": 48,
        "block_table_bytes": 256,
        "schedule_us": 30.0,
        "compilations": 0,
        "host_syncs_per_token": pytest.approx(0.4),
        "host_read_bytes_per_token": pytest.approx(6.0),
        "peak_rss_bytes": 12345,
        "cow_bytes": 4000,
        "cow_bytes_per_token": pytest.approx(4000 / 5),
        "swapped_bytes_per_token": pytest.approx(5 * 1000 / 5),
        "recomputed_per_token": pytest.approx(9 / 5),
    }


def test_without_blocks_nothing_is_saved():
    assert block_saving(LOG[3:]) == 0.0


def test_all_sequences_of_a_request_count():
    served = [
        Served("a", "d", "p", (5,) * 10, (1, 2), "ab", 0.0, 1.0, 4.0, ((3, 4), (5, 6)))
    ]
    run = run_of(served=served)
    assert cell_metrics(run)["output_tokens_per_s"] == pytest.approx(6 / 5)
    assert cell_metrics(run)["cow_bytes_per_token"] == pytest.approx(4000 / 6)
    # Of 3 sequences of 10 + 2 - 1 tokens and 9 that were lost, 35 were computed.
    assert cell_details(run)["skipped_tokens"] == 3 * 11 + 9 - 35


def test_iterations_that_reserve_nothing_have_no_utilisation():
    assert utilization(LOG[3:]) == 0.0
    assert utilization(LOG[2:]) == pytest.approx(1.0)


def test_the_breakdown_is_over_the_iterations_in_which_requests_wait():
    only_waiting, all_rows = breakdown(LOG[:2], 100), breakdown(LOG, 100)
    assert only_waiting == all_rows


def test_if_none_ever_waits_the_breakdown_is_over_all_iterations():
    assert breakdown(LOG[2:], 100)["token_states"] == pytest.approx(0.05)


def test_the_breakdown_sums_to_1():
    rng = np.random.default_rng(0)
    log = rng.uniform(0, 30, (50, len(Field))).astype(np.float32)
    assert sum(breakdown(log, 100).values()) == pytest.approx(1)


def test_percentiles_are_over_requests():
    served = [
        Served(str(i), "d", "p", (5,), (1, 2), "ab", 0.0, float(i), float(2 * i))
        for i in range(101)
    ]
    metrics = cell_metrics(run_of(served=served))
    assert metrics["ttft_s"] == {"p50": pytest.approx(50), "p99": pytest.approx(99)}
    assert metrics["tpot_s"] == {"p50": pytest.approx(50), "p99": pytest.approx(99)}


def test_requests_of_one_token_have_no_time_between_tokens():
    served = [Served("a", "d", "p", (5,), (1,), "a", 0.0, 1.0, 1.0)]
    assert cell_metrics(run_of(served=served))["tpot_s"] == {"p50": 0.0, "p99": 0.0}


def test_the_details_are_what_the_metrics_come_from():
    details = cell_details(run_of())
    assert details["iterations"] == 4
    assert details["output_tokens"] == 5 and details["prompt_tokens"] == 30
    assert details["computed_tokens"] == 35 and details["recomputed_tokens"] == 9
    assert details["peak_running"] == 4
    assert details["running_while_waiting"] == pytest.approx(3.0)
    assert details["requests_per_s"] == pytest.approx(0.4)

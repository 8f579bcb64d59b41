"""The experiments on beams and on preemption as a whole, on a tiny model."""

import pytest

from experiments.beam_traces import load_traces, write_traces

pytestmark = pytest.mark.long

SMALL = (
    "--config.workload.length_scale=1",
    "--config.workload.num_requests=6",
    "--config.engine.max_model_len=128",
    "--config.engine.full_length_requests=8",
)


def test_beams_are_traced(summary_of, tmp_path):
    rows, claims = summary_of("--config=beam_search", *SMALL)
    for width in (2, 4, 6):
        on = rows[f"beam_width {width}, sharing"]
        separate = rows[f"n {width}, no sharing"]
        assert on["details"]["output_tokens"] == separate["details"]["output_tokens"]
        assert on["metrics"]["block_saving"] > 0.1
    assert claims["beam_search.compilations.all"]["holds"]
    assert write_traces(tmp_path / "r", tmp_path / "t.json") == 18
    for width, some in load_traces(tmp_path / "t.json").items():
        assert len(some) == 6
        for trace in some:
            assert trace.parents.shape == (trace.output_len - 1, width)


def test_preempted_sequences_are_swapped_or_computed_again(summary_of, tmp_path):
    rows, claims = summary_of(
        "--config=preemption",
        "--config.engine.full_length_requests=1.5",
        "--config.workload.preempted_tokens=48",
        "--sweep=engine.block_size=8",
    )
    again = rows["recompute, block_size 8"]["metrics"]
    swapped = rows["swap, block_size 8"]
    assert again["recomputed_per_token"] > 0 == again["swapped_bytes_per_token"]
    metrics, details = swapped["metrics"], swapped["details"]
    assert metrics["recomputed_per_token"] == 0 < metrics["swapped_bytes_per_token"]
    assert details["swapped_out_blocks"] == details["swapped_in_blocks"] > 0
    cost = details["preemption_cost"]
    assert cost["tokens"] == 48 and min(cost.values()) > 0
    assert claims["preemption.tokens_equal"]["holds"]
    assert claims["preemption.preemptions.all"]["holds"]
    assert claims["preemption.host_read_share.all"]["measured"] > 0
    assert claims["preemption.compilations.all"]["holds"]
    assert (tmp_path / "r/figures/preemption.png").exists()

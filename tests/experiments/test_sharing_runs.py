"""The experiments on sharing and preemption as a whole, on a tiny model."""

import json

import pytest

from experiments.beam_traces import load_traces, write_traces


@pytest.fixture
def summary_of(run_tiny, tmp_path):
    """Runs an experiment; returns its rows by label, and its claims by id."""

    def call(*words):
        code, out, err = run_tiny(*words, f"--out={tmp_path / 'r'}")
        assert code == 0, err
        assert "Sharing and preemption" in out
        summary = json.loads((tmp_path / "r/summary.json").read_text())
        claims = {c["id"]: c for c in summary["claims"]}
        return {r["label"].split(", ", 1)[1]: r for r in summary["rows"]}, claims

    return call


SMALL = (
    "--config.workload.length_scale=4",
    "--config.workload.num_requests=6",
    "--config.engine.max_model_len=96",
)


def test_samples_share_their_prompt(summary_of, tmp_path):
    rows, claims = summary_of("--config=parallel_sampling", *SMALL)
    assert list(rows) == [
        "n 1, sharing",
        *(f"n {n}, {on}sharing" for n in (2, 4, 6) for on in ("no ", "")),
    ]
    assert claims["parallel_sampling.tokens_equal"]["holds"]
    assert claims["parallel_sampling.compilations.all"]["holds"]
    for n in (2, 4, 6):
        off, on = rows[f"n {n}, no sharing"], rows[f"n {n}, sharing"]
        assert on["details"]["output_tokens"] == off["details"]["output_tokens"]
        assert off["metrics"]["block_saving"] == off["metrics"]["cow_bytes"] == 0
        assert on["metrics"]["block_saving"] > 0
        assert on["metrics"]["cow_bytes_per_token"] > 0
        # All prompts but one of each request.
        prompts = on["details"]["prompt_tokens"]
        if not on["metrics"]["preemptions"]:
            assert on["details"]["skipped_tokens"] == (n - 1) * prompts
    assert (tmp_path / "r/figures/saving.png").exists()
    (line, *_) = (tmp_path / "r/outputs").glob("*n=6-sharing=True.jsonl")
    output = json.loads(line.read_text().splitlines()[0])
    assert len({tuple(ids) for ids in [output["token_ids"], *output["further"]]}) > 1


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


def test_prefixes_are_registered_found_or_computed(summary_of):
    rows, claims = summary_of(
        "--config=shared_prefix",
        "--config.workload.length_scale=16",
        "--config.workload.num_requests=6",
        "--config.engine.max_model_len=256",
        "--sweep=workload.name=few_shot",
    )
    none, shared, found = (rows[name] for name in ("not shared", "shared", "found"))
    prefix = none["details"]["workload"]["prefix_tokens"]
    assert none["details"]["skipped_tokens"] == 0
    # It is computed once, when it is registered.
    assert shared["details"]["skipped_tokens"] == 5 * prefix
    assert shared["metrics"]["cow_bytes"] > 0 == found["metrics"]["cow_bytes"]
    assert found["metrics"]["hit_tokens"] == found["details"]["skipped_tokens"]
    assert found["metrics"]["hit_tokens"] >= 5 * (prefix // 16 * 16)
    assert claims["shared_prefix.tokens_equal"]["holds"]
    assert claims["shared_prefix.hit_share_real.few_shot.automatic"]["holds"]


def test_preempted_sequences_are_swapped_or_computed_again(summary_of, tmp_path):
    rows, claims = summary_of(
        "--config=preemption",
        "--config.engine.full_length_requests=1.5",
        "--config.workload.preempted_tokens=48",
        "--sweep=engine.block_size=8,16",
    )
    for size in (8, 16):
        again = rows[f"recompute, block_size {size}"]["metrics"]
        swapped = rows[f"swap, block_size {size}"]
        assert again["recomputed_per_token"] > 0 == again["swapped_bytes_per_token"]
        metrics, details = swapped["metrics"], swapped["details"]
        assert metrics["recomputed_per_token"] == 0 < metrics["swapped_bytes_per_token"]
        assert details["swapped_out_blocks"] == details["swapped_in_blocks"] > 0
        cost = details["preemption_cost"]
        assert cost["tokens"] == 48 and min(cost.values()) > 0
    assert claims["preemption.tokens_equal"]["holds"]
    assert claims["preemption.preemptions.all"]["holds"]
    assert claims["preemption.compilations.all"]["holds"]
    assert (tmp_path / "r/figures/preemption.png").exists()

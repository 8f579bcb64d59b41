"""The experiments on sharing as a whole, on a tiny model."""

import json

import pytest

pytestmark = pytest.mark.long

SMALL = (
    "--config.workload.length_scale=1",
    "--config.workload.num_requests=6",
    "--config.engine.max_model_len=128",
    "--config.engine.full_length_requests=8",
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

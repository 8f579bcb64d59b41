import json
import re

import pytest
from test_claims import headline_rows
from test_figures import with_details

from experiments.base_config import base_config
from experiments.claims import check_claims
from experiments.environment import describe
from experiments.report import render

PNG = b"\x89PNG not really"


@pytest.fixture
def summary():
    rows = with_details(headline_rows())
    spread = {"mean": 1.0, "p10": 1.0, "p50": 1.0, "p90": 1.0, "max": 1}
    for row in rows:
        row["metrics"] |= {
            "normalized_latency_s": 0.1,
            "ttft_s": {"p50": 0.5, "p99": 1.0},
            "tpot_s": {"p50": 0.0123, "p99": 0.0456},
            "peak_rss_bytes": 3 * 2**30,
            "preemptions": 0,
            "blocks_saved": 0.0,
            "block_saving": 0.25,
            "hit_tokens": 0,
            "cow_bytes_per_token": 1234.5,
            "swapped_bytes_per_token": 0.0,
            "recomputed_per_token": 0.125,
        }
        row["details"] |= {
            "arrival_rate": None,
            "skipped_tokens": 0,
            "memory_plan": [["weights", "1 MiB", "100%"]],
        }
        row["details"]["workload"] |= {
            "input_tokens": spread,
            "output_tokens": spread,
            "prefix_tokens": 0,
        }
    return {
        "experiment": "headline",
        "config": json.loads(base_config("quick").to_json_best_effort())
        | {"preset": "quick"},
        "environment": describe() | {"cpu": "some CPU"},
        "rows": rows,
        "claims": check_claims("headline", rows, []),
    }


def test_the_report_has_all_that_a_reader_needs(summary):
    figures = {"a.png": ("What it shows.", PNG)}
    html = render(summary, figures, "python -m experiments.run", "What it is.")
    for text in (
        "max + static",
        "4.00x",
        "headline.speedup_real.paged_continuous",
        "What it shows.",
        "data:image/png;base64,",
        "some CPU",
        "python -m experiments.run",
        "What it is.",
        "Memory plan",
        # What was run, and by how much the lengths are scaled down.
        "sharegpt&#39;s, divided by 4.0",
        "8.0 requests of the model length",
        "smollm2-135m, float32",
        # Every metric that is reported.
        ">0.50<", ">1.00<", ">12.3<", ">45.6<", ">20<", ">0.0010<", ">3072<",
        ">25.0%<", ">1234<", ">0.125<",
    ):  # fmt: skip
        assert text in html


def test_the_report_needs_no_other_file(summary):
    html = render(summary, {"a.png": ("x.", PNG)}, "c")
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert "<script" not in html


def test_everything_is_escaped(summary):
    evil = "<script>alert('x')</script>"
    summary["rows"][0]["label"] = evil
    summary["config"]["workload"]["prompts"] = evil
    summary["environment"]["cpu"] = evil
    summary["claims"][0]["note"] = evil
    html = render(summary, {"a.png": (evil, PNG)}, evil, evil)
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 11


def test_what_was_swept_is_not_given_one_value(summary):
    swept = {"engine.full_length_requests": 4.0, "model": "a"}
    for row in summary["rows"]:
        row["cell"] |= swept
    html = render(summary, {}, "c", "", swept)
    assert "(as swept) requests of the model length" in html
    assert "(as swept), float32" in html and "smollm2-135m, float32" not in html


def test_a_budget_in_blocks_is_shown_as_one(summary):
    summary["config"]["engine"]["num_blocks"] = 77
    assert "77 blocks" in render(summary, {}, "c")


def test_a_run_outside_of_git_has_a_report(summary):
    summary["environment"]["git"] = None
    assert "unknown" in render(summary, {}, "c")


def test_claims_that_do_not_hold_are_marked(summary):
    summary["claims"][0] |= {"holds": False}
    html = render(summary, {}, "c")
    held = sum(c["holds"] for c in summary["claims"])
    assert f"{held} of {len(summary['claims'])} hold" in html
    assert 'class="no"' in html

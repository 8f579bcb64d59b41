"""Summaries to report on, and what every page must be."""

import functools
import html.parser
import json

from test_claims import headline_rows
from test_figures import with_details

from experiments.base_config import base_config
from experiments.claims import check_claims, claim
from experiments.environment import describe

PNG = b"\x89PNG not really"
EVIL = "<script>alert('x')</script>"


class Outline(html.parser.HTMLParser):
    """What a page refers to, and whether its elements are closed in order."""

    VOID = ("meta", "img", "wbr")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs[key] for key in ("href", "src") if key in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()


def assert_self_contained(text):
    """The page is well formed, runs nothing, and loads nothing from outside."""
    outline = Outline(text)
    assert "script" not in [tag for tag, _ in outline.tags]
    assert len(outline.ids) == len(set(outline.ids))
    for link in outline.links:
        inside = link.startswith("#") and link[1:] in outline.ids
        assert inside or link.startswith("data:image/png;base64,"), link
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text


_machine = functools.cache(describe)


def served() -> dict:
    """A summary as `experiments.run` leaves it."""
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
            "host_read_bytes_per_token": 512.5,
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
        "environment": _machine() | {"cpu": "some CPU"},
        "rows": rows,
        "claims": check_claims("headline", rows, []),
    }


def study():
    """A summary as a study without an engine leaves it."""
    rows = [
        {
            "cell": {"system": system, "rate": rate},
            "metrics": {"latency_s": rate / speed, "waste": {"internal": 0.25}},
            "details": {},
        }
        for system, speed in (("vllm", 2.0), ("orca_max", 1.0))
        for rate in (0.5, 1.5)
    ]
    return {
        "experiment": "fig12",
        "rows": rows,
        "claims": [claim("x", 1.0, source="s", unit="x", kind="predicted", near=1.0)],
        "config": {"model": "opt-13b", "seed": 0},
        "environment": {},
    }

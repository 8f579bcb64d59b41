import copy
import re

import pytest
from report_cases import EVIL, PNG, Outline, assert_self_contained, served, study

from experiments.claims import claim
from experiments.report import render
from experiments.report.claim_lines import difference
from experiments.report.run_record import label
from experiments.visualize import page


@pytest.fixture
def summary():
    return served()


def test_the_report_has_all_that_a_reader_needs(summary):
    figures = {"a.png": ("What it shows.", PNG)}
    html = render(summary, figures, "python -m experiments.run", "What it is.")
    html = html.replace("<wbr>", "")
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
    assert_self_contained(html)


def test_the_report_looks_like_the_interactive_page(summary):
    theme = re.compile(r"--(?:paper|ink|accent|good): #[0-9a-f]{6}|--serif: [^;]+")
    look = theme.findall(render(summary, {}, "again"))
    assert len(look) == 13 and look == theme.findall(page.render({}))


def test_everything_is_escaped(summary):
    summary["experiment"] = EVIL
    summary["rows"][0]["label"] = EVIL
    summary["config"]["workload"]["prompts"] = EVIL
    summary["environment"]["cpu"] = EVIL
    for key in ("id", "note", "unit", "source", "kind"):
        summary["claims"][0][key] = EVIL
    html = render(summary, {EVIL: (EVIL, PNG)}, EVIL, EVIL)
    assert_self_contained(html)
    # Three tables have the row's label; settings and machine stand in two places.
    assert html.count("&lt;script&gt;") >= 15


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


def test_tables_can_be_read_aloud(summary):
    outline = Outline(render(summary, {}, "c"))
    tags = [tag for tag, _ in outline.tags]
    assert tags.count("caption") == tags.count("table") > 4
    for tag, attrs in outline.tags:
        if tag == "th":
            assert attrs["scope"] in ("col", "row", "rowgroup")
        if attrs.get("class") == "wide":
            assert (attrs["tabindex"], attrs["role"]) == ("0", "region")
            assert attrs["aria-label"]
    assert tags.count("h1") == 1


def test_a_claim_shows_how_far_off_it_is(summary):
    summary["claims"] = [
        claim("a", 4.43, source="s", unit="%", kind="memory", near=6.09, tolerance=3),
        claim("b", None, source="s", unit="x", kind="fitted", at_least=2.0),
        claim(
            "c", 1.9, source="s", unit="x", kind="fitted",
            at_least=2.0, paper=1.76, spread=0.3, seeds=3,
        ),
    ]  # fmt: skip
    html = render(summary, {}, "c")
    for text in ("6.09 ± 3", "−1.66 (−27.3%)", "memory", "fitted", ">= 2", "Memory: "):
        assert text.replace(">", "&gt;") in html
    # From the paper's number, not from what is expected; ± is half the spread.
    assert ">+0.14 (+7.95%)<" in html and ">1.76<" in html and ">1.9 (±0.15)<" in html
    assert "Speed: " not in html
    assert "✓ yes" in html and "✗ no" in html


@pytest.mark.parametrize(
    "old, new, text",
    [
        (2.0, 3.0, "+1 (+50%)"),
        (-2.0, -3.0, "−1 (−50%)"),
        (0.0, 3.0, "+3"),
        (3.0, 3.0, "0"),
        (None, 3.0, "–"),
        (3.0, float("nan"), "–"),
    ],
)
def test_a_difference_has_a_sign_and_a_share(old, new, text):
    assert difference(old, new) == text


def test_a_study_without_an_engine_has_a_report():
    html = render(study(), {"a.png": ("It.", PNG)}, "c")
    assert_self_contained(html)
    for text in ("system vllm, rate 0.5", "latency s", "waste internal", "0.25"):
        assert text in html
    assert "Sharing and preemption" not in html and "Workloads" not in html


def test_rows_that_are_not_quite_of_an_engine_have_a_report(summary):
    for change in (
        lambda row: row["metrics"].pop("ttft_s"),
        lambda row: row["metrics"].update(schedule_us=None),
        lambda row: row["metrics"].update(output_tokens_per_s=0.0),
        lambda row: row["details"].clear(),
        lambda row: row.pop("label"),
    ):
        changed = copy.deepcopy(summary)
        change(changed["rows"][0])
        html = render(changed, {}, "c", "", ["unknown"])
        assert "Other cells" in html and "Sharing and preemption" in html


def test_long_tables_are_folded():
    summary = study()
    assert "Show all lines" not in render(summary, {}, "c")
    summary["rows"] *= 11
    assert "Show all lines" in render(summary, {}, "c")


def test_a_row_without_a_label_is_called_what_it_is():
    assert label({"cell": {"a.b_c": 1, "d": "x"}}) == "b c 1, d x"
    assert label({"cell": {"a": 1}, "label": "y"}) == "y"

import copy
import html.parser
import json

import pytest
from test_claims import headline_rows
from test_figures import with_details

from experiments.base_config import base_config
from experiments.claims import check_claims, claim
from experiments.environment import describe
from experiments.report import render
from experiments.report.__main__ import main
from experiments.report.claim_lines import difference
from experiments.report.comparison import compare_claims, differences
from experiments.report.pages import render_comparison
from experiments.report.run_record import RunRecord, label

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


@pytest.fixture(scope="module")
def machine():
    return describe()


@pytest.fixture
def summary(machine):
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
        "environment": machine | {"cpu": "some CPU"},
        "rows": rows,
        "claims": check_claims("headline", rows, []),
    }


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
    ]
    html = render(summary, {}, "c")
    for text in ("6.09 ± 3", "−1.66 (−27.3%)", "memory", "fitted", ">= 2", "Memory: "):
        assert text.replace(">", "&gt;") in html
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


# The command.


@pytest.fixture
def folder(summary, tmp_path):
    """Returns a function that writes a results folder."""

    def write(name, summary=summary, figures=("b.png", "a.png"), captions=None):
        path = tmp_path / name
        (path / "figures").mkdir(parents=True)
        (path / "summary.json").write_text(json.dumps(summary))
        for figure in figures:
            (path / "figures" / figure).write_bytes(PNG)
        if captions is not None:
            (path / "figures/captions.json").write_text(json.dumps(captions))
        return path

    return write


def test_a_folder_gets_its_report_anew(folder, summary, capsys):
    extra = {"command": "python again", "description": "What.", "swept": ["model"]}
    for row in summary["rows"]:
        row["cell"]["model"] = "a"
    path = folder("one", summary | extra, captions={"b.png": "Bars, all of them."})
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"report: {path}/report.html\n"
    html = (path / "report.html").read_text("utf-8")
    assert_self_contained(html)
    for text in ("python again", "What.", "(as swept)", "Bars, all of them."):
        assert text in html
    # Figures with captions come first; the others are named after their files.
    assert html.index("Bars, all") < html.index("<figcaption>A</figcaption>")


def test_several_folders_make_one_report(folder, tmp_path):
    out = tmp_path / "all.html"
    paths = [folder("first"), folder("second", study())]
    assert main([*map(str, paths), f"--out={out}"]) == 0
    html = out.read_text("utf-8")
    assert_self_contained(html)
    assert html.count("<article") == 2
    assert "fig12" in html and "max + static" in html
    assert "first" in html and "second" in html
    assert 'href="#run-2"' in html


def changed_copy(summary):
    """The same run with one cell faster, one cell missing, a claim lost, one won."""
    after = copy.deepcopy(summary)
    metrics = after["rows"][0]["metrics"]
    metrics["output_tokens_per_s"] *= 1.5
    metrics["preemptions"] = 3
    after["rows"].pop()
    after["config"]["engine"]["block_size"] = 32
    first, second = after["claims"][:2]
    first["holds"], second["holds"] = not first["holds"], not second["holds"]
    return after


def test_two_runs_are_compared(folder, summary, tmp_path):
    summary["claims"][0]["holds"], summary["claims"][1]["holds"] = True, False
    before, after = folder("a", summary), folder("b", changed_copy(summary))
    out = tmp_path / "change.html"
    assert main([str(before), str(after), "--compare", f"--out={out}"]) == 0
    html = out.read_text("utf-8")
    assert_self_contained(html)
    total = len(summary["claims"])
    for text in (
        f"Claims: 2 of {total} changed",
        "no longer holds",
        "holds now",
        "offline: max + static: 2 of",
        "<code>output_tokens_per_s</code>",
        ">50</td>",
        ">75</td>",
        "+25 (+50%)",
        "1.50x",
        "<code>engine.block_size</code>",
        "Only before: ",
        "Before: headline",
        "After: headline",
    ):
        assert text in html, text
    # What was 0 has no ratio.
    line = html[html.index("<code>preemptions</code>") :]
    assert line[: line.index("</tr>")].endswith(">–</td>")


def test_a_run_compared_with_itself_has_not_changed(folder, summary, tmp_path):
    path, out = folder("a"), tmp_path / "o.html"
    assert main([str(path), str(path), "--compare", f"--out={out}"]) == 0
    html = out.read_text("utf-8")
    assert "Claims: 0 of" in html and ": 0 of" in html
    assert html.count("The same in both.") == 2


def test_claims_are_compared_by_their_ids():
    def make(id, measured):
        return claim(id, measured, source="s", unit="x", kind="speed", at_least=2.0)

    found = compare_claims(
        [make("kept", 3.0), make("lost", 3.0), make("won", 1.0), make("gone", 1.0)],
        [make("kept", 4.0), make("lost", 1.0), make("won", 2.0), make("new", None)],
    )
    assert [(c["id"], c["standing"], c["changed"]) for c in found] == [
        ("lost", "no longer holds", True),
        ("won", "holds now", True),
        ("gone", "only before, did not hold", False),
        ("new", "only after, does not hold", False),
        ("kept", "holds, as before", False),
    ]
    assert [c["difference"] for c in found] == [
        "−2 (−66.7%)", "+1 (+100%)", "–", "–", "+1 (+33.3%)"
    ]  # fmt: skip


def test_settings_that_differ_are_named_with_both_values():
    old = {"a": {"b": 1, "same": [1]}, "gone": "x", "started": 1}
    new = {"a": {"b": 2, "same": [1]}, "new": None, "started": 2}
    assert differences(old, new) == [
        ("a.b", "1", "2"), ("gone", "x", "–"), ("new", "–", "null")
    ]  # fmt: skip


def test_equal_cells_are_paired_in_their_order():
    def run(*speeds):
        rows = [
            {"cell": {"a": 1}, "metrics": {"speed": speed}, "details": {}}
            for speed in speeds
        ]
        return RunRecord("n", rows, [], {}, {}, {}, "c")

    html = render_comparison(run(1.0, 2.0), run(4.0, 2.0, 9.0))
    assert "a 1: 1 of 1 differ" in html and "a 1: 0 of 1 differ" in html
    assert "Only after: a 1" in html


def test_a_comparison_escapes_what_it_shows(folder, tmp_path):
    summary = study()
    summary["experiment"] = summary["claims"][0]["id"] = EVIL
    summary["rows"][0]["cell"][EVIL] = EVIL
    summary["rows"][0]["metrics"][EVIL] = 1.0
    after = copy.deepcopy(summary)
    summary["config"][EVIL] = EVIL
    after["rows"][0]["metrics"][EVIL] = 2.0
    out = tmp_path / "o.html"
    paths = folder("a", summary), folder("b", after)
    assert main([*map(str, paths), "--compare", f"--out={out}"]) == 0
    assert_self_contained(out.read_text("utf-8"))


def test_halves_of_characters_do_not_stop_the_report(folder):
    summary = study()
    summary["config"]["model"] = "\ud83d and 模型"
    path = folder("a", summary)
    assert main([str(path)]) == 0
    html = (path / "report.html").read_bytes().decode("utf-8")
    assert "? and 模型" in html


def broken(summary, change):
    summary = copy.deepcopy(summary)
    change(summary)
    return json.dumps(summary)


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "summary.json: damaged"),
        ("[]", "not an object"),
        ("[" * 100_000, "summary.json: damaged"),
        (b"\xff\xfe", "summary.json: damaged"),
        (lambda s: s.pop("rows"), "rows is not a list"),
        (lambda s: s.update(experiment=1), "experiment is not a text"),
        (lambda s: s.update(config=[1]), "config is not an object"),
        (lambda s: s.update(swept="a"), "swept is not a list"),
        (lambda s: s["rows"].append(1), "row 5 is not an object"),
        (lambda s: s["rows"][1].pop("cell"), "row 2 has no cell"),
        (lambda s: s["rows"][1].update(metrics=[]), "row 2 has no metrics"),
        (lambda s: s["claims"].append(None), "claim 2 is not an object"),
        (lambda s: s["claims"][0].pop("holds"), "claim 1 does not say if it holds"),
        (lambda s: s["claims"][0].pop("id"), "claim 1 has no id"),
        (lambda s: s["claims"][0].update(measured="1"), "measured is not a number"),
    ],
)
def test_a_damaged_summary_is_refused_in_one_line(folder, capsys, text, words):
    path = folder("bad")
    if callable(text):
        text = broken(study(), text)
    file = path / "summary.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(capsys, [path], words)


def assert_refused(capsys, argv, *words):
    assert main([*map(str, argv)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err


def test_what_cannot_be_used_is_refused_in_one_line(folder, tmp_path, capsys):
    path = folder("good")
    assert_refused(capsys, [], "DIR")
    assert_refused(capsys, [tmp_path / "nowhere"], "nowhere: no such folder")
    (tmp_path / "empty").mkdir()
    assert_refused(capsys, [tmp_path / "empty"], "no summary.json in it; not of a run")
    (tmp_path / "empty/cells.jsonl").touch()
    assert_refused(capsys, [tmp_path / "empty"], "not finished: --resume it")
    assert_refused(capsys, [path, path], "--out")
    assert_refused(capsys, [path, "--compare"], "two folders", "not 1")
    assert_refused(capsys, [path, f"--out={tmp_path}"], "Is a directory")
    assert_refused(capsys, [path, f"--out={tmp_path}/x/y.html"], "No such file")
    assert_refused(capsys, [path, "--wrong"], "--wrong")
    (path / "figures/captions.json").write_text("[]")
    assert_refused(capsys, [path], "captions.json: damaged")


def test_runs_with_nothing_in_common_are_not_compared(folder, tmp_path, capsys):
    paths = folder("a"), folder("b", study())
    words = [*paths, "--compare", f"--out={tmp_path / 'o.html'}"]
    assert_refused(capsys, words, "no cell and no claim in common")
    assert not (tmp_path / "o.html").exists()

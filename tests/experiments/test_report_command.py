"""`python -m experiments.report`: reading, merging and comparing runs."""

import copy
import json

import pytest
from report_cases import EVIL, PNG, assert_self_contained, served, study

from experiments.claims import claim
from experiments.report.__main__ import main
from experiments.report.comparison import compare_claims, differences
from experiments.report.pages import render_comparison
from experiments.report.run_record import RunRecord, read_run
from experiments.report.seed_changes import exceeds_spread, seed_changes
from experiments.studies.seeds import Estimate, exact
from experiments.studies.study_claim import study_claim


@pytest.fixture
def summary():
    return served()


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


@pytest.mark.parametrize(
    "before, after, exceeds",
    [
        (Estimate(1.0, 0.2, 3), Estimate(1.3, 0.2, 3), "yes"),
        (Estimate(1.0, 0.4, 3), Estimate(1.2, 0.1, 3), "no"),
        (Estimate(1.0, 0.2, 3), Estimate(9.0, 0.0, 1), "–"),
        (exact(1.0), exact(2.0), "–"),
        (None, exact(2.0), "–"),
    ],
)
def test_a_change_is_compared_with_the_spread(before, after, exceeds):
    def make(found):
        return study_claim(
            "a", found, paper=None, unit="x", kind="predicted", source="s"
        )

    assert exceeds_spread(before, after) == exceeds
    [found] = compare_claims([make(before)], [make(after)])
    assert found["exceeds"] == exceeds
    assert ("±" in found["old"]) is (before is not None and before.count > 1)


def seeded(*, slower, calmer):
    """A summary of two systems, three seeds each."""
    rows = [
        {
            "label": f"{system}-{seed}",
            "cell": {"system": system, "seed": seed},
            "metrics": {
                "rate": (1 - slower) * (10 + seed),
                "waste": {"internal": (1 - calmer) * (1 + 0.01 * seed)},
                "steps": 7,
                "curve": [1],
            },
        }
        for system in ("ft", "vllm")
        for seed in range(3)
    ]
    return {"experiment": "e", "rows": rows, "claims": []}


def test_means_over_seeds_are_compared_with_their_spread(folder, tmp_path):
    paths = (
        folder("a", seeded(slower=0.0, calmer=0.0)),
        folder("b", seeded(slower=0.1, calmer=0.1)),
    )
    runs = [read_run(path) for path in paths]
    ft, vllm = seed_changes(runs[0].rows, runs[1].rows)
    assert (ft.label, vllm.label, ft.seeds) == ("ft", "vllm", "3 seeds")
    # 11 ± 1 and 9.9 ± 0.9; 1.01 ± 0.01 and 0.909 ± 0.009; the steps are the same.
    assert [tuple(line) for line in ft.lines] == [
        ("rate", "11", "9.9", "−1.1 (−10%)", "no"),
        ("waste.internal", "1.01", "0.909", "−0.101 (−10%)", "yes"),
    ]
    out = tmp_path / "o.html"
    assert main([*map(str, paths), "--compare", f"--out={out}"]) == 0
    html = out.read_text("utf-8")
    assert_self_contained(html)
    assert "ft (3 seeds): 2 differ, 1 by more than the spread" in html


def test_one_seed_has_no_means_to_compare(folder):
    summary = seeded(slower=0.0, calmer=0.0)
    one = summary | {"rows": [r for r in summary["rows"] if not r["cell"]["seed"]]}
    assert seed_changes(one["rows"], summary["rows"]) == []
    assert seed_changes(study()["rows"], study()["rows"]) == []


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


def test_a_summary_of_before_there_were_numbers_of_the_paper_is_read(folder):
    summary = study()
    [one] = summary["claims"]
    one |= {"paper": one.pop("expected"), "relation": ">="}
    for name in ("spread", "seeds"):
        del one[name]
    [read] = read_run(folder("old", summary)).claims
    assert (read["expected"], read["paper"], read["spread"]) == (1.0, None, None)


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

"""The page in a real browser."""

import copy
import json

import browser
import numpy as np
import pytest

from experiments.visualize import page as pages
from experiments.visualize.recorder import LOGGED, Activity
from paged_jax import Field

VIEWS = ["memory", "sharing", "batching", "together"]


@pytest.fixture(scope="module")
def chrome():
    with browser.chromium() as started:
        yield started


@pytest.fixture(scope="module")
def shown(chrome, tiny_page):
    with browser.opened(chrome, tiny_page.path, locale="en-GB") as found:
        yield found
        assert found.problems == []
        assert found.requests == [f"file://{tiny_page.path}"]


@pytest.fixture
def page(shown):
    """The open page, at the start of the first view, in English."""
    if shown.page.locator("html").get_attribute("lang") != "en":
        shown.page.locator("#language").click()
    shown.page.locator("#tab-memory").click()
    shown.page.evaluate("pagedJax.show(0)")
    yield shown.page
    assert shown.problems == []


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_opens_plays_and_steps(page, view):
    page.locator(f"#tab-{view}").click()
    assert page.evaluate("pagedJax.view") == view
    page.locator("#first").click()
    start = page.evaluate("pagedJax.at")
    page.locator("#step").click()
    page.locator("#step").click()
    page.locator("#back").click()
    assert page.evaluate("pagedJax.at") == start + 1
    before = page.locator("#position").inner_text()
    page.locator("#speed").select_option("2")
    page.locator("#play").click()
    page.wait_for_function(f"pagedJax.at > {start + 1}")
    page.locator("#play").click()
    assert not page.evaluate("pagedJax.playing")
    assert page.locator("#position").inner_text() != before
    page.locator("#last").click()
    position, last = page.locator("#position").inner_text().split(" / ")
    assert position == last


def test_a_run_plays_to_its_end_and_stops(page):
    page.locator("#tab-sharing").click()
    page.locator("#speed").select_option("500")
    page.locator("#play").click()
    page.wait_for_function("!pagedJax.playing")
    position, last = page.locator("#position").inner_text().split(" / ")
    assert position == last


def test_keys_drive_the_page(page):
    page.locator("body").click(position={"x": 2, "y": 300})
    at = "pagedJax.at"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert page.evaluate(at) == 11
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(at) == 10
    page.keyboard.press("Home")
    assert page.evaluate(at) == 0
    page.keyboard.press("Space")
    page.wait_for_function("pagedJax.at > 1")
    page.keyboard.press("Space")
    assert not page.evaluate("pagedJax.playing")
    page.keyboard.press("3")
    assert page.evaluate("pagedJax.view") == "batching"
    page.locator("#tab-batching").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("pagedJax.view") == "together"
    assert page.evaluate("document.activeElement.id") == "tab-together"
    page.locator("#tab-sharing").click()
    page.set_viewport_size({"width": 400, "height": 900})
    page.evaluate("pagedJax.show(3)")
    page.locator(".scroller").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(at) == 3  # a region that scrolls keeps its keys
    page.set_viewport_size({"width": 1280, "height": 900})
    page.keyboard.press("l")
    assert page.locator("html").get_attribute("lang") == "zh-Hans"


def test_the_language_switches_everywhere(page):
    for view in VIEWS:
        page.locator(f"#tab-{view}").click()
        title = page.locator("#main h2").inner_text()
        page.locator("#language").click()
        assert page.locator("#main h2").inner_text() != title
        assert page.locator("#language").inner_text() == "English"
        page.locator("#language").click()
        assert page.locator("#main h2").inner_text() == title


def test_what_is_shown_is_what_the_engine_was(page, tiny_page):
    for name, recorded in tiny_page.recorded.items():
        frames = page.evaluate("run => pagedJax.frames(run)", name)
        assert frames == len(recorded.moments)
        for k in np.linspace(0, frames - 1, 12).astype(int).tolist():
            seen = page.evaluate("([k, run]) => pagedJax.stateAt(k, run)", [k, name])
            moment = recorded.moments[k]
            owners = [[] for _ in moment.ref_count]
            for row in np.flatnonzero(~moment.on_host):
                for block in moment.table[row, : moment.num_blocks[row]]:
                    owners[block].append(int(moment.owner[row]))
            assert seen["free"] == moment.num_free
            assert seen["refs"] == moment.ref_count[1:].tolist()
            assert seen["owners"] == [sorted(some) for some in owners[1:]]


def test_the_caption_says_how_many_blocks_are_free(page, tiny_page):
    for k in (0, 7, 30):
        page.evaluate("k => pagedJax.show(k)", k)
        free = tiny_page.recorded["paged"].moments[k].num_free
        said = f"Free blocks: {free} of "
        assert said in page.locator(".caption").first.inner_text()
        assert said in page.locator("#live").text_content()


def test_cards_show_blocks_with_their_reference_counts(page, tiny_page):
    page.locator("#tab-sharing").click()
    for k, moment in enumerate(tiny_page.recorded["parallel"].moments):
        page.evaluate("k => pagedJax.show(k)", k)
        cards = page.evaluate(
            "[...document.querySelectorAll('.card:not(.gone)')].map("
            "(c) => [Number(c.dataset.block), c.querySelector('.ref').textContent])"
        )
        counts = {b: f"×{moment.ref_count[b]}" for b in moment.ref_count.nonzero()[0]}
        assert dict(cards) == counts


def test_a_sequence_can_be_chosen(page, tiny_page):
    page.evaluate("pagedJax.show(5)")
    moment = tiny_page.recorded["paged"].moments[5]
    for chip in page.locator(".chip").all():
        name = chip.locator("b").inner_text()
        rows = np.flatnonzero(moment.owner == int(name) - 1)
        if not rows.size:
            continue
        chip.focus()
        entries = page.locator(".block-table b").all_inner_texts()
        table = moment.table[rows[0], : moment.num_blocks[rows[0]]].tolist()
        assert [int(entry) for entry in entries] == table
        assert page.locator(".arrows path.arrow").count() == len(table)
        spoken = page.locator(".block-table [role=listitem]").evaluate_all(
            "(items) => items.map((item) => item.ariaLabel)"
        )
        assert spoken == [
            f"logical block {i} is in physical block {b}" for i, b in enumerate(table)
        ]


def test_markup_in_prompts_is_text(page, tiny_page):
    requests = tiny_page.data["runs"]["paged"]["requests"]
    hostile = [r["prompt"] for r in requests if "<" in r["prompt"]]
    assert len(hostile) == 2
    seen = set()
    for name in (str(i + 1) for i, r in enumerate(requests) if "<" in r["prompt"]):
        run = tiny_page.recorded["paged"]
        k = next(k for k, m in enumerate(run.moments) if int(name) - 1 in m.owner)
        page.evaluate("k => pagedJax.show(k)", k)
        page.locator(".chip", has=page.get_by_text(name, exact=True)).hover()
        seen.add(page.locator(".words .asked").inner_text())
    assert seen >= set(hostile)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#main img, #main script, .words b").count() == 0


def test_a_choice_keeps_the_focus(page):
    page.locator("#tab-sharing").click()
    page.get_by_role("radio", name="Four samples").focus()
    for key, chosen in (("ArrowRight", "beam"), ("ArrowLeft", "parallel")):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.value") == chosen


def test_the_gantt_chart_is_there_as_a_table(page, tiny_page):
    page.locator("#tab-batching").click()
    page.locator(".as-table summary").first.click()
    moments = tiny_page.recorded["paged"].moments
    activity = np.stack([moment.activity for moment in moments], axis=1)
    rows = page.locator(".requests tbody tr").all_inner_texts()
    assert len(rows) == len(activity)
    times_it_gave_way = 0
    for doing, row in zip(activity, rows):
        _, comes, begins, ends, waited, gave_way = map(int, row.split())
        ran = np.flatnonzero(np.isin(doing, (Activity.PREFILL, Activity.DECODE)))
        waits = np.isin(doing, (Activity.WAITING, Activity.PREEMPTED))
        assert comes - 1 == np.flatnonzero(doing != Activity.ABSENT)[0]
        assert (begins - 1, ends - 1) == (ran[0], ran[-1])
        assert waited == waits.sum()
        times_it_gave_way += gave_way
    assert times_it_gave_way > 0


def test_legends_say_what_is_at_the_mark(page, tiny_page):
    page.evaluate("pagedJax.show(7)")
    shown = page.locator(".chart .legend b").all_inner_texts()
    column = LOGGED.index(Field.LIVE)
    for name, said in zip(("paged", "max", "pow2", "oracle"), shown, strict=True):
        run = tiny_page.recorded[name]
        slots = run.config.total_blocks * run.config.block_size
        live = 100 * run.moments[7].log[column] / slots
        assert abs(int(said.removesuffix("%")) - live) <= 0.51


def test_sliders_change_what_is_said(page):
    page.locator("#tab-together").click()
    said = page.locator(".what-if .caption")
    results = {said.inner_text()}
    for key in ("rate", "budget", "blockSize"):
        page.locator(f"#what-if-{key}").focus()
        page.keyboard.press("ArrowLeft")
        results.add(said.inner_text())
    page.get_by_role("radio", name="static batches").click()
    results.add(said.inner_text())
    assert len(results) == 5


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_nothing_sticks_out(chrome, tiny_page, width):
    size = {"width": width, "height": 800}
    with browser.opened(chrome, tiny_page.path, viewport=size) as found:
        for view in VIEWS:
            found.page.locator(f"#tab-{view}").click()
            wide = found.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, view
        assert found.problems == []


def test_names_are_there_for_those_who_cannot_see(page):
    for view in VIEWS:
        page.locator(f"#tab-{view}").click()
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, input, select, canvas, svg[role]')]"
            ".filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() ||"
            " e.labels?.length)).map((e) => e.outerHTML)"
        )
        assert unnamed == []
        assert page.locator("[role=tab][aria-selected=true]").count() == 1


def test_ten_thousand_iterations_of_a_thousand_blocks_are_smooth(
    chrome, tiny_page, tmp_path
):
    data = copy.deepcopy(tiny_page.data)
    for name in data["runs"]:
        data["runs"][name] = long_run(data["runs"][name])
    path = tmp_path / "long.html"
    path.write_text(pages.render(data), "utf-8")
    with browser.opened(chrome, path) as found:
        found.page.locator("#speed").select_option("500")
        devtools = found.page.context.new_cdp_session(found.page)
        # The processor's time: what else runs on the machine does not count.
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

        def spent() -> float:
            metrics = devtools.send("Performance.getMetrics")["metrics"]
            return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

        found.page.locator("#play").click()
        ticks, before = found.page.evaluate("pagedJax.ticks"), spent()
        found.page.wait_for_function("pagedJax.at > 600")
        drawn = found.page.evaluate("pagedJax.ticks") - ticks
        assert (spent() - before) / drawn <= 1 / 30
        found.page.evaluate("pagedJax.show(9999)")
        assert found.page.evaluate("pagedJax.stateAt(9999).refs.length") == 1000
        assert found.problems == []


def long_run(like: dict, frames: int = 10_000, rows: int = 50, width: int = 20) -> dict:
    """Returns a recording of 1,000 blocks: each row's sequence lives 320 iterations."""
    life, size = 320, 16
    blocks, sequences = rows * width, rows * -(-frames // life)
    tables = [[] for _ in range(frames)]
    refs = [[] for _ in range(frames)]
    activity = [[0, 0] for _ in range(sequences)]
    for k in range(frames):
        age = k % life
        for row in range(rows):
            sequence = k // life * rows + row
            if age == 0:
                tables[k] += [row, sequence, 0, 1, 0, 1, 1 + row * width]
                for block in range(width if k else 0):
                    refs[k] += [1 + row * width + block, 0]
                refs[k] += [1 + row * width, 1]
                activity[sequence] = [0, 0, k, 3, k + life, 7] if k else [0, 3, life, 7]
            elif age % size == 0:
                block = 1 + row * width + age // size
                tables[k] += [row, sequence, 0, age + 1, age // size, 1, block]
                refs[k] += [block, 1]
    request = {**like["requests"][0], "promptTokens": 1, "mostTokens": life}
    column = [rows * width // 2] * frames
    return {
        **like,
        "frames": frames,
        "blockSize": size,
        "numBlocks": blocks,
        "numRows": rows,
        "maxSeqs": rows,
        "requests": [request] * sequences,
        "sequences": [[i, 0] for i in range(sequences)],
        "rows": tables,
        "ref": refs,
        "text": [[]] * frames,
        "copies": [[]] * frames,
        "activity": activity,
        "free": column,
        "log": {name: column for name in like["log"]},
    }


def test_the_long_run_is_well_made(tiny_page):
    run = long_run(tiny_page.data["runs"]["paged"])
    assert len(json.dumps(run["rows"])) < 3_000_000
    assert run["numBlocks"] == 1000

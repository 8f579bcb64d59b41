"""The page in a real browser."""

import copy
import itertools

import browser
import numpy as np
import pytest

from experiments.visualize import page as pages
from experiments.visualize.recorder import Activity

VIEWS = ["memory", "sharing", "batching", "together"]


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
    browser.wait_until(page, f"pagedJax.at > {start + 1}")
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
    browser.wait_until(page, "!pagedJax.playing")
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
    browser.wait_until(page, "pagedJax.at > 1")
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


def test_one_that_waits_can_be_chosen(page, tiny_page):
    run, seen = tiny_page.recorded["paged"], set()
    said = {Activity.WAITING: "waits", Activity.PREEMPTED: "preempted"}
    for k, moment in enumerate(run.moments):
        waiting = np.flatnonzero(np.isin(moment.activity, list(said)))
        if not waiting.size or {*moment.activity[waiting]} <= seen:
            continue
        page.evaluate("k => pagedJax.show(k)", k)
        for sequence in waiting.tolist():
            page.locator(f".chip:has(b:text-is('{sequence + 1}'))").click()
            activity = moment.activity[sequence]
            title = f"Request {sequence + 1}: {said[activity]}. It has no blocks now."
            assert page.locator(".table-title").inner_text() == title
            assert page.locator(".block-table span").count() == 0
            assert page.locator(".arrows path.arrow").count() == 0
            asked = page.locator(".words .asked").text_content()
            assert asked == run.asked[sequence].prompt
            seen.add(activity)
            page.locator(f".chip:has(b:text-is('{sequence + 1}'))").click()
    assert seen == set(said)


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


def test_markup_that_a_model_writes_is_text(chrome, tiny_page, tmp_path):
    data = copy.deepcopy(tiny_page.data)
    markup = "<img src=x onerror=hacked=1>"
    recordings = [*data["runs"].values(), *data["sharing"].values()]
    for recording in recordings:
        recording["pieces"] = [markup] * len(recording["pieces"])
    path = tmp_path / "hostile.html"
    path.write_text(pages.render(data), "utf-8")
    with browser.opened(chrome, path) as found:
        page = found.page
        page.evaluate("pagedJax.show(9)")
        assert markup in page.locator(".words .answer").inner_text()
        page.locator("#tab-sharing").click()
        page.evaluate("pagedJax.show(5)")
        assert page.locator(".card .tokens span").first.inner_text() == markup
        assert markup in page.locator(".texts .answer").first.inner_text()
        assert page.locator("#main img").count() == 0
        assert page.evaluate("window.hacked") is None
        assert found.problems == []


def test_the_browser_is_told_to_load_nothing(chrome, tiny_page):
    with browser.opened(chrome, tiny_page.path) as found:
        failed = found.page.evaluate(
            "fetch('http://127.0.0.1:9/').then(() => '', (error) => String(error))"
        )
        assert "Failed to fetch" in failed
        assert all("Content Security Policy" in one for one in found.problems)
        assert found.problems and found.requests == [f"file://{tiny_page.path}"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes(chrome, tiny_page, scheme):
    paper = {"light": "rgb(252, 251, 248)", "dark": "rgb(21, 24, 28)"}
    other = "dark" if scheme == "light" else "light"
    colour = "getComputedStyle(document.body).backgroundColor"
    # A block that nobody has, on the canvas.
    free = """(() => {
      const pen = new OffscreenCanvas(1, 1).getContext("2d");
      pen.drawImage(document.querySelector(".pool canvas"), -4, -4);
      return pen.getImageData(0, 0, 1, 1).data.slice(0, 3).join();
    })()"""
    with browser.opened(chrome, tiny_page.path, color_scheme=scheme) as found:
        page, last = found.page, "pagedJax.show(pagedJax.frames('paged') - 1)"
        page.evaluate(last)
        assert page.evaluate(colour) == paper[scheme]
        drawn = page.evaluate(free)
        for view in VIEWS:
            page.locator(f"#tab-{view}").click()
            page.locator("#theme").click()
            assert page.evaluate(colour) == paper[other], view
            page.locator("#theme").click()
            assert page.evaluate(colour) == paper[scheme], view
        page.locator("#tab-memory").click()
        page.locator("#theme").click()
        browser.wait_until(page, f"{free} !== '{drawn}'")
        page.reload()
        page.wait_for_selector("#play")
        assert page.evaluate(colour) == paper[other]
        assert found.problems == []


def test_three_views_have_one_timeline(page, tiny_page):
    ends = {name: len(run.moments) - 1 for name, run in tiny_page.recorded.items()}
    memory = max(ends[name] for name in ("paged", "max", "pow2", "oracle"))
    batching = max(ends["paged"], ends["paged_static"])
    assert memory != batching
    for k in (6, max(memory, batching)):
        longest = "memory" if memory > batching or k == 6 else "batching"
        page.locator(f"#tab-{longest}").click()
        page.evaluate("k => pagedJax.show(k)", k)
        page.locator("#tab-sharing").click()
        page.evaluate("pagedJax.show(2)")
        for view, last in (("memory", memory), ("batching", batching)) * 2:
            page.locator(f"#tab-{view}").click()
            assert page.evaluate("pagedJax.at") == min(k, last)
        page.locator("#tab-sharing").click()
        assert page.evaluate("pagedJax.at") == 2


@pytest.mark.parametrize(
    "view, label",
    [
        ("sharing", "What is served"),
        ("batching", "When blocks run out"),
        ("together", "System"),
    ],
)
def test_choices_say_what_they_are_of(page, view, label):
    page.locator(f"#tab-{view}").click()
    assert page.get_by_role("radiogroup", name=label, exact=True).is_visible()
    assert page.get_by_text(label, exact=True).is_visible()


def test_a_choice_keeps_the_focus(page):
    page.locator("#tab-sharing").click()
    page.get_by_role("radio", name="Four samples").focus()
    for key, chosen in (("ArrowRight", "beam"), ("ArrowLeft", "parallel")):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.value") == chosen


def test_the_gantt_chart_is_there_as_a_table(page, tiny_page):
    page.locator("#tab-batching").click()
    page.locator(".as-table summary").first.click()
    # It is made when it is opened first, which the browser says a little later.
    page.locator(".requests tbody tr").first.wait_for()
    moments = tiny_page.recorded["paged"].moments
    activity = np.stack([moment.activity for moment in moments], axis=1)
    rows = page.locator(".requests tbody tr").all_inner_texts()
    assert len(rows) == len(activity)
    times_it_gave_way = 0
    ends_of = {}
    for doing, row in zip(activity, rows):
        name, comes, begins, ends, waited, gave_way = map(int, row.split())
        ends_of.setdefault(ends, []).append(str(name))
        ran = np.flatnonzero(np.isin(doing, (Activity.PREFILL, Activity.DECODE)))
        waits = np.isin(doing, (Activity.WAITING, Activity.PREEMPTED))
        assert comes - 1 == np.flatnonzero(doing != Activity.ABSENT)[0]
        assert (begins - 1, ends - 1) == (ran[0], ran[-1])
        assert waited == waits.sum()
        times_it_gave_way += gave_way
    assert times_it_gave_way > 0
    page.locator("#tab-memory").click()
    for ends, names in ends_of.items():
        page.evaluate("k => pagedJax.show(k)", ends - 1)
        said = page.locator(".caption").first.inner_text()
        assert f"Iteration {ends}." in said and f"Ended: {', '.join(names)}." in said


@pytest.mark.parametrize("locale", ["en-GB", "zh-CN"])
@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_nothing_sticks_out(chrome, tiny_page, width, locale):
    options = {"viewport": {"width": width, "height": 800}, "locale": locale}
    with browser.opened(chrome, tiny_page.path, **options) as found:
        for view, k in itertools.product(VIEWS, (0, 12, 9999)):
            found.page.locator(f"#tab-{view}").click()
            found.page.evaluate("k => pagedJax.show(k)", k)
            wide = found.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, (view, k)
        assert found.problems == []

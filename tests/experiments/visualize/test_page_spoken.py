"""What a screen reader and the keyboard find on the page."""

import numpy as np
import pytest

from experiments.visualize.recorder import Activity

VIEWS = ["memory", "sharing", "batching", "together"]


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


@pytest.mark.parametrize("view", VIEWS)
def test_only_what_is_meant_to_be_is_spoken(page, view):
    page.locator(f"#tab-{view}").click()
    live = page.evaluate(
        "[...document.querySelectorAll('output, [aria-live]')]"
        ".filter((e) => (e.ariaLive ?? 'polite') !== 'off').map((e) => e.className)"
    )
    # What happens in an iteration, and what the sliders come to.
    assert live == (["caption", "hidden"] if view == "together" else ["hidden"])
    assert page.locator("#scrub").get_attribute("aria-valuetext")


def test_cards_say_who_names_them(page, tiny_page):
    page.locator("#tab-sharing").click()
    for k, moment in enumerate(tiny_page.recorded["parallel"].moments):
        page.evaluate("k => pagedJax.show(k)", k)
        said = page.evaluate(
            "[...document.querySelectorAll('.card:not(.gone)')].map("
            "(c) => [Number(c.dataset.block), c.querySelector('.owners').textContent])"
        )
        named = {}
        for row in np.flatnonzero(moment.owner >= 0):
            for block in moment.table[row, : moment.num_blocks[row]].tolist():
                named.setdefault(block, []).append("ABCD"[moment.owner[row]])
        assert dict(said) == {
            block: f"named by {', '.join(sorted(names))}"
            for block, names in named.items()
        }


def test_view_3_speaks_of_both_runs(page, tiny_page):
    page.locator("#tab-batching").click()
    for k in (3, 12, 9999):
        page.evaluate("k => pagedJax.show(k)", k)
        said = page.locator("#live").text_content()
        for kind, name in (("Continuous", "paged"), ("Static", "paged_static")):
            run = tiny_page.recorded[name]
            if k >= run.iterations:
                doing = f"All done after {run.iterations} iterations."
            else:
                ran = (Activity.PREFILL, Activity.DECODE)
                running = np.isin(run.moments[k].activity, ran).sum()
                doing = f"Iteration {k + 1}: {running} at work"
            assert f"{kind} batching: {doing}" in said


def test_a_chip_that_leaves_hands_its_focus_on(page, tiny_page):
    moments = tiny_page.recorded["paged"].moments
    names = "[...document.querySelectorAll('.chip b')].map((b) => b.textContent)"
    focused = "document.activeElement.querySelector('b')?.textContent"
    (k, gone) = next(
        (k, s)
        for k in range(1, len(moments))
        for s in np.flatnonzero(moments[k].activity == Activity.DONE)
        if moments[k - 1].activity[s] == Activity.DECODE
    )
    page.evaluate("k => pagedJax.show(k)", k - 1)
    before = page.evaluate(names)
    place = before.index(str(gone + 1))
    page.locator(".chip").nth(place).focus()
    page.keyboard.press("ArrowRight")
    after = page.evaluate(names)
    assert str(gone + 1) not in after
    assert page.evaluate(focused) == after[min(place, len(after) - 1)]


def test_a_chip_that_moves_keeps_its_focus(page, tiny_page):
    moments = tiny_page.recorded["paged"].moments
    ran = (Activity.PREFILL, Activity.DECODE)
    (k, moved) = next(
        (k, s)
        for k in range(1, len(moments))
        for s in np.flatnonzero(moments[k].activity == Activity.PREEMPTED)
        if moments[k - 1].activity[s] in ran
    )
    page.evaluate("k => pagedJax.show(k)", k - 1)
    page.locator(f".chip:has(b:text-is('{moved + 1}'))").focus()
    page.keyboard.press("ArrowRight")
    focused = "document.activeElement.querySelector('b')?.textContent"
    assert page.evaluate(focused) == str(moved + 1)
    page.keyboard.press("End")
    assert page.locator(".chip").count() == 0
    assert page.evaluate("document.activeElement.className") == "chips"

"""Arrow keys belong to the timeline, but for groups that were reached by keyboard."""

import pytest

AT = "pagedJax.at"
CHOICES = [
    ("sharing", "Beam search", "Four samples"),
    ("batching", "swap out", "compute again"),
    ("together", "max", "paged"),
]


@pytest.fixture(autouse=True)
def as_before(page):
    """Chooses again, in the end, what is chosen at first."""
    yield
    for view, _, first in CHOICES:
        page.locator(f"#tab-{view}").click()
        page.get_by_role("radio", name=first, exact=True).click()


@pytest.mark.parametrize("view, other, first", CHOICES)
def test_after_a_click_on_a_choice_arrows_step(page, view, other, first):
    page.locator(f"#tab-{view}").click()
    page.evaluate("pagedJax.show(3)")
    radio = page.get_by_role("radio", name=other, exact=True)
    radio.click()
    for key, at in (("ArrowRight", 4), ("ArrowRight", 5), ("ArrowLeft", 4)):
        page.keyboard.press(key)
        assert page.evaluate(AT) == at
        assert radio.get_attribute("aria-checked") == "true"


@pytest.mark.parametrize("view, other, first", CHOICES)
def test_a_choice_reached_by_keyboard_has_its_arrows(page, view, other, first):
    page.locator(f"#tab-{view}").click()
    page.evaluate("pagedJax.show(3)")
    chosen = "document.activeElement.getAttribute('aria-checked')"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(chosen) == "true":
            break
    before = page.evaluate("document.activeElement.dataset.value")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(AT) == 3
    assert page.evaluate(chosen) == "true"
    after = page.evaluate("document.activeElement.dataset.value")
    assert after != before
    page.keyboard.press("Space")  # chooses what is chosen: keeps the focus
    assert page.evaluate("document.activeElement.dataset.value") == after


def test_after_a_click_on_a_tab_arrows_step(page):
    page.locator("#tab-batching").click()
    page.evaluate("pagedJax.show(3)")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("pagedJax.view") == "batching"
    assert page.evaluate(AT) == 4


def test_tabs_reached_by_keyboard_have_their_arrows(page):
    page.locator("#tab-memory").click()
    page.locator("#theme").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-memory"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("pagedJax.view") == "sharing"
    assert page.evaluate("document.activeElement.id") == "tab-sharing"

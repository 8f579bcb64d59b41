"""Charts: what the mark and the legend say, and which line is whose."""

import browser
import pytest

# Of each line in a legend: its name, colour and dashes.
STYLES = """
(items) => Object.fromEntries(items.map((item) => {
  const line = item.querySelector("line");
  const style = [line.getAttribute("stroke"), line.getAttribute("stroke-dasharray")];
  return [item.childNodes[1].textContent, style];
}))
"""
# Of each chart over iterations: where its mark is, and where the axis has iteration 20.
PLACES = """
() => [...document.querySelectorAll("#main .chart svg[role]")]
  .filter((svg) => !svg.closest(".what-if")).map((svg) => {
    const tick = [...svg.querySelectorAll(".axis .tick")]
      .find((one) => one.textContent === "20" && one.closest(".grid") == null);
    const left = (element) => element.getBoundingClientRect().left;
    return [left(svg.querySelector(".cursor")), left(tick.querySelector("line"))];
  })
"""


@pytest.mark.parametrize(
    "view, charts", [("memory", 1), ("batching", 4), ("together", 1)]
)
def test_the_mark_is_at_the_iteration_that_is_told(page, view, charts):
    page.locator(f"#tab-{view}").click()
    browser.wait_for_drawing(page)
    page.evaluate("pagedJax.show(19)")
    assert page.locator("#position").inner_text().startswith("20 / ")
    places = page.evaluate(PLACES)
    assert len(places) == charts
    for mark, tick in places:
        assert mark == pytest.approx(tick, abs=1.5)


@pytest.mark.parametrize("view", ["memory", "batching", "together"])
def test_a_click_into_a_chart_goes_to_the_iteration_there(page, view):
    page.locator(f"#tab-{view}").click()
    browser.wait_for_drawing(page)
    page.evaluate("pagedJax.show(19)")
    for chart in page.locator("#main .chart svg[role]:has(.cursor)").all():
        if chart.evaluate("(svg) => svg.closest('.what-if') != null"):
            continue
        page.evaluate("pagedJax.show(19)")
        chart.scroll_into_view_if_needed()
        box = chart.locator(".cursor").bounding_box()
        page.evaluate("pagedJax.show(3)")
        page.mouse.click(box["x"] - 1, box["y"] + box["height"] / 2)
        assert page.evaluate("pagedJax.at") == 19


def test_a_system_has_one_line_on_the_whole_page(page):
    def styles(legends):
        return page.locator(legends).evaluate_all(STYLES)

    memory = styles(".main > .chart .legend li")
    assert len({tuple(style) for style in memory.values()}) == 4
    page.locator("#tab-together").click()
    race = styles(".main > .chart .legend li")
    assert {name: race[name] for name in ("paged", "max", "oracle")} == {
        name: memory[name] for name in ("paged", "max", "oracle")
    }
    for chosen in ("max", "paged"):
        page.get_by_role("radio", name=chosen, exact=True).click()
        simulated = styles(".what-if .chart .legend li")
        assert simulated.pop("static batches") == race["max, static batches"]
        assert simulated == memory


def test_legends_at_the_end_have_numbers(page):
    page.locator("#tab-batching").click()
    page.evaluate("pagedJax.show(9999)")
    legends = page.locator(".chart .legend b").all_inner_texts()
    assert legends == ["0", "0", "0%", "0%"]

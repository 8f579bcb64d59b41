"""What the page draws and says is what was recorded, measured and simulated."""

import itertools

import numpy as np
import pytest
from page_numbers import percent, shares_in_percent

from experiments.metrics import block_saving, utilization
from experiments.visualize.recorder import LOGGED
from paged_jax import Engine, Field

# Okabe and Ito, as palette.js has them; from the eighth request on with a pattern.
COLOURS = ["e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7"]
FREE = "efece5"
MEMORY = ["paged", "max", "pow2", "oracle"]
LADDER = ["max_static", "max", "oracle", "paged_static", "paged"]
# What comes into sight is drawn a frame later.
SETTLED = """
() => new Promise((done) => {
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)));
})
"""
# The pixels of a stretch near the bottom of each block, as `rrggbb`.
SAMPLE = """
(number) => {
  const canvas = document.querySelectorAll(".pool canvas")[number];
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const [columns, rows] = [16, Math.ceil(BLOCKS / 16)];
  const step = [canvas.width / (columns - 0.1), canvas.height / (rows - 0.1)];
  const hex = (x) => x.toString(16).padStart(2, "0");
  return [...Array(BLOCKS).keys()].map((i) => {
    const [x, y] = [(i % columns) * step[0], Math.floor(i / columns) * step[1]];
    const [width, height] = [step[0] * 0.9, step[1] * 0.9];
    const wide = Math.floor(width * 0.6);
    const { data } = pen.getImageData(
      Math.ceil(x + width * 0.2), Math.floor(y + height * 0.88), wide, 1);
    return [...Array(wide).keys()].map(
      (j) => [...data.slice(4 * j, 4 * j + 3)].map(hex).join(""));
  });
}
"""


@pytest.mark.parametrize("number, name", [*enumerate(MEMORY)])
def test_a_block_has_the_colour_of_its_owner(page, tiny_page, number, name):
    run = tiny_page.recorded[name]
    moments, blocks = run.moments, run.config.total_blocks
    sample = SAMPLE.replace("BLOCKS", str(blocks))
    page.locator(".pool canvas").nth(number).scroll_into_view_if_needed()
    page.mouse.move(1, 1)
    seen, patterned = set(), set()
    for k in np.linspace(0, len(moments) - 1, 12).astype(int).tolist():
        page.evaluate("k => pagedJax.show(k)", k)
        page.evaluate(SETTLED)
        strips = page.evaluate(sample, number)
        owned = owners(moments[k], run.config.block_size)
        for block in range(1, blocks + 1):
            strip = set(strips[block - 1])
            if block not in owned:
                assert strip == {FREE}, (k, block)
                continue
            owner, tokens = owned[block]
            assert FREE not in strip
            if not tokens:
                continue
            # Patterns are darker lines over the colour.
            assert max(strip, key=brightness) == COLOURS[owner % 7], (k, block)
            seen.add(owner)
            if len(strip) > 1:
                patterned.add(owner)
    assert seen == set(range(8))
    assert patterned == {7}


def owners(moment, size: int) -> dict[int, tuple[int, int]]:
    """Returns the sequence that has each block, and how many tokens are in it."""
    found = {}
    for row in np.flatnonzero(~moment.on_host & (moment.owner >= 0)):
        table = moment.table[row, : moment.num_blocks[row]]
        for column, block in enumerate(table.tolist()):
            tokens = np.clip(moment.length[row] - column * size, 0, size)
            found[block] = int(moment.owner[row]), int(tokens)
    return found


def brightness(colour: str) -> int:
    """Returns the sum of the three parts of `rrggbb`."""
    return sum(bytes.fromhex(colour))


def test_view_1_says_where_the_memory_goes(page, tiny_page):
    config = tiny_page.recorded["paged"].config
    slots = config.total_blocks * config.block_size
    lines = page.locator(".numbers")
    rounded = corrected = 0
    for k, (i, name) in itertools.product(range(0, 34, 2), enumerate(MEMORY)):
        page.evaluate("k => pagedJax.show(k)", k)
        moments = tiny_page.recorded[name].moments
        log = dict(zip(LOGGED, moments[min(k, len(moments) - 1)].log.tolist()))
        live, reserved = log[Field.LIVE], log[Field.RESERVED]
        ahead = log[Field.RESERVATION]
        never = reserved - live - ahead
        rounded += never - log[Field.INTERNAL]
        shares = [x / slots for x in (live, ahead, never, slots - reserved)]
        parts = shares_in_percent(shares)
        corrected += parts != [percent(share) for share in shares]
        said = lines.nth(i).inner_text()
        assert [word for word in said.split() if "%" in word] == parts, (k, name)
    assert rounded > 0 and corrected > 0


def test_view_1_says_how_large_a_block_is_and_why_some_wait(
    page, tiny_page, tiny_model
):
    config = tiny_page.recorded["paged"].config
    cache = Engine(tiny_model, config).state.cache
    lead = page.locator("#main .lead").inner_text()
    assert f"a token take {cache.block_nbytes // config.block_size:,} bytes" in lead
    assert f"a block {cache.block_nbytes:,} bytes" in lead
    said = f"at most {config.token_budget} tokens"
    assert said in page.locator(".caption + .fine").first.inner_text()


def test_view_1_ends(page, tiny_page):
    run = tiny_page.recorded["paged"]
    page.evaluate("k => pagedJax.show(k)", run.iterations - 1)
    caption, numbers = page.locator(".caption").first, page.locator(".numbers").first
    assert "All done" not in caption.inner_text()
    assert "Ended: " in caption.inner_text()
    over = f"All done after {run.iterations} iterations."
    for k in (run.iterations, 9999):
        page.evaluate("k => pagedJax.show(k)", k)
        assert caption.inner_text().startswith(over)
        assert ("Gone, " in caption.inner_text()) == (k == run.iterations)
        assert "Ended: " not in caption.inner_text()
        assert "0 running, 8 of 8 done" in numbers.inner_text()
        assert page.locator(".block-table span").count() == 0


def test_view_2_ends_with_all_blocks_free(page, tiny_page):
    page.locator("#tab-sharing").click()
    page.evaluate("pagedJax.show(9999)")
    run = tiny_page.recorded["parallel"]
    blocks = run.config.total_blocks
    said = page.locator(".caption").inner_text()
    assert f"All done after {run.iterations} iterations" in said
    assert f"Free blocks: {blocks} of {blocks}." in said
    happened = page.locator(".events").inner_text()
    assert "Ended: A, B, C, D." in happened
    freed = np.flatnonzero(run.moments[-2].ref_count).tolist()
    assert f"Nobody names blocks {', '.join(map(str, freed))} any more" in happened
    assert page.locator(".bars .numbers").inner_text() == "No block is in use any more."
    assert page.locator(".card:not(.gone)").count() == 0
    assert set(page.locator(".card.gone .ref").all_inner_texts()) == {"free again"}


def test_the_ablation_has_what_was_measured(page, tiny_page):
    page.locator("#tab-together").click()
    rows = page.locator(".ablation tbody tr").all()
    speeds = []
    for name, row in zip(LADDER, rows, strict=True):
        run, timed = tiny_page.recorded[name], tiny_page.data["timed"][name]
        log = np.zeros((run.iterations, len(Field)))
        log[:, list(LOGGED)] = [m.log for m in run.moments[: run.iterations]]
        speeds.append(timed["outputTokens"] / timed["seconds"])
        cells = row.locator("td").all_inner_texts()
        used, running, iterations, speed, ratio = cells[:5]
        assert abs(int(used[:-1]) / 100 - utilization(log)) <= 0.0051
        assert float(running) == pytest.approx(log[:, Field.RUNNING].mean(), abs=0.051)
        assert int(iterations) == run.iterations
        assert float(speed) == pytest.approx(speeds[-1], abs=0.051)
        assert float(ratio[:-1]) == pytest.approx(speeds[-1] / speeds[0], abs=0.0051)


def test_view_4_says_what_copies_on_write_save(page, tiny_page):
    page.locator("#tab-together").click()
    said = page.locator(".saving").inner_text()
    for name in ("parallel", "beam"):
        moments = tiny_page.recorded[name].moments[:-1]
        log = np.zeros((len(moments), len(Field)))
        log[:, Field.LOGICAL_BLOCKS] = [m.num_blocks.sum() for m in moments]
        log[:, Field.PHYSICAL_BLOCKS] = [(m.ref_count > 0).sum() for m in moments]
        assert percent(block_saving(log)) in said.split()


def test_legends_say_what_is_at_the_mark(page, tiny_page):
    page.evaluate("pagedJax.show(7)")
    shown = page.locator(".chart .legend b").all_inner_texts()
    column = LOGGED.index(Field.LIVE)
    for name, said in zip(("paged", "max", "pow2", "oracle"), shown, strict=True):
        run = tiny_page.recorded[name]
        slots = run.config.total_blocks * run.config.block_size
        live = 100 * run.moments[7].log[column] / slots
        assert abs(int(said.removesuffix("%")) - live) <= 0.51

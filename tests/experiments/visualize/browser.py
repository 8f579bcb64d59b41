"""A page in Debian's chromium, without a window."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


class Opened(NamedTuple):
    """A page, and what is not to be there.

    Attributes:
      page: Playwright's page.
      problems: errors of the page and of its console.
      requests: addresses that it asked for.
    """

    page: Any
    problems: list[str]
    requests: list[str]


def find_chromium() -> str:
    """Returns the browser; without one the test is skipped, or fails in CI."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        why = "NO BROWSER: chromium is not there (scripts/setup_browser installs it)"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(why)
        pytest.skip(why)
    return path


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Starts the browser."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    # Without a sandbox: it needs what containers, and root in them, are not given.
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(
    browser: Any, path: Any, anchor: str = "", **options: Any
) -> Iterator[Opened]:
    """Opens a file, and notes what goes wrong and what is asked for."""
    context = browser.new_context(
        **{"viewport": {"width": 1280, "height": 900}, **options}
    )
    page = context.new_page()
    problems: list[str] = []
    requests: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console", lambda m: m.type in ("error", "warning") and problems.append(m.text)
    )
    page.on("request", lambda request: requests.append(request.url))
    try:
        page.goto(f"file://{path}{anchor}")
        page.wait_for_selector("#play")
        yield Opened(page, problems, requests)
    finally:
        context.close()


def wait_until(page: Any, expression: str, seconds: float = 30) -> None:
    """Waits until an expression is true.

    Playwright's own way has the page evaluate a text, which its policy forbids.
    """
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not in {seconds} s: {expression}"
        time.sleep(0.02)


def wait_for_drawing(page: Any) -> None:
    """Waits until all is drawn that waits to be told how wide it is.

    Browsers tell sizes once a frame, after what asks for the frame itself.
    """
    frame = "new Promise((begun) => requestAnimationFrame(begun))"
    page.evaluate(f"{frame}.then(() => {frame})")

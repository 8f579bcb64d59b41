"""The page: one HTML file that holds its style, its script and what was recorded."""

import json
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data"
# What it shares with the reports of experiments.
_THEME = Path(__file__).parent.parent / "data" / "theme.css"
# Read by the built script; a change of what is below them needs a new number.
FORMAT = 3


def render(data: dict[str, Any]) -> str:
    """Returns the page as HTML.

    Args:
      data: what it shows, JSON values. Texts of any kind are safe: the script puts them
        into text nodes, and no `<` of theirs is in the file.
    """
    parts = {
        "style": _THEME.read_text("utf-8") + _read("page.css"),
        "script": _read("page.js"),
        "data": script_safe(
            json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        ),
    }
    page = _read("page.html")
    for name, part in parts.items():
        before, mark, after = page.partition(f"/*{name}*/")
        if not mark:
            raise ValueError(f"page.html has no place for the {name}")
        page = before + part + after
    return page


def simulations() -> dict[str, Any]:
    """Returns the runs of the simulator that ship with the page."""
    return json.loads(_read("simulations.json"))


def script_safe(text: str) -> str:
    """Returns JSON text that cannot end or open anything inside a script element."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _read(name: str) -> str:
    return (_DATA / name).read_text("utf-8")

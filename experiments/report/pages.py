"""Pages: one run, several, or two compared; each one HTML file, all values escaped."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import jinja2
import markupsafe

from experiments.report.comparison import compare
from experiments.report.run_record import RunRecord
from experiments.report.run_section import run_section

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("experiments", "data"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _breakable(name: str) -> markupsafe.Markup:
    """Returns a dotted name, escaped, that a narrow column may break at its joints."""
    pieces = re.split(r"(?<=[._])", name)
    return markupsafe.Markup("<wbr>").join(pieces)


_ENVIRONMENT.filters["breakable"] = _breakable


def render(
    summary: dict[str, Any],
    figures: dict[str, tuple[str, bytes]],
    command: str,
    description: str = "",
    swept: Iterable[str] = (),
) -> str:
    """Returns the report of a run as HTML, all values escaped.

    Args:
      summary: as in `summary.json`.
      figures: caption and PNG by name.
      command: runs the experiment again.
      description: what the experiment is, in a line.
      swept: keys of the sweep.
    """
    return render_run(
        RunRecord(
            name=summary["experiment"],
            rows=summary["rows"],
            claims=summary["claims"],
            config=summary["config"],
            environment=summary["environment"],
            figures=figures,
            command=command,
            description=description,
            swept=tuple(swept),
        )
    )


def render_run(run: RunRecord) -> str:
    """Returns the report of a run as HTML."""
    return _page("report.html.jinja", title=run.name, runs=[run_section(run)])


def render_runs(runs: list[RunRecord]) -> str:
    """Returns the report of several runs as HTML, one after the other."""
    title = f"{len(runs)} runs"
    return _page("report.html.jinja", title=title, runs=[*map(run_section, runs)])


def render_comparison(before: RunRecord, after: RunRecord) -> str:
    """Returns two runs side by side as HTML, and the report of each.

    Raises:
      UserError: they have nothing in common.
    """
    runs = [
        dataclasses.replace(before, name=f"Before: {before.name}"),
        dataclasses.replace(after, name=f"After: {after.name}"),
    ]
    return _page(
        "comparison.html.jinja",
        title=f"{before.name}, before and after",
        runs=[*map(run_section, runs)],
        found=compare(before, after),
    )


def _page(template: str, **values: Any) -> str:
    html = _ENVIRONMENT.get_template(template).render(values)
    # JSON can hold halves of characters, which no UTF-8 file can.
    return html.encode("utf-8", "replace").decode("utf-8")

"""The HTML report: one file that needs no other."""

import base64
import json
from collections.abc import Iterable
from typing import Any

import jinja2

from experiments import tables

_LOADER = jinja2.PackageLoader("experiments", "data")


def render(
    summary: dict[str, Any],
    figures: dict[str, tuple[str, bytes]],
    command: str,
    description: str = "",
    swept: Iterable[str] = (),
) -> str:
    """Returns the report as HTML, all values escaped.

    Args:
      summary: as in `summary.json`.
      figures: caption and PNG by name.
      command: runs the experiment again.
      description: what the experiment is, in a line.
      swept: keys of the sweep.
    """
    rows, claims = summary["rows"], summary["claims"]
    return _template("report.html.jinja").render(
        name=summary["experiment"],
        description=description,
        about=_about(summary["config"], summary["environment"], set(swept)),
        columns=tables.HEADLINE,
        headline=tables.headline_rows(rows),
        detail_columns=tables.DETAILS,
        details=tables.detail_rows(rows),
        traffic_columns=tables.TRAFFIC,
        traffic=tables.traffic_rows(rows),
        gains=tables.gain_rows(rows, swept),
        claims=_claims(claims),
        held=sum(claim["holds"] is True for claim in claims),
        figures=_figures(figures),
        workloads=_workloads(rows),
        memory_plan=rows[0]["details"]["memory_plan"] if rows else [],
        config=json.dumps(summary["config"], indent=2),
        environment=json.dumps(summary["environment"], indent=2),
        command=command,
    )


def render_study(
    summary: dict[str, Any],
    figures: dict[str, tuple[str, bytes]],
    command: str,
    description: str = "",
) -> str:
    """Returns the report of studies as HTML, all values escaped; see `render`."""
    claims = summary["claims"]
    return _template("study_report.html.jinja").render(
        name=summary["experiment"],
        description=description,
        claims=_claims(claims),
        held=sum(claim["holds"] is True for claim in claims),
        judged=sum(claim["holds"] is not None for claim in claims),
        figures=_figures(figures),
        config=json.dumps(summary["config"], indent=2),
        environment=json.dumps(summary["environment"], indent=2),
        command=command,
    )


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=_LOADER, autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(name)


def _claims(claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **claim,
            "expected": tables.expected(claim),
            "found": tables.number(claim["measured"]),
            "difference": tables.difference(claim),
        }
        for claim in claims
    ]


def _figures(figures: dict[str, tuple[str, bytes]]) -> list[dict[str, str]]:
    return [
        {"caption": caption, "uri": _data_uri(png), "name": name}
        for name, (caption, png) in figures.items()
    ]


def _about(
    config: dict[str, Any], environment: dict[str, Any], swept: set[str]
) -> list[tuple[str, str]]:
    """Returns what was run, where and when, as names and values."""

    def value(key: str) -> Any:
        *group, name = key.split(".")
        inside = config[group[0]] if group else config
        return "(as swept)" if key in swept else inside[name]

    lengths = (
        f"{value('workload.lengths')}'s, divided by {value('workload.length_scale')}"
    )
    if value("workload.prompt_lengths") == "as_is":
        lengths += " (outputs only; prompts as they are)"
    blocks = value("engine.num_blocks")
    budget = (
        f"{value('engine.full_length_requests')} requests of the model length"
        if blocks is None
        else f"{blocks} blocks"
    )
    git = environment["git"]
    changed = ", with changes" if git and git["dirty"] else ""
    return [
        ("model", f"{value('model')}, {value('engine.dtype')}"),
        ("preset", value("preset")),
        ("lengths", lengths),
        ("model length", f"{value('engine.max_model_len')} tokens"),
        ("KV budget", budget),
        (
            "machine",
            f"{environment['cpu']}, {environment['cores']} cores, "
            f"{environment['memory_bytes'] / 2**30:.0f} GiB; JAX on "
            + ", ".join(environment["devices"]),
        ),
        (
            "versions",
            f"Python {environment['python']}, jax {environment['packages']['jax']}",
        ),
        ("started", environment.get("started", "unknown")),
        ("commit", git["commit"] + changed if git else "unknown"),
    ]


def _workloads(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns each distinct set of requests once."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        described = row["details"]["workload"]
        name = row["cell"]["workload"]
        rate = row["details"]["arrival_rate"]
        found.setdefault(name, described | {"name": name, "rate": rate})
    return list(found.values())


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()

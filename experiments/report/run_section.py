"""What a run was and came to, ready for the templates."""

import base64
import json
from typing import Any

from experiments import tables
from experiments.report.cell_tables import further_tables, main_tables, served_rows
from experiments.report.claim_lines import claim_lines, kinds
from experiments.report.run_record import RunRecord, is_number, leaves

_SPREADS = {
    f"{side}_tokens.{value}"
    for side in ("input", "output")
    for value in ("mean", "p50", "p90")
} | {"requests", "prefix_tokens"}


def run_section(run: RunRecord) -> dict[str, Any]:
    """Returns the values that `run.html.jinja` shows."""
    served = served_rows(run.rows)
    swept = [key for key in run.swept if all(key in row["cell"] for row in served)]
    return {
        "name": run.name,
        "description": run.description,
        "about": about(run),
        "num_cells": len(run.rows),
        "main_tables": main_tables(run.rows),
        "further_tables": further_tables(run.rows),
        "gains": tables.gain_rows(served, swept),
        "claims": claim_lines(run.claims),
        "held": sum(claim["holds"] is True for claim in run.claims),
        "judged": sum(claim["holds"] is not None for claim in run.claims),
        "kinds": kinds(run.claims),
        "figures": [
            {"name": name, "caption": caption, "uri": _data_uri(png)}
            for name, (caption, png) in run.figures.items()
        ],
        "workloads": _workloads(served),
        "memory_plan": served[0]["details"].get("memory_plan") if served else None,
        "config": _pretty(run.config),
        "environment": _pretty(run.environment),
        "command": run.command,
    }


def about(run: RunRecord) -> list[tuple[str, str]]:
    """Returns what was run, where and when, as names and values."""
    config, environment = leaves(run.config), leaves(run.environment)
    facts = [("results", run.folder)] if run.folder else []
    facts += _settings(config, set(run.swept))
    if "cpu" in environment:
        machine = f"{environment['cpu']}, {environment.get('cores')} cores"
        if is_number(environment.get("memory_bytes")):
            machine += f", {environment['memory_bytes'] / 2**30:.0f} GiB"
        if environment.get("devices"):
            machine += "; JAX on " + ", ".join(map(str, environment["devices"]))
        facts.append(("machine", machine))
    if "python" in environment:
        jax = environment.get("packages.jax")
        facts.append(("versions", f"Python {environment['python']}, jax {jax}"))
    facts.append(("started", str(environment.get("started", "unknown"))))
    if line := tables.disturbed_line(run.rows):
        facts.append(("disturbed", line))
    commit = environment.get("git.commit", "unknown")
    changed = ", with changes" if environment.get("git.dirty") else ""
    facts.append(("commit", f"{commit}{changed}"))
    return facts


def _settings(config: dict[str, Any], swept: set[str]) -> list[tuple[str, str]]:
    """Returns the settings that matter most, of those that a run has."""

    def value(key: str) -> str:
        return "(as swept)" if key in swept else str(config[key])

    facts = []
    if {"model", "engine.dtype"} <= config.keys():
        facts.append(("model", f"{value('model')}, {value('engine.dtype')}"))
    elif "model" in config:
        facts.append(("model", value("model")))
    if "preset" in config:
        facts.append(("preset", value("preset")))
    if {"workload.lengths", "workload.length_scale"} <= config.keys():
        lengths = (
            f"{value('workload.lengths')}'s, divided by "
            f"{value('workload.length_scale')}"
        )
        if config.get("workload.prompt_lengths") == "as_is":
            lengths += " (outputs only; prompts as they are)"
        facts.append(("lengths", lengths))
    if "engine.max_model_len" in config:
        facts.append(("model length", f"{value('engine.max_model_len')} tokens"))
    if config.get("engine.num_blocks") is not None:
        facts.append(("KV budget", f"{value('engine.num_blocks')} blocks"))
    elif "engine.full_length_requests" in config:
        requests = value("engine.full_length_requests")
        facts.append(("KV budget", f"{requests} requests of the model length"))
    if "seed" in config:
        facts.append(("seed", value("seed")))
    return facts


def _workloads(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns each distinct set of requests once, of the rows that describe theirs."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        described = row["details"].get("workload")
        if not isinstance(described, dict) or not _SPREADS <= leaves(described).keys():
            continue
        name = row["cell"]["workload"]
        rate = row["details"].get("arrival_rate")
        found.setdefault(name, described | {"name": name, "rate": rate})
    return list(found.values())


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()

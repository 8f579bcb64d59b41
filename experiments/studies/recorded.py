"""Recorded traces: what each way to manage memory makes of real requests.

Nothing of it is the paper's: the numbers stand alone, with those of the prefix cache
beside what a cache of unlimited size would find.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from typing import Any

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.errors import UserError
from experiments.simulator.costs import Overheads
from experiments.simulator.hardware import HARDWARE, Hardware
from experiments.simulator.measured_machine import Machine, read_machine
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.readers import FORMATS, NAMED, TEXTS
from experiments.simulator.results import Results
from experiments.simulator.serve_recorded import Recording, serve_recorded
from experiments.simulator.systems import overheads_of
from experiments.studies import variant_figures
from experiments.studies.seeds import Estimate, over_seeds
from experiments.studies.study import Figures, Scale, Task
from experiments.studies.study_claim import study_claim
from experiments.studies.variants import words

TITLE = "A recorded trace"

# The memory managers, by what they are called here; and the prefix cache beside them.
_CACHED = "paged, prefix cache"
_WAYS = ("paged", _CACHED, "oracle", "pow2", "max")
# What a user says of it.
_RECORDING = tuple(
    field.name
    for field in dataclasses.fields(Recording)
    if field.name not in ("seed", "count_tokens")
)
_SERVING = ("block_size", "max_seqs", "token_budget")
# Of the software, beside the limits of the hardware.
_OVERHEADS = ("none", "paper", "measured")
_PAPERS = overheads_of("vllm")
# Metric to its name in figures, and its unit.
_QUANTITIES = {
    "normalized_mean_s": ("normalized latency", "s/token"),
    "first_token_mean_s": ("time to the first token", "s"),
    "first_token_p99_s": ("time to the first token, 99th percentile", "s"),
    "tokens_per_s": ("output", "tokens/s"),
    "mean_running": ("sequences at once", "mean over the iterations"),
    "utilization": ("KV utilization", "% of the granted slots"),
}
_DRAWN = ("normalized_mean_s", "first_token_p99_s", "mean_running", "utilization")


def tasks(scale: Scale) -> list[Task]:
    """Returns a task for each way; for each seed where arrivals are drawn.

    Raises:
      UserError: an option that cannot be used.
    """
    options = scale.options
    path = options["recording.path"]
    if not path:
        raise UserError(
            "options.recording.path is empty; give a file: "
            "--config.options.recording.path=FILE"
        )
    if not os.path.isfile(path):
        raise UserError(f"options.recording.path is {path!r}, which is no file")
    for key, allowed in (
        ("recording.format", FORMATS),
        ("serving.model", MODELS),
        ("serving.overheads", _OVERHEADS),
    ):
        if options[key] not in allowed:
            raise UserError(
                f"options.{key} is {options[key]!r}; use one of {', '.join(allowed)}"
            )
    for name in ("num_devices", *_SERVING):
        if options[f"serving.{name}"] < 1:
            raise UserError(
                f"options.serving.{name} is {options[f'serving.{name}']}; "
                "it must be 1 or more"
            )
    # Looked at here, where a bad value is still refused in a line.
    Recording(**{name: options[f"recording.{name}"] for name in _RECORDING})
    settings = dict(options) | {"recording.path": os.path.abspath(path)}
    settings |= _machine_settings(options)
    if not options["recording.rate"]:  # nothing is drawn
        return [Task(words(way), {"way": way} | settings) for way in _ways(scale)]
    return [
        Task(f"{words(way)}-{seed}", {"way": way, "seed": seed} | settings)
        for way in _ways(scale)
        for seed in scale.seeds
    ]


def _machine_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a machine that was measured; none of another."""
    hardware = options["serving.hardware"]
    if hardware in HARDWARE:
        if options["serving.overheads"] == "measured":
            raise UserError(
                f"options.serving.overheads is 'measured', and nothing was on "
                f"{hardware}; give a machine's summary.json as options.serving.hardware"
            )
        return {}
    if not os.path.isfile(hardware):
        raise UserError(
            f"options.serving.hardware is {hardware!r}; use one of "
            f"{', '.join(HARDWARE)}, or the summary.json of a run of "
            "--config=machine_costs"
        )
    if options["serving.num_devices"] > 1:
        raise UserError(
            f"options.serving.num_devices is {options['serving.num_devices']}; a "
            "machine that was measured has no link to others, so it must be 1"
        )
    machine = read_machine(hardware)._asdict()
    return {f"machine.{name}": value for name, value in machine.items()}


def _devices(settings: Mapping[str, Any]) -> tuple[Hardware, Overheads]:
    """Returns what a task runs on, and the overheads of its software."""
    name, overheads = settings["serving.hardware"], settings["serving.overheads"]
    if name in HARDWARE:
        return HARDWARE[name], _PAPERS if overheads == "paper" else Overheads()
    machine = Machine(*(settings[f"machine.{field}"] for field in Machine._fields))
    chosen = {"none": Overheads(), "paper": _PAPERS, "measured": machine.overheads()}
    return machine.hardware(), chosen[overheads]


def _ways(scale: Scale) -> list[str]:
    """Returns what is compared: asked for, or all that the recording allows."""
    asked = scale.options["serving.memory"]
    named = scale.options["recording.format"] in NAMED
    ways = list(asked) or [way for way in _WAYS if named or way != _CACHED]
    for way in ways:
        if way not in _WAYS:
            raise UserError(f"options.serving.memory has {way!r}; use some of {_WAYS}")
    return ways


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Serves the recording in one way."""
    way, format = settings["way"], settings["recording.format"]
    recording = Recording(
        **{name: settings[f"recording.{name}"] for name in _RECORDING},
        seed=settings.get("seed", 0),
        count_tokens=_token_counter() if format in TEXTS else None,
    )
    hardware, overheads = _devices(settings)
    served = serve_recorded(
        recording,
        settings["serving.model"],
        hardware,
        settings["serving.num_devices"],
        overheads=overheads,
        memory="paged" if way == _CACHED else way,
        prefix_caching=way == _CACHED,
        keep_requests=False,
        **{name: settings[f"serving.{name}"] for name in _SERVING},
    )
    return _metrics(served.results) | {
        "malformed": served.malformed.count,
        "malformed_named": served.malformed.named,
        "num_blocks": served.num_blocks,
        "max_model_len": served.max_model_len,
        "hit_ratio": 100 * served.hit_ratio,
        "infinite_ratio": None
        if served.infinite_ratio is None
        else 100 * served.infinite_ratio,
        "evicted_blocks": served.evicted_blocks,
    }


def _metrics(results: Results) -> dict[str, Any]:
    latencies, means = results.latencies, results.means
    found = {
        f"{name}_{what}_s": value
        for name in ("normalized", "first_token", "total")
        for what, value in (
            ("mean", latencies.mean(name)),
            ("p50", latencies.quantile(name, 0.5)),
            ("p99", latencies.quantile(name, 0.99)),
        )
    }
    return found | {
        "requests": latencies.count,
        "rejected": results.rejected,
        "seconds": results.seconds,
        "steps": results.steps,
        "tokens_per_s": means["tokens_per_s"],
        "mean_running": means["mean_running"],
        "utilization": 100 * means["kv_utilization"],
        "preemptions": means["preemptions"],
    }


@functools.cache
def _token_counter():
    """Returns what counts the tokens of a text: SmolLM2's tokenizer."""
    # Here: it reads the model's file, which most recordings do without.
    import paged_jax

    tokenizer = paged_jax.load_model("smollm2-135m").tokenizer
    return lambda text: len(tokenizer.encode(text))


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns the numbers, and whether the cache stays below what can be found."""
    source, software = _source(rows, scale)
    made = []
    for way in _ways(scale):
        for quantity, (_, unit) in _QUANTITIES.items():
            made.append(
                study_claim(
                    f"recorded.{quantity}.{words(way)}",
                    _found(rows, quantity, way),
                    paper=None,
                    unit=unit,
                    kind="predicted",
                    source=source,
                    note="; ".join(filter(None, (software, _left_out(rows, way)))),
                )
            )
    if _CACHED in _ways(scale):
        bound = _found(rows, "infinite_ratio", _CACHED)
        made.append(
            study_claim(
                "recorded.prefix_hit_ratio",
                _found(rows, "hit_ratio", _CACHED),
                paper=None,
                at_most=bound.mean if bound else None,
                unit="% of the prompts' tokens",
                kind="memory",
                source="what a cache finds that nothing is evicted from",
                note=software,
            )
        )
    return made


def _source(rows: list[Row], scale: Scale) -> tuple[str, str]:
    """Returns what was simulated, and what was assumed of its software."""
    model = MODELS[scale.options["serving.model"]].name
    if not rows:
        return f"{model}, simulated", ""
    hardware, overheads = _devices(rows[0]["cell"])
    software = "no overheads of software"
    if overheads != Overheads():
        whose = {
            "paper": "the paper's vLLM",
            "measured": "this engine, as fitted to it",
        }
        software = (
            f"overheads of {whose[scale.options['serving.overheads']]}: "
            f"{1e3 * overheads.step_s:.3g} ms a step, {1e3 * overheads.row_s:.3g} ms a "
            "sequence"
        )
    return f"{model} on {hardware.name}, simulated", software


def _left_out(rows: list[Row], way: str) -> str:
    """Returns what was not served, and why; empty if all was."""
    parts: dict[str, None] = {}
    for row in rows:
        if row["cell"]["way"] != way:
            continue
        metrics = row["metrics"]
        if metrics["rejected"]:
            parts[f"{metrics['rejected']} requests can never fit"] = None
        if metrics["malformed"]:
            named = "; ".join(metrics["malformed_named"])
            parts[f"{metrics['malformed']} malformed ({named})"] = None
    return "; ".join(parts)


def _found(rows: list[Row], quantity: str, way: str) -> Estimate | None:
    def read(metrics: dict[str, Any]) -> float:
        value = metrics[quantity]
        return math.nan if value is None else value

    return over_seeds(rows, read, way=way)


def draw(rows: list[Row], scale: Scale) -> Figures:
    """Draws what the ways differ in."""
    panels = [
        variant_figures.Panel(
            *_QUANTITIES[quantity],
            {"": [(way, _found(rows, quantity, way)) for way in _ways(scale)]},
        )
        for quantity in _DRAWN
    ]
    name = os.path.basename(scale.options["recording.path"])
    served = max((row["metrics"]["requests"] for row in rows), default=0)
    caption = f"{served:,} requests of {name}, by how memory is managed."
    return {"recorded.png": (caption, variant_figures.draw_variants("", panels))}

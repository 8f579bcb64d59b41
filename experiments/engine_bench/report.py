"""What is said of a comparison: one JSON object, or tables."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.engine_bench.engines import BY_NAME, OURS
from experiments.engine_bench.equality import Reference, compare_tokens
from experiments.engine_bench.measure import Measured
from experiments.engine_bench.workload import Request

_HEADINGS = (
    "engine",
    "output tokens/s",
    "of the best other",
    "equal",
    "near-ties",
    "start, s",
    "compile, s",
    "peak RSS, GiB",
    "cores",
    "disturbed",
    "note",
)


def describe_run(
    threads: int,
    dtype: str,
    measured: Sequence[Measured],
    requests: Sequence[Request],
    reference: Reference,
    bound: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns what was measured with one number of threads and one dtype.

    Args:
      threads: of each engine.
      dtype: of the weights.
      measured: the engines.
      requests: the workload.
      reference: its right tokens.
      bound: what the machine allows, from `bound.describe`, where that is known.
    """
    engines = {
        one.name: _describe_engine(one, dtype, requests, reference) for one in measured
    }
    rates = {
        name: entry["output_tokens_per_s"]
        for name, entry in engines.items()
        if entry["output_tokens_per_s"]
    }
    ours = rates.pop(OURS, None)
    best = max(rates, key=rates.__getitem__, default=None)
    ratio = ours / rates[best] if ours and best else None
    return {
        "threads": threads,
        "dtype": dtype,
        "engines": engines,
        "best_other": best,
        "ratio_vs_best": ratio,
        "bound": bound,
        "share_of_bound": ours / bound["output_tokens_per_s"]
        if ours and bound
        else None,
    }


def summarise(runs: Sequence[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """Returns the whole result.

    Its top level has the engines and the ratio of the last run; `runs` has all of them.

    Args:
      runs: from `describe_run`, at least one.
      **about: what they have in common.
    """
    last = runs[-1]
    names = ("threads", "dtype", "engines", "best_other", "ratio_vs_best")
    names += ("bound", "share_of_bound")
    result = {**about, **{name: last[name] for name in names}, "runs": list(runs)}
    if len({run["dtype"] for run in runs}) > 1:
        result["ratio_of_best_dtypes"] = {
            str(threads): _ratio_of_best_dtypes(
                [run for run in runs if run["threads"] == threads]
            )
            for threads in dict.fromkeys(run["threads"] for run in runs)
        }
    return result


def table(run: dict[str, Any]) -> str:
    """Returns a Markdown table of one run."""
    engines = run["engines"]
    rate_of_best = None
    if run["best_other"]:
        rate_of_best = engines[run["best_other"]]["output_tokens_per_s"]
    rows = [_row(name, entry, rate_of_best) for name, entry in engines.items()]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows)]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |"
        for row in (_HEADINGS, *rows)
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    plural = "s" if run["threads"] > 1 else ""
    title = f"{run['dtype']}, {run['threads']} thread{plural}"
    return "\n".join(
        [title, "", lines[0], rule, *lines[1:], *_about_ours(run), *_about_bound(run)]
    )


def _describe_engine(
    one: Measured, dtype: str, requests: Sequence[Request], reference: Reference
) -> dict[str, Any]:
    total = sum(request.max_tokens for request in requests)
    compile_s = None
    if one.cold_startup_s is not None and one.startup_s is not None:
        compile_s = one.cold_startup_s - one.startup_s
    entry: dict[str, Any] = {
        "output_tokens_per_s": total / one.wall_s if one.wall_s else None,
        "equal_outputs": None,
        "near_ties": None,
        "requests": len(requests),
        "peak_rss_bytes": one.peak_rss_bytes,
        "version": one.version,
        "startup_s": one.startup_s,
        "cold_startup_s": one.cold_startup_s,
        "compile_s": compile_s,
        "warmup_s": one.warmup_s,
        "runs": [
            {
                "wall_s": run.wall_s,
                "cores": run.cores,
                "other_cores": run.other_cores,
                "disturbed": run.disturbed,
            }
            for run in one.runs
        ],
        "settings": one.settings,
        "details": one.details,
        "note": one.problem or BY_NAME[one.name].note,
        "problem": one.problem,
    }
    if one.tokens is not None and one.problem is None:
        equality = compare_tokens(reference, one.tokens, dtype)
        entry["equal_outputs"] = equality.equal
        entry["near_ties"] = equality.near_ties
        entry["difference_gaps"] = equality.gaps
    return entry


def _ratio_of_best_dtypes(runs: Sequence[dict[str, Any]]) -> float | None:
    """Returns our best dtype's rate over the others' best dtype's."""
    ours, others = 0.0, 0.0
    for run in runs:
        for name, entry in run["engines"].items():
            rate = entry["output_tokens_per_s"] or 0.0
            ours, others = (
                (max(ours, rate), others) if name == OURS else (ours, max(others, rate))
            )
    return ours / others if ours and others else None


def _about_ours(run: dict[str, Any]) -> list[str]:
    """Returns what this project promises of its own serving, as a line if it ran."""
    details = run["engines"].get(OURS, {}).get("details", {})
    if "host_syncs_per_token" not in details:
        return []
    return [
        "",
        f"{OURS}: {details['host_syncs_per_token']:.4f} host syncs a token, "
        f"{details['compilations']} compilations while serving, "
        f"{details['iterations']} iterations, "
        f"{details['recomputed_tokens']} tokens computed again",
    ]


def _about_bound(run: dict[str, Any]) -> list[str]:
    """Returns what the machine allows, as a line if that is known."""
    bound = run["bound"]
    if bound is None:
        return []
    line = (
        f"The machine allows {bound['output_tokens_per_s']:.0f} output tokens/s "
        f"({bound['gflops']:.0f} GFLOP/s, {bound['gigabytes_per_s']:.1f} GB/s)"
    )
    if run["share_of_bound"]:
        line += f"; {OURS} reaches {run['share_of_bound']:.0%} of that"
    return ["", line]


def _row(name: str, entry: dict[str, Any], rate_of_best: float | None) -> list[str]:
    rate, runs = entry["output_tokens_per_s"], entry["runs"]
    if rate is None:
        return [name, *["-"] * (len(_HEADINGS) - 2), entry["note"]]
    ratio = rate / rate_of_best if rate_of_best else math.nan
    compile_s = entry["compile_s"]
    return [
        f"{name} ({entry['version']})",
        f"{rate:.0f}",
        f"{ratio:.2f}x" if rate_of_best else "-",
        f"{entry['equal_outputs']}/{entry['requests']}",
        str(entry["near_ties"]),
        f"{entry['startup_s']:.1f}",
        "-" if compile_s is None else f"{compile_s:.1f}",
        f"{entry['peak_rss_bytes'] / 2**30:.2f}",
        f"{statistics.median(run['cores'] for run in runs):.2f}",
        f"{sum(run['disturbed'] for run in runs)} of {len(runs)}",
        entry["note"],
    ]

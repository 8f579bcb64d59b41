"""The report: what each kernel came to, and whether that is what must hold."""

from collections.abc import Sequence
from typing import Any

# What each multiprocessor must have asked for at least, whatever the target needs.
LEAST_LOADS = 32 * 1024

# Of each kind of memory: what a step changes in place, and what it must.
IN_PLACE = ("aliased", "donated")

COLUMNS = (
    ("kernel", 8),
    ("configuration", 32),
    ("target", 7),
    ("regs", 5),
    ("spill", 6),
    ("stack", 6),
    ("SMEM", 8),
    ("HGMMA", 6),
    ("TMA", 4),
    ("in flight", 10),
    ("aliased", 9),
    ("", 0),
)


def faults(row: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a kernel's row; see `kernels.Result.row`."""
    found = []
    for name, allowed in (("spill_bytes", 0), ("stack_bytes", 0), ("local_memory", 0)):
        if row[name] > allowed:
            found.append(f"{name} is {row[name]}, must be {allowed}")
    if row["loads_needed"] is not None:
        if not row["hgmma"]:
            found.append("no tensor-core instruction")
        needed = max(LEAST_LOADS, row["loads_needed"])
        if row["loads_in_flight"] < needed:
            found.append(
                f"{row['loads_in_flight']} bytes of loads in flight, needs {needed}"
            )
    if row["aliased_bytes"] != row["donated_bytes"]:
        found.append(
            f"{row['aliased_bytes']} bytes in place of {row['donated_bytes']} donated"
        )
    return found


def header() -> str:
    """Returns the table's first line."""
    return "".join(f"{name:<{width}s}" for name, width in COLUMNS).rstrip()


def line(row: dict[str, Any]) -> str:
    """Returns a kernel's line of the table."""
    values = (
        row["name"],
        row["config"],
        row["target"],
        row["registers"],
        row["spill_bytes"],
        row["stack_bytes"],
        row["smem_bytes"],
        row["hgmma"],
        row["tma_loads"],
        f"{row['loads_in_flight'] / 1024:.0f} KiB",
        "all" if row["aliased_bytes"] else "-",
        "; ".join(faults(row)),
    )
    cells = (f"{value!s:<{width}s}" for value, (_, width) in zip(values, COLUMNS))
    return "".join(cells).rstrip()


def loads_note(rows: Sequence[dict[str, Any]]) -> str:
    """Returns what the loads in flight must come to, for the targets of some rows."""
    needs = sorted(
        {(row["target"], row["loads_needed"]) for row in rows if row["loads_needed"]}
    )
    if not needs:
        return "Loads in flight: nothing here reads a context."
    parts = ", ".join(f"{need / 1024:.0f} KiB on {target}" for target, need in needs)
    return (
        "Loads in flight for each multiprocessor: at least bandwidth x latency / "
        f"multiprocessors, {parts}; and {LEAST_LOADS // 1024} KiB in any case. Of "
        "kernels that attend; the others move few bytes, and need none."
    )


def step_faults(step: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a compiled step; see `step.compile_step`."""
    found = []
    for memory, prefix in (("device", ""), ("host", "host_")):
        aliased, donated = (step[f"{prefix}{what}_bytes"] for what in IN_PLACE)
        if aliased != donated:
            found.append(
                f"{aliased} bytes in place of {donated} donated, of the {memory}"
            )
        if step[f"{prefix}cache_copies"]:
            found.append(
                f"{step[f'{prefix}cache_copies']} copies of the {memory}'s cache"
            )
    if step["host_bytes"] != step["host_donated_bytes"]:
        found.append(
            f"{step['host_bytes']} bytes in pinned memory, must be "
            f"{step['host_donated_bytes']}"
        )
    if step["device_share"] > 1:
        found.append("does not fit in the device's memory")
    return found


def step_lines(step: dict[str, Any]) -> list[str]:
    """Returns what there is to say of a compiled step."""
    sizes = ", ".join(
        f"{what} {step[name] / 2**20:.0f} MiB"
        for what, name in (
            ("weights", "weight_bytes"),
            ("activations", "activation_bytes"),
            ("KV", "kv_bytes"),
            ("other state", "state_bytes"),
        )
    )
    on_host = []
    if step["host_bytes"]:
        on_host = [
            f"  on the host, pinned: {step['host_bytes'] / 2**20:.0f} MiB, in place "
            f"{step['host_aliased_bytes'] / 2**20:.0f}; copies of that cache: "
            f"{step['host_cache_copies']}"
        ]
    lines = [
        "",
        f"Step of {step['model']} on {step['target']}: {step['config']}",
        f"  {sizes}; {step['device_share']:.1%} of the device's memory",
        f"  in place: {step['aliased_bytes'] / 2**20:.0f} MiB of "
        f"{step['donated_bytes'] / 2**20:.0f}; copies of the cache: "
        f"{step['cache_copies']}",
        *on_host,
        *(f"  WRONG: {fault}" for fault in step_faults(step)),
        "  least time of a decode step: batch, context, us, bound by, tokens/s",
    ]
    for bound in step["rooflines"]:
        by = "memory" if bound["memory_s"] >= bound["compute_s"] else "products"
        lines.append(
            f"  {bound['batch']:6d}{bound['context']:8d}{bound['seconds'] * 1e6:9.0f}"
            f"  {by:9s}{bound['batch'] / bound['seconds']:12.0f}"
        )
    return lines

"""What was found, in lines of text."""

from typing import Any

from experiments.gpu_check.jobs import SECTIONS, Job


def told(job: Job, row: dict[str, Any]) -> str:
    """Returns what a job came to, in a line."""
    if "why_not" in row:
        result = row["why_not"]
    elif "error" in row:
        result = f"error {row['error']:.1e}, at most {row['limit']:.0e}"
    elif job.section == "copy":
        result = f"{row['speed'] / 1e9:.0f} GB/s, read and written"
    elif job.section == "cascade":
        result = _gain(row)
    else:
        result = f"{row['seconds'] * 1e6:.0f} us"
    return f"{job.title}: {result}"


def wrong(found: dict[str, Any]) -> list[str]:
    """Returns the titles of what is wrong, or failed and should not have."""
    rows = [row for section in SECTIONS for row in found[section]]
    titles = [row["title"] for row in rows if row.get("holds") is False]
    return titles + ["engine"] * (found["engine"].get("holds") is False)


def skipped(found: dict[str, Any]) -> list[str]:
    """Returns the titles of what there was no time for."""
    rows = [row for section in SECTIONS for row in found[section]]
    titles = [row["title"] for row in rows if row.get("skipped")]
    return titles + ["engine"] * bool(found["engine"].get("skipped"))


def unchecked(found: dict[str, Any]) -> bool:
    """Whether there was no time to see if some kernel is right."""
    return any(row.get("skipped") for row in found["numbers"])


def table(found: dict[str, Any]) -> str:
    """Returns the summary: shares of the copy's speed, by point and contender.

    Of prefill, shares of the published speed of the tensor cores.
    """
    copy = found["copy"][0].get("speed") if found["copy"] else None
    checked = [row for row in found["numbers"] if not row.get("skipped")]
    faults, missing = wrong(found), skipped(found)
    verdict = f"WRONG: {'; '.join(faults)}" if faults else "all right"
    lines = [
        "",
        f"{found['device']}, jax {found['jax']}; copy "
        + (f"{copy / 1e9:.0f} GB/s" if copy else "not timed"),
        f"kernels: {len(checked)} of {len(found['numbers'])} checked, {verdict}",
    ]
    if missing:
        lines.append(f"no time left for: {'; '.join(missing)}")
    decode = [
        row | dict(share=copy and row.get("speed") and row["speed"] / copy)
        for row in found["bandwidth"]
    ]
    lines += shares(decode, dict(batch=6, length=8, block_size=7))
    lines += shares(found["prefill"], dict(tokens=6, before=8))
    lines += [
        f"{row['title']}: {row.get('why_not') or _gain(row)}"
        for row in found["cascade"]
    ]
    engine = found["engine"]
    if "why_not" in engine:
        lines.append(f"engine: not run, {engine['why_not']}")
    else:
        lines.append(
            f"engine, {engine['weights']} weights: pallas "
            f"{engine['pallas_tokens_per_s']:.0f} tokens/s, xla "
            f"{engine['xla_tokens_per_s']:.0f}; {engine['same_requests']} of "
            f"{engine['requests']} requests the same, "
            f"{engine['same_first_tokens']} first tokens"
        )
    return "\n".join(lines)


def _gain(row: dict[str, Any]) -> str:
    gain = row["plain_seconds"] / row["cascade_seconds"]
    return f"{gain:.2f}x as fast as without"


def shares(rows: list[dict[str, Any]], point: dict[str, int]) -> list[str]:
    """Returns a table of the rows' shares.

    Args:
        rows: with a name, the fields of `point` and, if there is one, a share.
        point: what tells the table's lines apart, and the width of each column.
    """
    points: dict[tuple, dict[str, str]] = {}
    for row in rows:
        share = "-" if row.get("share") is None else f"{row['share']:.0%}"
        points.setdefault(tuple(map(row.get, point)), {})[row["name"]] = share
    names = list(dict.fromkeys(row["name"] for row in rows))
    heads = {name.removesuffix("_size"): width for name, width in point.items()}
    head = "".join(f"{name:>{width}s}" for name, width in heads.items())
    lines = [head + "".join(f"{name:>12s}" for name in names)]
    for at, found in points.items():
        cells = "".join(f"{value:{width}d}" for value, width in zip(at, point.values()))
        lines.append(cells + "".join(f"{found.get(name, '-'):>12s}" for name in names))
    return lines

"""Tables of what the cells of a run came to."""

from typing import Any, NamedTuple

from experiments import tables
from experiments.report.run_record import is_number, label, leaves

# Metrics of a cell that an engine served; others have what their study measures.
_SERVED = (
    "kv_utilization", "output_tokens_per_s", "mean_running", "normalized_latency_s",
    "ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99", "preemptions",
    "blocks_saved", "schedule_us", "hit_tokens", "block_table_bytes", "cow_bytes",
    "host_syncs_per_token", "host_read_bytes_per_token", "compilations",
    "peak_rss_bytes", "block_saving", "cow_bytes_per_token",
    "swapped_bytes_per_token", "recomputed_per_token",
)  # fmt: skip

_CELLS = """\
A cell is a memory manager (max, pow2 and oracle reserve contiguous slots for the
model length, the next power of two of the output, and the true output; paged takes
a block when it is needed) beside a way of batching, on a workload. KV used: live
tokens / reserved slots, mean over iterations. Tokens/s: output tokens, wall clock,
ramp-up and tail included. Ratio: to the first cell of the same workload. Running:
sequences in the batch, mean over iterations. s/token: mean of latency / output
tokens. TTFT: seconds to the first token, median. Preempt: how often a sequence lost
its blocks. Saved: blocks that sharing saves, mean over iterations."""
_TRAFFIC = """\
Saving: 1 - 1 / mean over iterations of (logical / physical blocks). Skipped: tokens
that were not computed since their keys and values were shared. Hits: those of them
that the prefix cache found. Copied: bytes copied on write. Swapped: bytes copied to
the host and back. Recomputed: tokens lost to preemption. Syncs: blocking reads of
device values. Read: bytes that these bring. The last five are for each generated
token."""
_DETAILS = """\
TTFT: seconds to the first token. TPOT: milliseconds between later ones. Scheduling:
microseconds of one iteration with the model taken out. Tables: KiB of block tables.
Copied: MiB copied on write. Syncs: host syncs per generated token. Compiled:
programs compiled while serving. Peak RSS: MiB of the process."""

# So many rows are folded away, to be opened.
_MANY_ROWS = 40


class CellTable(NamedTuple):
    """A table with a line for each cell.

    Attributes:
      title: of its section.
      columns: names of the numbers.
      groups: lines by the group that they stand under; a line is the cell's name and
        its numbers, as text.
      note: what the columns mean.
      folded: whether it is long, and opened on demand.
    """

    title: str
    columns: tuple[str, ...]
    groups: dict[str, list[list[str]]]
    note: str
    folded: bool


def served_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of cells that an engine served."""
    return [row for row in rows if _is_served(row)]


def main_tables(rows: list[dict[str, Any]]) -> list[CellTable]:
    """Returns the tables that come first."""
    served = served_rows(rows)
    others = [row for row in rows if not _is_served(row)]
    found = []
    if served:
        found += [
            _table("Cells", tables.HEADLINE, tables.headline_rows(served), _CELLS),
            _table(
                "Sharing and preemption",
                tables.TRAFFIC,
                tables.traffic_rows(served),
                _TRAFFIC,
            ),
        ]
    return found + _other_tables(others, "Other cells" if served else "Cells")


def further_tables(rows: list[dict[str, Any]]) -> list[CellTable]:
    """Returns those for the reader who wants it all."""
    served = served_rows(rows)
    if not served:
        return []
    lines = tables.detail_rows(served)
    return [_table("More of each cell", tables.DETAILS, lines, _DETAILS)]


def _is_served(row: dict[str, Any]) -> bool:
    metrics = leaves(row["metrics"])
    return (
        all(is_number(metrics.get(name)) for name in _SERVED)
        and metrics["output_tokens_per_s"] > 0
        and isinstance(row["cell"].get("workload"), str)
        and "label" in row
        and "skipped_tokens" in row["details"]
    )


def _other_tables(rows: list[dict[str, Any]], title: str) -> list[CellTable]:
    """Returns a table for each set of metrics that rows have."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        names = [
            name
            for name, value in leaves(row["metrics"]).items()
            if value is None or isinstance(value, bool) or is_number(value)
        ]
        found.setdefault(tuple(names), []).append(row)
    made = []
    for names, some in found.items():
        groups: dict[str, list[list[str]]] = {}
        for row in some:
            values = leaves(row["metrics"])
            group = str(row["cell"].get("workload", "")).replace("_", " ")
            numbers = [_shown(values[name]) for name in names]
            groups.setdefault(group, []).append([label(row), *numbers])
        columns = tuple(name.replace("_", " ").replace(".", " ") for name in names)
        made.append(_table(title, columns, groups, ""))
    return made


def _table(
    title: str, columns: tuple[str, ...], groups: dict[str, list[list[str]]], note: str
) -> CellTable:
    count = sum(map(len, groups.values()))
    return CellTable(title, columns, groups, note, count > _MANY_ROWS)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return tables.number(value)

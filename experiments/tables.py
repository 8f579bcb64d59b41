"""Tables on the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from experiments.attribution import Row, gains, groups
from experiments.claims import Claim
from experiments.sweep import NAMING
from experiments.usage import DISTURBED


def memory_plan_table(title: str, rows: list[tuple[str, str, str]]) -> Table:
    """Returns the memory plan."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


HEADLINE = (
    "KV used",
    "tokens/s",
    "ratio",
    "running",
    "s/token",
    "TTFT",
    "preempt",
    "saved",
)


def headline_table(rows: list[Row]) -> Table:
    """Returns one line for each cell; the ratio is to the first of its workload."""
    return _by_workload("Cells", HEADLINE, headline_rows(rows))


def _by_workload(
    title: str, columns: Iterable[str], lines_of: dict[str, list[list[str]]]
) -> Table:
    """Returns a table with a part for each workload."""
    table = Table(title=title, title_justify="left", padding=(0, 0))
    table.add_column("cell")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for workload, lines in lines_of.items():
        table.add_section()
        table.add_row(f"[bold]{workload}[/bold]")
        for label, *numbers in lines:
            # Names of settings break at their underscores.
            table.add_row(label.replace("_", " "), *numbers)
    return table


def headline_rows(rows: list[Row]) -> dict[str, list[list[str]]]:
    """Returns the cells of `headline_table` as text, by workload."""
    base: dict[str, float] = {}
    found: dict[str, list[list[str]]] = {}
    for row in rows:
        metrics, workload = row["metrics"], row["cell"]["workload"]
        speed = metrics["output_tokens_per_s"]
        first = base.setdefault(workload, speed)
        found.setdefault(workload.replace("_", " "), []).append(
            [
                row["label"],
                f"{100 * metrics['kv_utilization']:.1f}%",
                f"{speed:.1f}",
                f"{speed / first:.2f}x",
                f"{metrics['mean_running']:.1f}",
                f"{metrics['normalized_latency_s']:.3f}",
                f"{metrics['ttft_s']['p50']:.2f}",
                f"{metrics['preemptions']}",
                f"{metrics['blocks_saved']:.1f}",
            ]
        )
    return found


DETAILS = (
    "TTFT p50",
    "p99",
    "TPOT p50",
    "p99",
    "scheduling",
    "tables",
    "copied",
    "syncs",
    "compiled",
    "peak RSS",
)


def detail_rows(rows: list[Row]) -> dict[str, list[list[str]]]:
    """Returns the metrics that `headline_rows` leaves out as text, by workload."""
    found: dict[str, list[list[str]]] = {}
    for row in rows:
        metrics = row["metrics"]
        ttft, tpot = metrics["ttft_s"], metrics["tpot_s"]
        found.setdefault(row["cell"]["workload"].replace("_", " "), []).append(
            [
                row["label"],
                f"{ttft['p50']:.2f}",
                f"{ttft['p99']:.2f}",
                f"{1e3 * tpot['p50']:.1f}",
                f"{1e3 * tpot['p99']:.1f}",
                f"{metrics['schedule_us']:.0f}",
                f"{metrics['block_table_bytes'] / 1024:.1f}",
                f"{metrics['cow_bytes'] / 2**20:.1f}",
                f"{metrics['host_syncs_per_token']:.4f}",
                f"{metrics['compilations']}",
                f"{metrics['peak_rss_bytes'] / 2**20:.0f}",
            ]
        )
    return found


TRAFFIC = (
    "saving",
    "skipped",
    "hits",
    "copied, B",
    "swapped, B",
    "recomputed",
    "syncs",
    "read, B",
)


def traffic_table(rows: list[Row]) -> Table:
    """Returns what sharing saves, and what it and preemption cost."""
    title = "Sharing and preemption (the last five for each generated token)"
    return _by_workload(title, TRAFFIC, traffic_rows(rows))


def traffic_rows(rows: list[Row]) -> dict[str, list[list[str]]]:
    """Returns the cells of `traffic_table` as text, by workload."""
    found: dict[str, list[list[str]]] = {}
    for row in rows:
        metrics = row["metrics"]
        found.setdefault(row["cell"]["workload"].replace("_", " "), []).append(
            [
                row["label"],
                f"{100 * metrics['block_saving']:.1f}%",
                f"{row['details']['skipped_tokens']}",
                f"{metrics['hit_tokens']}",
                f"{metrics['cow_bytes_per_token']:.0f}",
                f"{metrics['swapped_bytes_per_token']:.0f}",
                f"{metrics['recomputed_per_token']:.3f}",
                f"{metrics['host_syncs_per_token']:.4f}",
                f"{metrics['host_read_bytes_per_token']:.0f}",
            ]
        )
    return found


def gains_table(rows: list[Row], swept: Iterable[str] = ()) -> Table | None:
    """Returns the marginal gains, or None if the cells allow none."""
    lines = gain_rows(rows, swept)
    if not lines:
        return None
    table = Table(
        title="Marginal gain in output tokens per second", title_justify="left"
    )
    table.add_column("technique")
    table.add_column("beside")
    table.add_column("gain", justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def gain_rows(rows: list[Row], swept: Iterable[str] = ()) -> list[list[str]]:
    """Returns the lines of `gains_table`, those of each value of a sweep together."""
    keys = [key for key in swept if key not in (*NAMING, "workload.sharing")]
    return [
        [
            gain.technique,
            gain.beside + (f" ({value})" if value else ""),
            f"{gain.ratio:.2f}x",
        ]
        for value, some in groups(rows, keys).items()
        for gain in gains(some)
        if gain.ratio is not None
    ]


def disturbed_line(rows: list[Row]) -> str:
    """Returns a sentence if other programs computed while cells were timed; else ""."""
    others = [
        cores
        for row in rows
        if isinstance(cores := row["details"].get("other_cores"), float)
    ]
    disturbed = sum(cores > DISTURBED for cores in others)
    if not disturbed:
        return ""
    return (
        f"{disturbed} of {len(rows)} cells were disturbed: other programs "
        f"used up to {max(others):.1f} cores while they were timed, so that their "
        "speeds, and what is claimed of speed, say little"
    )


def claims_table(claims: list[Claim]) -> Table:
    """Returns the claims and whether they hold."""
    table = Table(title="Claims", title_justify="left")
    table.add_column("claim")
    table.add_column("expected", justify="right")
    table.add_column("paper", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("holds")
    for claim in claims:
        holds = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[
            claim["holds"]
        ]
        if claim["holds"] is False and claim["measured"] is None:
            holds = "not measured"
        table.add_row(
            claim["id"],
            expected(claim),
            number(claim["paper"]),
            number(claim["measured"]),
            holds,
        )
    return table


def expected(claim: Claim) -> str:
    """Returns what a claim expects, such as `>= 90`; a dash for nothing."""
    if claim["relation"] is None:
        return number(None)
    relation = "" if claim["relation"] == "=" else claim["relation"] + " "
    tolerance = f" ± {number(claim['tolerance'])}" if claim["tolerance"] else ""
    return f"{relation}{number(claim['expected'])}{tolerance}"


def number(value: Any) -> str:
    """Returns a number with as many digits as a reader wants; a dash for None."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"

"""Claims about preemption: the paper's figure 19, swapping against recomputing."""

from experiments.attribution import Row, find, ratio
from experiments.claim import PAPER, Claim, claim, nothing_compiled, tokens_equal
from experiments.token_check import Difference

# Fig 19a: 256 tokens of OPT-13B on an A100, in milliseconds, by block size.
PAPER_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAPER_SWAP_MS = tuple(
    out + back
    for out, back in zip(
        (55.47, 35.64, 25.9, 21.05, 18.54, 17.28, 16.67, 16.3, 16.11),
        (81.97, 53.63, 35.14, 26.05, 21.61, 19.28, 18.24, 17.57, 17.3),
    )
)
PAPER_RECOMPUTE_MS = (36.32, 37.48, 36.93, 38.81, 38.62, 39.02, 38.25, 38.4, 39.12)

_WAY = "engine.preemption"
# Of a token's keys and values. A host that read those of each token once would read 1.
_READ_SHARE_GOAL = 0.1


def preemption(rows: list[Row], differences: list[Difference]) -> list[Claim]:
    """Returns the claims of preemption."""
    costs = preemption_costs(rows)
    sizes = sorted(costs)
    recompute = [costs[size]["recompute"] for size in sizes]
    claims = [
        claim(
            "fig19.recompute_real.flat",
            max(recompute) / min(recompute) if recompute else None,
            source=f"{PAPER} Fig 19a: computing again does not depend on the block "
            "size (36.3 to 39.1 ms)",
            unit="slowest / fastest block size",
            kind="speed",
            at_most=1.25,
            paper=_paper_flatness(sizes) if sizes else None,
        )
    ]
    if sizes:
        first, last = sizes[0], sizes[-1]
        paper = _paper_swap(first) / _paper_swap(last)
        claims.append(
            claim(
                f"fig19.swap_real.{first}_over_{last}",
                costs[first]["swap"] / costs[last]["swap"],
                source=f"{PAPER} Fig 19a: small blocks make many small transfers",
                unit="time to swap out and in, smallest / largest block",
                kind="speed",
                near=paper,
                tolerance=paper / 4,
                paper=paper,
            )
        )
    for size in sizes:
        place = PAPER_BLOCK_SIZES.index(size)
        paper = PAPER_RECOMPUTE_MS[place] / PAPER_SWAP_MS[place]
        claims.append(
            claim(
                f"fig19.recompute_over_swap_real.{size}",
                costs[size]["recompute"] / costs[size]["swap"],
                source=f"{PAPER} Fig 19a",
                unit="time to recompute / time to swap out and in",
                kind="speed",
                near=paper,
                tolerance=paper / 4,
                paper=paper,
                note="there a transfer over PCIe against an A100; on a CPU, a copy "
                "within its memory against its arithmetic",
            )
        )
    for size in sorted({row["cell"]["block_size"] for row in rows}):
        swap, again = (
            find(rows, block_size=size, **{_WAY: way}) for way in ("swap", "recompute")
        )
        claims.append(
            claim(
                f"fig19.speed_real.swap_over_recompute.{size}",
                ratio(swap, again),
                source=f"{PAPER} Fig 19b: much alike at medium block sizes",
                unit="x, output tokens per second",
                kind="speed",
                near=1.0,
                tolerance=0.2,
            )
        )
    return [
        *claims,
        claim(
            "preemption.recomputed_per_token.swap",
            _worst(rows, "swap", "recomputed_per_token"),
            source="the host has room for all that is swapped out",
            unit="recomputed tokens per generated token, worst cell with swapping",
            kind="memory",
            near=0.0,
        ),
        claim(
            "preemption.host_read_share.all",
            max(map(_read_share, rows), default=None),
            source="no key and no value goes to the host but by swapping",
            unit="bytes that the host reads per generated token / bytes of one token's "
            "keys and values, worst cell",
            kind="exact",
            at_most=_READ_SHARE_GOAL,
            note="counts, tokens and the log; what is swapped does not go this way",
        ),
        claim(
            "preemption.preemptions.all",
            float(min((r["metrics"]["preemptions"] for r in rows), default=0)),
            source="there is something to compare",
            unit="preemptions, the cell with the fewest",
            kind="memory",
            at_least=1.0,
        ),
        tokens_equal("preemption", rows, differences),
        nothing_compiled("preemption", rows),
    ]


def preemption_costs(rows: list[Row]) -> dict[int, dict[str, float]]:
    """Returns seconds for a preempted sequence by block size: `swap`, `recompute`.

    Both are measured in every cell; the smaller time counts.
    """
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        cost = row["details"]["preemption_cost"]
        if cost is None:
            continue
        times = {
            "swap": cost["swap_out_s"] + cost["swap_in_s"],
            "recompute": cost["recompute_s"],
        }
        best = found.setdefault(row["cell"]["block_size"], times)
        best |= {name: min(best[name], seconds) for name, seconds in times.items()}
    return found


def _paper_swap(size: int) -> float:
    return PAPER_SWAP_MS[PAPER_BLOCK_SIZES.index(size)]


def _paper_flatness(sizes: list[int]) -> float:
    times = [PAPER_RECOMPUTE_MS[PAPER_BLOCK_SIZES.index(size)] for size in sizes]
    return max(times) / min(times)


def _read_share(row: Row) -> float:
    token = row["details"]["block_bytes"] / row["cell"]["block_size"]
    return row["metrics"]["host_read_bytes_per_token"] / token


def _worst(rows: list[Row], way: str, metric: str) -> float | None:
    some = [r["metrics"][metric] for r in rows if r["cell"][_WAY] == way]
    return max(some, default=None)

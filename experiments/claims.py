"""The claims of each experiment."""

import itertools
from collections.abc import Callable, Iterable

from experiments import preemption_claims, sharing_claims
from experiments.attribution import Row, find, gains, groups, ratio
from experiments.claim import PAPER, Claim, claim, nothing_compiled, tokens_equal
from experiments.errors import UserError
from experiments.token_check import Difference

_UTILIZATION_GOAL = 90.0
_SPEEDUP_GOAL = 2.0
_OVER_CAPACITY_GOAL = 3.0
_SYNCS_GOAL = 0.005
# Token states of vLLM, in %, from the paper's Fig 2.
_PAPER_UTILIZATION = 96.3
# Token states / what is reserved, in %, from the paper's Fig 2.
_PAPER_OF_RESERVED = {"max": 22.4, "pow2": 46.0, "oracle": 60.3}


def check_claims(
    name: str,
    rows: list[Row],
    differences: list[Difference],
    swept: Iterable[str] = (),
) -> list[Claim]:
    """Returns the claims of an experiment.

    Args:
      name: which ones, a key of the table below; empty for none.
      rows: as in `summary.json`, each with its `key`.
      differences: requests whose tokens differ between cells.
      swept: keys of the sweep. Claims are made for each combination of the values of
        those that are not the experiment's own subject.

    Raises:
      UserError: an unknown name.
    """
    if not name:
        return []
    if name not in _CLAIMS:
        raise UserError(
            f"claims is {name!r}; it must be empty or one of {', '.join(_CLAIMS)}"
        )
    make, subjects = _CLAIMS[name]
    apart = groups(rows, [key for key in swept if key not in subjects])
    claims = []
    for suffix, some in apart.items():
        keys = {row["key"] for row in some}
        made = make(some, [d for d in differences if d.key in keys])
        if len(apart) > 1:
            made = [one | {"id": f"{one['id']}.{suffix}"} for one in made]
        claims += made
    return claims


def _headline(rows: list[Row], differences: list[Difference]) -> list[Claim]:
    def offline(memory: str, batching: str) -> Row | None:
        return find(rows, workload="offline", memory=memory, batching=batching)

    paged = offline("paged", "continuous")
    claims = [
        claim(
            "headline.kv_utilization_real.paged",
            _percent(paged, "kv_utilization"),
            source=f"the source's claim of more than 90%; the paper's number: {PAPER} "
            "Fig 2",
            unit="%",
            kind="memory",
            at_least=_UTILIZATION_GOAL,
            paper=_PAPER_UTILIZATION,
        )
    ]
    for memory, of_reserved in _PAPER_OF_RESERVED.items():
        row = offline(memory, "continuous")
        claims.append(
            claim(
                f"headline.kv_utilization_real.{memory}",
                _percent(row, "kv_utilization"),
                source='the source\'s "about 60%" for contiguous reservations',
                unit="%",
                kind="memory",
                near=60.0,
                tolerance=10.0,
                paper=of_reserved,
                note=f"the paper's number: {PAPER} Fig 2, of what is reserved; "
                + _fall(row),
            )
        )
    speedup = ratio(paged, offline("max", "static"))
    claims.append(
        claim(
            "headline.speedup_real.paged_continuous",
            speedup,
            source="the source's 2x over contiguous memory and static batches",
            unit="x",
            kind="speed",
            at_least=_SPEEDUP_GOAL,
            note="output tokens per second, wall clock, over max + static",
        )
    )
    for gain in gains(rows)[:-1]:
        name = gain.technique.replace(" batching", "")
        beside = gain.beside.split()[0]
        claims.append(
            claim(
                f"headline.gain_real.{name}.{beside}",
                gain.ratio,
                source=f"{gain.technique} pays beside {gain.beside}",
                unit="x",
                kind="speed",
                at_least=1.0,
            )
        )
    claims.append(tokens_equal("headline", rows, differences))
    claims.append(
        claim(
            "headline.requests_over_capacity.paged",
            _over_capacity(paged),
            source="ramp-up and tail must not decide the result",
            unit="x",
            kind="exact",
            at_least=_OVER_CAPACITY_GOAL,
            note="requests / sequences that run while others wait, paged + continuous",
        )
    )
    some = [row for row in rows if row["cell"]["workload"] == "offline"]
    claims.append(
        claim(
            "headline.host_syncs_per_token.all",
            max((r["metrics"]["host_syncs_per_token"] for r in some), default=None),
            source="the serving loop is on the device",
            unit="host syncs per generated token, worst offline cell",
            kind="exact",
            at_most=_SYNCS_GOAL,
        )
    )
    return [*claims, nothing_compiled("headline", rows)]


def _block_size(rows: list[Row], differences: list[Difference]) -> list[Claim]:
    by_size = {row["cell"]["block_size"]: row for row in rows}
    sizes = sorted(by_size)
    used = [by_size[size]["metrics"]["kv_utilization"] for size in sizes]
    tables = [by_size[size]["metrics"]["block_table_bytes"] for size in sizes]
    copied = [by_size[size]["metrics"]["cow_bytes"] for size in sizes]
    best = max(
        sizes,
        key=lambda size: by_size[size]["metrics"]["output_tokens_per_s"],
        default=None,
    )
    return [
        claim(
            "block_size.utilization_real.rises",
            float(sum(b > a + 0.01 for a, b in itertools.pairwise(used))),
            source=f"{PAPER} section 7.2: larger blocks waste more of the last one",
            unit="block sizes with more utilisation than the size before",
            kind="memory",
            near=0.0,
        ),
        claim(
            "block_size.table_bytes_real.rises",
            float(sum(b > a for a, b in itertools.pairwise(tables))),
            source="tables of larger blocks are narrower",
            unit="block sizes with larger tables than the size before",
            kind="exact",
            near=0.0,
        ),
        claim(
            "block_size.cow_bytes_real.largest",
            float(copied[-1]) if copied else None,
            source="a write copies a whole block: no less than at the smallest size",
            unit="bytes",
            kind="memory",
            at_least=float(copied[0]) if copied else 0.0,
        ),
        claim(
            "block_size.fastest_real",
            None if best is None else float(best),
            source=f"{PAPER} section 7.2: 16 to 128 are best on ShareGPT",
            unit="tokens",
            kind="speed",
            near=72.0,
            tolerance=56.0,
        ),
        tokens_equal("block_size", rows, differences),
    ]


def _budget(rows: list[Row], differences: list[Difference]) -> list[Claim]:
    key = "engine.full_length_requests"
    claims = []
    for value in dict.fromkeys(row["cell"].get(key) for row in rows):
        some = [row for row in rows if row["cell"].get(key) == value]
        both = find(some, memory="paged", batching="continuous")
        base = find(some, memory="max", batching="static")
        claims.append(
            claim(
                "budget.speedup_real.paged_continuous"
                + (f".{value:g}" if value is not None else ""),
                ratio(both, base),
                source="the source's 2x over contiguous memory and static batches",
                unit="x",
                kind="speed",
                at_least=_SPEEDUP_GOAL,
                note="output tokens per second, wall clock, over max + static",
            )
        )
    return [*claims, tokens_equal("budget", rows, differences)]


def _percent(row: Row | None, metric: str) -> float | None:
    return None if row is None else 100 * row["metrics"][metric]


def _fall(row: Row | None) -> str:
    if row is None:
        return "no such cell here"
    shares = row["metrics"]["kv_breakdown"]
    return "here, of the pool: " + ", ".join(
        f"{name.replace('_', ' ')} {100 * share:.1f}%" for name, share in shares.items()
    )


def _over_capacity(row: Row | None) -> float | None:
    if row is None:
        return None
    details = row["details"]
    running = details["running_while_waiting"] or details["peak_running"]
    return details["workload"]["requests"] / running


_Make = Callable[[list[Row], list[Difference]], list[Claim]]

# How each experiment's claims are made, and which keys they are about.
_ABLATION = (
    "engine.memory",
    "engine.batching",
    "workload.name",
    "workload.sharing",
)
_CLAIMS: dict[str, tuple[_Make, tuple[str, ...]]] = {
    "headline": (_headline, _ABLATION),
    "block_size": (_block_size, ("engine.block_size",)),
    "budget": (_budget, ("engine.full_length_requests", *_ABLATION)),
    "parallel_sampling": (
        sharing_claims.parallel_sampling,
        ("workload.n", "engine.sharing"),
    ),
    "beam_search": (
        sharing_claims.beam_search,
        ("workload.beam_width", "engine.sharing"),
    ),
    "preemption": (
        preemption_claims.preemption,
        ("engine.preemption", "engine.block_size"),
    ),
    "shared_prefix": (
        sharing_claims.shared_prefix,
        ("workload.name", "workload.sharing", "engine.prefix_caching"),
    ),
}

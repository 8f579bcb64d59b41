"""Tokens of a step: whole prompts, or prompts in chunks, and how many at most.

There is no limit on a chunk of its own: it is as much of a prompt as is left of the
step's budget, once each decoding sequence has its token and earlier prompts have theirs
(`paged_jax.chunks`). So the size of the chunks is varied by the budget.
"""

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.studies.study import Scale
from experiments.studies.study_claim import compared_claim
from experiments.studies.variants import SOURCE, Ablation, Variant, of_variant

TITLE = "Token budget and chunked prompts"

_NAME = "ablation_token_budget"
_LOAD = 1.5
# Whole prompts need a budget that the longest fits.
_WHOLE, _CHUNKED = (2048, 2560, 5120), (256, 512, 1024, 2048, 2560, 5120)


def _variants(scale: Scale) -> list[Variant]:
    step = 1 if scale.grid == 1 else 2
    return [
        Variant(
            "in chunks" if chunked else "whole prompts",
            str(budget),
            {
                "load": _LOAD,
                "engine": {"chunked_prefill": chunked, "token_budget": budget},
            },
        )
        for chunked, budgets in ((True, _CHUNKED[::step]), (False, _WHOLE[::step]))
        for budget in budgets
    ]


def _expected(rows: list[Row], mark: str) -> list[Claim]:
    """Smaller chunks hold the decoding sequences up for less."""
    small = of_variant(rows, "tpot_s", "in chunks", "256")
    whole = of_variant(rows, "tpot_s", "whole prompts", "2048")
    return [
        compared_claim(
            f"{_NAME}.tpot_ratio.whole_over_chunks",
            whole,
            small,
            paper=None,
            at_least=1.0,
            unit="x, time between tokens, whole prompts over chunks (budget 2048, 256)",
            kind="predicted",
            source=SOURCE,
            mark=mark,
        )
    ]


_study = Ablation(
    _NAME,
    "most tokens of a step",
    _variants,
    ("capacity", "tokens_per_s", "ttft_s", "tpot_s"),
    _expected,
)
tasks, run, claims, draw = _study.tasks, _study.run, _study.claims, _study.draw
